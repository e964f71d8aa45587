"""Problems of a recipe, which are reported at the key at fault."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from trainer.models.errors import PrepError


@dataclass(frozen=True, slots=True)
class Problem:
    """A conflict of keys, or a value out of range.

    Attributes:
        keys: Keys at fault; the error is reported at the first key set by the user.
        what: What is wrong.
        why: The values that cause it.
        hint: How to fix it.
    """

    keys: tuple[str, ...]
    what: str
    why: str
    hint: str


def problem_if_raised(check: Callable[[], object], *keys: str) -> Iterator[Problem]:
    """Yield the error of a check as a problem of some keys; nothing if the check passes."""
    try:
        check()
    except PrepError as error:
        yield Problem(keys, error.what, error.why, error.hint)
