"""Intervals between the events of a run: whole steps, or parts of an epoch."""

from __future__ import annotations

from fractions import Fraction

# Steps. 0 means never.
Interval = int | Fraction


def is_due(step: int, every: Interval) -> bool:
    """Return whether an event happens after a step: the first step that completes a multiple of the interval."""
    # With every = 5/2, the quotients of steps 1 to 5 are 0 0 1 1 2: it happens after steps 3 and 5.
    return bool(every) and step // every > (step - 1) // every
