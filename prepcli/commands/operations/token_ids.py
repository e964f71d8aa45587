"""Token ids as text: the prompts of a command line, and generated tokens without a tokenizer."""

from __future__ import annotations

from collections.abc import Sequence

from prepcli.core.errors import Option, text, usage_error

MAX_ID_DIGITS = 9  # more than any token id has


def parse_token_ids(ids: str) -> list[int]:
    """Return comma-separated token ids. Raise UsageError for other text.

    >>> parse_token_ids("3, 1,4")
    [3, 1, 4]
    """
    numbers = split_token_ids(ids)
    if numbers is None:
        raise usage_error(
            text("invalid {}", Option("tokens", f"{ids:.60}")),
            "it takes comma-separated token ids",
            text("{}", Option("tokens", [[1, 2, 3]])),
        )
    return numbers


def split_token_ids(ids: str) -> list[int] | None:
    """Return comma-separated token ids. None for other text."""
    numbers: list[int] = []
    for word in ids.split(","):
        word = word.strip()
        # `int` also takes digits of other scripts, and underscores.
        if not (word.isascii() and word.isdecimal() and len(word) <= MAX_ID_DIGITS):
            return None
        numbers.append(int(word))
    return numbers


def format_token_ids(ids: Sequence[int]) -> str:
    """Return token ids with commas.

    >>> format_token_ids([3, 1, 4])
    '3,1,4'
    """
    return ",".join(map(str, ids))
