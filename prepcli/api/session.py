"""Run a command for a caller instead of a terminal."""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from prepcli.console.observer import QUIET
from prepcli.console.progress import NullProgress, Progress
from prepcli.console.ui import Report, Ui


@dataclass(frozen=True, slots=True)
class SilentUi(Ui):
    """A silent `Ui` that reports progress to a given object."""

    reporter: Progress = field(default_factory=NullProgress)

    def progress(self) -> Progress:
        """Return the caller's progress object."""
        return self.reporter


@dataclass(frozen=True, slots=True)
class Outcome:
    """The report of a command, its duration and its warnings."""

    report: Report
    seconds: float
    warnings: tuple[str, ...]


def silent_ui(command: str, progress: Progress | None = None) -> SilentUi:
    """Return the silent `Ui` of a command. `progress` receives its progress."""
    return SilentUi(
        command,
        level=QUIET,
        out=io.StringIO(),
        err=io.StringIO(),
        reporter=progress or NullProgress(),
    )


def run_silently(command: str, call: Callable[[Ui], Report], progress: Progress | None) -> Outcome:
    """Run a command without output.

    Args:
        command: Name of the command.
        call: Function from a `Ui` to the command's report.
        progress: Object that receives progress, or None.

    Raises:
        PrepError: The command failed.
    """
    ui = silent_ui(command, progress)
    started_s = time.monotonic()
    report = call(ui)
    return Outcome(report, time.monotonic() - started_s, tuple(ui.warnings))
