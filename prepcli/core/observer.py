"""The receivers of an operation's notes, warnings and progress in bytes, and signs of life from long tasks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from prepcli.core.errors import PrepError
from prepcli.core.formatting import format_duration, format_time_left

Clock = Callable[[], float]

# A log of one day has 8,640 lines.
LINE_INTERVAL_S = 10.0
# Ten times per second looks continuous, also over a slow connection.
REDRAW_INTERVAL_S = 0.1
# Verbosity: -q, default, -v (one line per leaf), -vv (with the output of libraries).
QUIET = -1
NORMAL = 0
LEAVES = 1
LIBRARIES = 2
Segment = tuple[str, str]  # text and rich style
Line = Sequence[Segment]
# The clock of a display changes each second.
TICK_S = 1.0


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


class LockedProgress:
    """A Progress that several threads call. It calls the inner one from one thread at a time."""

    def __init__(self, inner: Progress) -> None:
        self.inner = inner
        self._lock = threading.Lock()

    def begin(self, task: str, total_bytes: int, done_bytes: int = 0) -> None:
        """Begin a task."""
        with self._lock:
            self.inner.begin(task, total_bytes, done_bytes)

    def advance(self, written_bytes: int) -> None:
        """Count bytes that were written."""
        with self._lock:
            self.inner.advance(written_bytes)

    def note(self, text: str) -> None:
        """Show the current step."""
        with self._lock:
            self.inner.note(text)

    def end(self) -> None:
        """End the task."""
        with self._lock:
            self.inner.end()


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
        """Verbosity, from QUIET to LIBRARIES."""
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
class _Forwarding:
    """An Observer that passes everything on."""

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


@dataclass(frozen=True, slots=True)
class OneProcessObserver(_Forwarding):
    """RunObserver of one process, made from an Observer. It has no live view."""

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
class RecordingObserver(_Forwarding):
    """An Observer that passes everything on and keeps the warnings, for the result of the operation."""

    warnings: list[str] = field(default_factory=list)

    def warn(self, text: str) -> None:
        """Keep a warning and pass it on."""
        self.warnings.append(text)
        self.inner.warn(text)


def observer_of(progress: Progress | Observer | None) -> Observer:
    """Return the Observer for the argument `progress` of an operation."""
    # `isinstance` of a protocol looks for the names of its methods only. A Progress has `note` too,
    # but neither `warn` nor `progress`.
    if isinstance(progress, Observer):
        return progress
    return SilentObserver(progress or NullProgress())


@contextmanager
def ticking(tick: Callable[[], None], every_s: float = TICK_S) -> Iterator[None]:
    """Call a function in a thread at equal intervals, also while the main thread compiles, until the block ends."""
    has_ended = threading.Event()

    def run() -> None:
        # A closed terminal is an error of the main thread, which prints the messages.
        with suppress(OSError):
            while not has_ended.wait(every_s):
                tick()

    thread = threading.Thread(target=run, name="prep-ticks", daemon=True)
    thread.start()
    try:
        yield
    finally:
        has_ended.set()
        # The last tick comes before later lines, unless the terminal is stopped.
        thread.join(TICK_S)


class PacedNotes:
    """Notes of a task for a log: one per event, and one about its progress if the last note is old."""

    def __init__(
        self, observer: Observer, every_s: float = LINE_INTERVAL_S, clock: Clock = time.monotonic
    ) -> None:
        """Create the notes. At most `every_s` seconds are between two of them, if something ticks."""
        self._observer = observer
        # At the next tick, a line could be too late.
        self._due_s = every_s - TICK_S
        self._clock = clock
        self._noted_at_s = self._started_s = clock()
        self._task = ""
        # Finished and all parts of the task, such as batches. None if it has no parts.
        self._parts: tuple[int, int] | None = None

    def note(self, text: str) -> None:
        """Show a line about an event."""
        self._noted_at_s = self._clock()
        self._observer.note(text)

    def note_if_due(self, describe: Callable[[], str]) -> None:
        """Show a line about progress if the last line is old enough."""
        if self._clock() - self._noted_at_s >= self._due_s:
            self.note(describe())

    def begin(self, task: str) -> None:
        """Set the task that later lines name."""
        self._task = task
        self._parts = None
        self._started_s = self._clock()

    def on_progress(self, done: int, total: int) -> None:
        """Set the finished and all parts of the task, and show them if the last line is old enough."""
        self._parts = (done, total)
        self.tick()

    def tick(self) -> None:
        """Show the task, and its progress or duration, if the last line is old enough."""
        self.note_if_due(self._task_text)

    def _task_text(self) -> str:
        """Return for example `compiling, 20 s` or `evaluating text: 12/40, 31 s left`."""
        elapsed_s = self._clock() - self._started_s
        if self._parts is None:
            return f"{self._task}, {format_duration(elapsed_s)}"
        done, total = self._parts
        text = f"{self._task}: {done}/{total}"
        if done:
            text += f", {format_time_left(elapsed_s * (total - done) / done)}"
        return text
