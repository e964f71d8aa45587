"""The receiver of an operation's notes, warnings and progress."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from prepcli.core.errors import PrepError
from prepcli.core.progress import NullProgress, Progress

# Verbosity: -q, default, -v (one line per leaf), -vv (one line per slab).
QUIET = -1
NORMAL = 0
LEAVES = 1
SLABS = 2

Segment = tuple[str, str]  # text and rich style
Line = Sequence[Segment]


@runtime_checkable
class Observer(Protocol):
    """Receiver of the notes, the warnings and the progress of an operation.

    An object with the three methods is an Observer. It need not inherit from this class.
    """

    def note(self, text: str, level: int = NORMAL) -> None:
        """Show a line. Levels above 0 are details, such as one line per leaf."""
        ...

    def warn(self, text: str) -> None:
        """Show a warning about a problem that does not stop the operation."""
        ...

    def progress(self) -> Progress:
        """Return a Progress for the next task. The task reports its bytes to it."""
        ...


@runtime_checkable
class CommandObserver(Observer, Protocol):
    """Observer of an operation called by the command line. Errors then name options, such as `--mesh`.

    The parser of the command line has already checked the types of the arguments.
    """

    @property
    def command(self) -> str:
        """Name of the command."""
        ...

    @property
    def level(self) -> int:
        """Verbosity, from QUIET to SLABS."""
        ...


@runtime_checkable
class StreamObserver(Observer, Protocol):
    """Observer that can show a text while it is generated."""

    @property
    def can_stream(self) -> bool:
        """Whether text is shown at once, as on a terminal."""
        ...

    def stream_line(self) -> AbstractContextManager[Callable[[str], None]]:
        """Return a context with a function that shows the next piece of the text."""
        ...


class Block(Protocol):
    """Lines that are replaced by the next ones, on a terminal or in a notebook."""

    @property
    def width(self) -> int:
        """Columns of the lines."""
        ...

    def draw(self, lines: Sequence[Line]) -> None:
        """Replace the lines."""
        ...

    def close(self) -> None:
        """Leave the last lines."""
        ...


@runtime_checkable
class RunObserver(Observer, Protocol):
    """Observer of a training run with one or several processes, and a view redrawn in place."""

    def for_process(self, process: int | None, *, all_print: bool = False) -> RunObserver:
        """Return the observer of one process.

        Args:
            process: Index of the process, or None outside of a job of several processes.
            all_print: Show the notes of all processes, each with the index of its process.
        """
        ...

    def open_live_block(self) -> Block | None:
        """Return lines to redraw in place, or None if the output is for a log."""
        ...

    def show_final_error(self, error: PrepError) -> int:
        """Show the error that ends this process at once, and return the exit code.

        A thread calls it while the main thread may be anywhere, for example inside a live block.
        """
        ...


@dataclass(frozen=True, slots=True)
class SilentObserver:
    """An Observer that shows neither notes nor warnings, and passes progress on."""

    reporter: Progress = field(default_factory=NullProgress)

    def note(self, text: str, level: int = NORMAL) -> None:
        """Ignore a line."""

    def warn(self, text: str) -> None:
        """Ignore a warning."""

    def progress(self) -> Progress:
        """Return the given Progress."""
        return self.reporter


@dataclass(frozen=True, slots=True)
class SilentCommandObserver(SilentObserver):
    """The observer of an operation called by another operation.

    Errors of the inner operation keep references such as `Option("mesh")`. The outer operation turns them into
    `--mesh` for the command line, or `mesh=` for a Python caller.
    """

    command: str = ""
    level: int = QUIET


@dataclass(frozen=True, slots=True)
class OneProcessObserver:
    """RunObserver of one process, made from an Observer. It has no live view."""

    inner: Observer

    def note(self, text: str, level: int = NORMAL) -> None:
        """Pass a line on."""
        self.inner.note(text, level)

    def warn(self, text: str) -> None:
        """Pass a warning on."""
        self.inner.warn(text)

    def progress(self) -> Progress:
        """Return the Progress of the inner observer."""
        return self.inner.progress()

    def for_process(self, process: int | None, *, all_print: bool = False) -> OneProcessObserver:
        """Return this observer: every process of a job has its own observer."""
        return self

    def open_live_block(self) -> Block | None:
        """Return None: there is no terminal."""
        return None

    def show_final_error(self, error: PrepError) -> int:
        """Return the exit code of an error."""
        return error.code


@dataclass(frozen=True, slots=True)
class RecordingObserver:
    """An Observer that passes everything on and keeps the warnings, for the result of the operation."""

    inner: Observer
    warnings: list[str] = field(default_factory=list)

    def note(self, text: str, level: int = NORMAL) -> None:
        """Pass a line on."""
        self.inner.note(text, level)

    def warn(self, text: str) -> None:
        """Keep a warning and pass it on."""
        self.warnings.append(text)
        self.inner.warn(text)

    def progress(self) -> Progress:
        """Return the Progress of the inner observer."""
        return self.inner.progress()


def observer_of(progress: Progress | Observer | None) -> Observer:
    """Return the Observer for the argument `progress` of an operation."""
    # `isinstance` of a protocol looks for the names of its methods only. A Progress has `note` too,
    # but neither `warn` nor `progress`.
    if isinstance(progress, Observer):
        return progress
    return SilentObserver(progress or NullProgress())
