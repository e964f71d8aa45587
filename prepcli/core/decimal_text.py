"""Decimal numbers in environment variables and names."""

from __future__ import annotations

import re

# 19 digits hold every signed 64-bit integer.
_NUMBER = re.compile("[0-9]{1,19}")


def parse_decimal(text: str) -> int | None:
    """Return the number of a text of at most 19 digits, or None for any other text.

    `int` refuses more than 4,300 digits, and `str.isdecimal` accepts them and digits of other
    scripts.
    """
    if _NUMBER.fullmatch(text):
        return int(text)
    return None
