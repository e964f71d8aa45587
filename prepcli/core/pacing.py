"""Signs of life from long tasks: calls at equal intervals, and notes of a minimum distance."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from prepcli.core.formatting import format_duration, format_time_left
from prepcli.core.observer import Observer
from prepcli.core.progress import LINE_INTERVAL_S, Clock

# The clock of a display changes each second.
TICK_S = 1.0


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
