"""Diagnostics of a recipe, collected so that one error reports all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer.models.errors import PrepError, usage_error

MAX_SHOWN = 20  # diagnostics that are listed; the rest are counted


@dataclass(frozen=True, slots=True)
class Diagnostic:
    """One error of a recipe, with its place.

    Attributes:
        place: `FILE:LINE`, `--set`, or the file for a missing key.
        what: What is wrong, as in `PrepError`.
        why: The value that causes it.
        hint: How to fix it.
        line: The line in the file; 0 for `--set` and missing keys.
    """

    place: str
    what: str
    why: str = ""
    hint: str = ""
    line: int = 0

    @property
    def text(self) -> str:
        """The diagnostic as one line of a list."""
        return " - ".join(part for part in (f"{self.place}: {self.what}", self.why, self.hint) if part)


def diagnostics_error(path: Path, diagnostics: Sequence[Diagnostic]) -> PrepError:
    """Return one UsageError that reports all diagnostics.

    The order is: diagnostics of the file by line, of `--set`, of missing keys.

    Args:
        path: The recipe.
        diagnostics: At least one diagnostic.
    """
    ordered = sorted(diagnostics, key=lambda item: (not item.line, item.line, not item.place.startswith("--")))
    if len(ordered) == 1:
        only = ordered[0]
        return usage_error(f"{only.place}: {only.what}", only.why, only.hint)
    lines = [diagnostic.text for diagnostic in ordered[:MAX_SHOWN]]
    lines += [f"and {len(ordered) - MAX_SHOWN:,} more"] if len(ordered) > MAX_SHOWN else []
    hint = "`prep docs recipes` lists all keys"
    return usage_error(f"{path} has {len(ordered):,} errors", "\n".join(lines), hint)
