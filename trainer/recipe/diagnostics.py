"""Faults of a recipe, collected so that one error reports all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer.models.errors import PrepError, usage_error

MAX_SHOWN = 20  # faults that are listed; the rest are counted


@dataclass(frozen=True, slots=True)
class Diagnostic:
    """One thing that is wrong with a recipe.

    Attributes:
        place: `FILE:LINE`, `--set`, or the file for what is missing.
        what, why, hint: As in `PrepError`.
        line: The line in the file; 0 for `--set` and for what is missing.
    """

    place: str
    what: str
    why: str = ""
    hint: str = ""
    line: int = 0

    @property
    def text(self) -> str:
        """The fault as one line of a list."""
        return " - ".join(part for part in (f"{self.place}: {self.what}", self.why, self.hint) if part)


def diagnostics_error(path: Path, diagnostics: Sequence[Diagnostic]) -> PrepError:
    """Return one usage error that reports every fault: by line, then those of `--set`, then what is missing.

    Args:
        path: The recipe.
        faults: At least one.
    """
    ordered = sorted(diagnostics, key=lambda fault: (not fault.line, fault.line, not fault.place.startswith("--")))
    if len(ordered) == 1:
        only = ordered[0]
        return usage_error(f"{only.place}: {only.what}", only.why, only.hint)
    lines = [fault.text for fault in ordered[:MAX_SHOWN]]
    lines += [f"and {len(ordered) - MAX_SHOWN:,} more"] if len(ordered) > MAX_SHOWN else []
    return usage_error(f"{path} has {len(ordered):,} errors", "\n".join(lines), "docs/recipes.md has every key")
