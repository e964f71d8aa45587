"""Suggestions for misspelled names."""

from __future__ import annotations

from collections.abc import Collection
from difflib import get_close_matches

# Similarity from 0 to 1 that a suggestion needs.
CUTOFF = 0.6


def suggest(text: str, candidates: Collection[str]) -> str | None:
    """Return the most similar candidate to a text, or None if no candidate is similar."""
    return next(iter(get_close_matches(text, candidates, n=1, cutoff=CUTOFF)), None)


def did_you_mean_start(text: str, candidates: Collection[str]) -> str:
    """Return a hint with the candidates that start with a text in any case, else as `did_you_mean` does."""
    longer = [f"`{name}`" for name in candidates if name.lower().startswith(text.lower())]
    if not text or not longer:
        return did_you_mean(text, candidates)
    return f"did you mean {' or '.join(longer)}?"


def did_you_mean(text: str, candidates: Collection[str]) -> str:
    """Return a hint with the most similar candidate, or an empty text if no candidate is similar."""
    # The time of difflib grows with the square of the length.
    suggestion = suggest(text[:60], candidates)
    if suggestion:
        return f"did you mean `{suggestion}`?"
    return ""
