"""Receiver of a long task's progress in bytes.

One thread at a time reports to a Progress.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

Clock = Callable[[], float]

# A log of one day has 8,640 lines.
LINE_INTERVAL_S = 10.0
# Ten times per second looks continuous, also over a slow connection.
REDRAW_INTERVAL_S = 0.1


@runtime_checkable
class Progress(Protocol):
    """Receiver of a long task's progress in bytes.

    An object with the four methods is a Progress. It need not inherit from this class. A function may run several
    tasks, one after the other: each calls `begin`, then `advance` and `note` any number of times, then `end`.
    """

    def begin(self, task: str, total_bytes: int, done_bytes: int = 0) -> None:
        """Begin a task. `done_bytes` of its total are durable from an earlier run."""
        ...

    def advance(self, written_bytes: int) -> None:
        """Count bytes that were written."""
        ...

    def note(self, text: str) -> None:
        """Show the current step behind the numbers. Replaces the last note."""
        ...

    def end(self) -> None:
        """End the task: it is complete, or interrupted if bytes are missing."""
        ...


class NullProgress:
    """A Progress without a display, the default."""

    def begin(self, task: str, total_bytes: int, done_bytes: int = 0) -> None:
        """Ignore the call."""

    def advance(self, written_bytes: int) -> None:
        """Ignore the call."""

    def note(self, text: str) -> None:
        """Ignore the call."""

    def end(self) -> None:
        """Ignore the call."""
