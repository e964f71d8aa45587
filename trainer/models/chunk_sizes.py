"""The meaning of chunk sizes in recipes."""

from __future__ import annotations

WHOLE = -1  # a chunk of all tokens


def chunk_length(chunk_size: int, length: int) -> int:
    """Return the tokens of a chunk of a sequence of `length` tokens."""
    return length if chunk_size == WHOLE else min(chunk_size, length)
