"""Displays of progress in bytes: a bar, lines or JSON objects.

The clock is an argument, so that tests need not sleep.
"""

from __future__ import annotations

import json
import math
import os
import time
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TextIO

from prepcli.core.formatting import (
    format_bytes_of,
    format_clock,
    format_duration,
    format_rate,
    format_time_left,
    printable_line,
)
from prepcli.core.observer import (
    LINE_INTERVAL_S,
    REDRAW_INTERVAL_S,
    Clock,
    NullProgress,
    Progress,
)

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress

Mode = Literal["auto", "bar", "lines", "json", "none"]
Event = Literal["begin", "progress", "note", "end"]

EVENT_INTERVAL_S = 1.0
# At most 61 samples are in memory: 30 s of two per second, and one before.
SAMPLE_INTERVAL_S = 0.5
ETA_WINDOW_S = 30.0
BAR_CELLS = 30


@dataclass(slots=True)
class ProgressMeter:
    """Bytes, rate and remaining time of a task. The rate covers this run.

    The remaining time follows from the rate of the last 30 s.
    """

    task: str
    total_bytes: int
    done_bytes: int
    clock: Clock
    label: str = field(init=False)  # the task for a terminal
    resumed_bytes: int = field(init=False)
    started_s: float = field(init=False)
    samples: deque[tuple[float, int]] = field(init=False, default_factory=deque)  # (clock, done)

    def advance(self, written_bytes: int) -> float:
        """Count the bytes, and return the time, to save the caller a second clock call."""
        now = self.clock()
        self.done_bytes += written_bytes
        if now - self.samples[-1][0] >= SAMPLE_INTERVAL_S:
            self.samples.append((now, self.done_bytes))
        # samples[0] stays the newest sample of at least ETA_WINDOW_S ago.
        while len(self.samples) > 1 and now - self.samples[1][0] >= ETA_WINDOW_S:
            self.samples.popleft()
        return now

    def __post_init__(self) -> None:
        # The task may name a checkpoint, e.g. `read A`.
        self.label = printable_line(self.task)
        self.resumed_bytes, self.started_s = self.done_bytes, self.clock()
        self.samples.append((self.started_s, self.done_bytes))

    @property
    def percent(self) -> int:
        """Percentage, rounded down so that 100 means complete. An empty task is complete."""
        if not self.total_bytes:
            return 100
        return 100 * self.done_bytes // self.total_bytes

    def elapsed_s(self) -> float:
        """Return the seconds since the task began."""
        return self.clock() - self.started_s

    def rate(self) -> float | None:
        """Return the bytes per second of this run, None before time has passed and bytes were written."""
        took_s = self.elapsed_s()
        written_bytes = self.done_bytes - self.resumed_bytes
        if took_s <= 0 or written_bytes <= 0:
            return None
        return written_bytes / took_s

    def eta_s(self) -> float | None:
        """Return the remaining seconds at the rate of the last 30 s, None if that rate is unknown or zero."""
        then_s, then_bytes = self.samples[0]
        now_s = self.clock()
        gained_bytes = self.done_bytes - then_bytes
        if now_s <= then_s or gained_bytes <= 0:
            return None
        # remaining bytes / rate, where rate = gained bytes / (now - then)
        return max(0, self.total_bytes - self.done_bytes) * (now_s - then_s) / gained_bytes

    def bytes_and_rate(self) -> str:
        """Return for example `11.15 of 24.24 GiB  870 MiB/s`, without the rate while it is unknown."""
        done = format_bytes_of(self.done_bytes, self.total_bytes)
        rate = self.rate()
        if rate is None:
            return done
        return f"{done}  {format_rate(rate)}"

    def status(self, note: str) -> str:
        """Return bytes, rate, remaining time and the note."""
        text = self.bytes_and_rate()
        eta_s = self.eta_s()
        if eta_s is not None:
            text += f"  {format_time_left(eta_s)}"
        if note:
            text += f"   {printable_line(note)}"
        return text

    def summary(self) -> str:
        """Return bytes, rate and duration: `done in 32.7 s`, or `interrupted after 5.0 s`."""
        ending = "interrupted after"
        if self.done_bytes >= self.total_bytes:
            ending = "done in"
        return f"{self.bytes_and_rate()}  {ending} {format_duration(self.elapsed_s())}"


