"""Numbers with their nouns, in messages."""

from __future__ import annotations


def count_text(number: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun, in the plural unless it is 1.

    >>> count_text(1, "invalid line"), count_text(1024, "entry", "entries")
    ('1 invalid line', '1,024 entries')
    """
    if number == 1:
        return f"1 {noun}"
    return f"{number:,} {plural or noun + 's'}"
