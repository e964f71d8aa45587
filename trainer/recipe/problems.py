"""Problems of a recipe, and the diagnostics that one error reports together, each with its place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from prepcli.core.errors import Command, PrepError, Text, join_texts, text, usage_error

# Diagnostics that are listed. The rest are counted.
MAX_SHOWN = 20
ALL_KEYS_HINT = text("{} lists all keys", Command("docs", "recipes"))


@dataclass(frozen=True, slots=True)
class Problem:
    """A conflict of keys, or a value out of range.

    Attributes:
        keys: Keys at fault. The error is reported at the first key set by the user.
        what: What is wrong.
        why: The values that cause it.
        hint: How to fix it.
    """

    keys: tuple[str, ...]
    what: str
    why: str
    hint: str


def problem_if_raised(check: Callable[[], object], *keys: str) -> Iterator[Problem]:
    """Yield a problem of these keys if the check raises an error."""
    try:
        check()
    except PrepError as error:
        yield Problem(keys, error.what, error.why, error.hint)


@dataclass(frozen=True, slots=True)
class Diagnostic:
    """One error of a recipe, with its place.

    Attributes:
        place: `FILE:LINE`, the option for overrides, or the file for a missing key.
        what: What is wrong, as in `PrepError`.
        why: The value that causes it.
        hint: How to fix it.
        line: The line in the file, or 0 for overrides and missing keys.
        is_override: Whether the place is an override.
    """

    place: str
    what: str
    why: str = ""
    hint: str = ""
    line: int = 0
    is_override: bool = False

    @property
    def text(self) -> Text:
        """The diagnostic as one line of a list."""
        what = text("{}: {}", self.place, self.what)
        return join_texts(" - ", [part for part in (what, self.why, self.hint) if part])


def diagnostics_error(path: Path, diagnostics: Sequence[Diagnostic]) -> PrepError:
    """Return one UsageError that reports all diagnostics.

    The order is: diagnostics of the file by line, of overrides, of missing keys.

    Args:
        path: The recipe.
        diagnostics: At least one diagnostic.
    """
    # False sorts before True. Lines of the file come first. Overrides and missing keys both have line 0.
    ordered = sorted(diagnostics, key=lambda item: (not item.line, item.line, not item.is_override))
    if len(ordered) == 1:
        only = ordered[0]
        what = text("{}: {}", only.place, only.what)
        return usage_error(what, only.why, only.hint or ALL_KEYS_HINT)
    lines: list[str] = [diagnostic.text for diagnostic in ordered[:MAX_SHOWN]]
    if len(ordered) > MAX_SHOWN:
        lines.append(f"and {len(ordered) - MAX_SHOWN:,} more")
    what = f"{path} has {len(ordered):,} errors"
    return usage_error(what, join_texts("\n", lines), ALL_KEYS_HINT)