class _Display(ABC):
    """Progress of one task at a time, shown on a stream.

    Attributes:
        interval_s: Least time between two displays of the numbers.
        note_interval_s: The same after a note.
    """

    interval_s: float
    note_interval_s: float

    def __init__(self, stream: TextIO, clock: Clock = time.monotonic) -> None:
        self.stream = stream
        self._clock = clock
        self._meter: ProgressMeter | None = None
        self._note = ""
        self._shown_at_s = 0.0

    def begin(self, task: str, total_bytes: int, done_bytes: int = 0) -> None:
        """Show the start of a task."""
        self._meter = ProgressMeter(task, total_bytes, done_bytes, self._clock)
        self._note = ""
        self._shown_at_s = self._meter.started_s
        self._show("begin", self._meter)

    def advance(self, written_bytes: int) -> None:
        """Show the bytes if the last display is old enough."""
        if self._meter is not None:
            now = self._meter.advance(written_bytes)
            if now - self._shown_at_s >= self.interval_s:
                self._shown_at_s = now
                self._show("progress", self._meter)

    def note(self, text: str) -> None:
        """Show the note behind the numbers, at once or the next time."""
        self._note = text
        if self._meter is not None and self._clock() - self._shown_at_s >= self.note_interval_s:
            self._show("note", self._meter)

    def end(self) -> None:
        """Show the end of the task. It is interrupted if bytes are missing."""
        if self._meter is not None:
            self._show("end", self._meter)
        self._meter = None

    @abstractmethod
    def _show(self, event: Event, meter: ProgressMeter) -> None:
        """Show the numbers of a task at an event."""

    def _state(self, event: Event, meter: ProgressMeter) -> str:
        """Return the numbers of a task in words."""
        if event == "begin":
            return format_bytes_of(meter.done_bytes, meter.total_bytes)
        if event == "end":
            return meter.summary()
        return meter.status(self._note)


class LineProgress(_Display):
    """Progress for logs: one line at the start, every 10 s, and at the end."""

    interval_s = LINE_INTERVAL_S
    note_interval_s = math.inf

    def _show(self, event: Event, meter: ProgressMeter) -> None:
        text = self._state(event, meter)
        print(f"{meter.label}  {meter.percent:3d}%  {text}", file=self.stream, flush=True)


class JsonProgress(_Display):
    """Progress for programs: one JSON object per line at the start, every second, at each note, and at the end.

    An interrupted task has `done` below `total` in its event `end`.
    """

    interval_s = EVENT_INTERVAL_S
    note_interval_s = 0.0

    def _show(self, event: Event, meter: ProgressMeter) -> None:
        fields = {
            "t": round(meter.elapsed_s(), 3),
            "event": event,
            "task": meter.task,
            "done": meter.done_bytes,
            "total": meter.total_bytes,
        }
        if event == "note":
            fields["text"] = self._note
        print(json.dumps(fields), file=self.stream, flush=True)


class BarProgress(_Display):
    """Progress for terminals: one line, redrawn in place at most ten times per second."""

    interval_s = note_interval_s = REDRAW_INTERVAL_S
    _bar: RichProgress | None = None

    def _show(self, event: Event, meter: ProgressMeter) -> None:
        if event == "begin":
            if self._bar is not None:
                # An error has left the last task without its `end`. Two bars would overwrite each other.
                self._bar.stop()
            self._bar = _rich_bar(self.stream)
            self._bar.add_task(meter.label, total=max(meter.total_bytes, 1), state="")
            self._bar.start()
        if self._bar is None:
            return
        self._shown_at_s = self._clock()
        state = self._state(event, meter)
        if event == "end" and meter.done_bytes >= meter.total_bytes:
            # The full bar shows that the task is done. Otherwise the words have to.
            state = f"{meter.bytes_and_rate()}  {format_clock(meter.elapsed_s())}"
        # One column stays free: some terminals break the line after a character in the last one.
        width = self._bar.console.width
        taken = len(meter.label) + 2 + _bar_cells(width) + 2
        state = f"{meter.percent:3d}%  {state}"[: max(0, width - taken - 1)]
        # The bar of an empty task has a total of 1, and is full.
        completed = meter.done_bytes if meter.total_bytes else 1
        self._bar.update(self._bar.task_ids[0], completed=completed, state=state, refresh=True)
        if event == "end":
            # It stays on the screen.
            self._bar.stop()
            self._bar = None


def _bar_cells(width: int) -> int:
    """Return the width of the bar: short on narrow lines, where the numbers matter more."""
    return BAR_CELLS if width >= 100 else 10


def _rich_bar(stream: TextIO) -> RichProgress:
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as RichProgress
    from rich.table import Column

    console = Console(file=stream, force_terminal=True)
    return RichProgress(
        # Paths and names may have brackets, e.g. `[draft]`, which rich would take for markup and drop.
        TextColumn("{task.description} ", markup=False, table_column=Column(no_wrap=True)),
        BarColumn(bar_width=_bar_cells(console.width)),
        TextColumn(" {task.fields[state]}", markup=False, table_column=Column(no_wrap=True)),
        console=console,
        auto_refresh=False,
        redirect_stdout=False,
        redirect_stderr=False,
    )


def can_redraw(stream: TextIO) -> bool:
    """Return whether a stream is a terminal that can redraw lines.

    FORCE_COLOR makes rich treat pipes as terminals. Only isatty and TERM are used here.
    """
    return stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb")


def make_progress(mode: Mode, stream: TextIO, clock: Clock = time.monotonic) -> Progress:
    """Return the Progress of a mode of `--progress`.

    `auto` is a bar on a terminal that can redraw a line, otherwise lines.
    """
    match mode:
        case "none":
            return NullProgress()
        case "json":
            return JsonProgress(stream, clock)
        case "bar":
            return BarProgress(stream, clock)
        case "auto" if can_redraw(stream):
            return BarProgress(stream, clock)
        case "auto" | "lines":
            return LineProgress(stream, clock)
