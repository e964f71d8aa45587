"""Did you mean: one guess or none."""

from __future__ import annotations

from collections.abc import Collection
from difflib import get_close_matches

CUTOFF = 0.6


def suggest(text: str, candidates: Collection[str]) -> str | None:
    """The one candidate that was probably meant, None where nothing is near."""
    return next(iter(get_close_matches(text, candidates, n=1, cutoff=CUTOFF)), None)
