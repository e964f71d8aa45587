"""Intervals between the events of a run: whole steps, or parts of an epoch."""

from __future__ import annotations

from fractions import Fraction

Interval = int | Fraction  # steps, 0 for never


def is_due(step: int, every: Interval) -> bool:
    """Return whether an event happens after a step: the first step that completes a multiple of the interval."""
    return bool(every) and step // every > (step - 1) // every
