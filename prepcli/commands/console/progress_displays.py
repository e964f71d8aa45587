"""Displays of progress in bytes: a bar, lines or JSON objects.

The clock is an argument, so that tests need not sleep.
"""

from __future__ import annotations

import json
import os
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TextIO

from prepcli.core.escaping import printable_line
from prepcli.core.formatting import (
    format_bytes_of,
    format_clock,
    format_duration,
    format_rate,
    format_time_left,
)
from prepcli.core.progress import (
    LINE_INTERVAL_S,
    REDRAW_INTERVAL_S,
    Clock,
    NullProgress,
    Progress,
)

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress

Mode = Literal["auto", "bar", "lines", "json", "none"]

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
    resumed_bytes: int = field(init=False)
    started_s: float = field(init=False)
    samples: deque[tuple[float, int]] = field(init=False, default_factory=deque)  # (clock, done)

    def __post_init__(self) -> None:
        self.resumed_bytes, self.started_s = self.done_bytes, self.clock()
        self.samples.append((self.started_s, self.done_bytes))

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

    @property
    def label(self) -> str:
        """The task for a terminal. It may name a checkpoint, e.g. `read A`."""
        return printable_line(self.task)

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


@dataclass(slots=True)
class LineProgress:
    """Progress for logs: one line at the start, every 10 s, and at the end."""

    stream: TextIO
    clock: Clock = time.monotonic
    meter: ProgressMeter | None = None
    last_note: str = ""
    printed_at_s: float = 0.0

    def begin(self, task: str, total_bytes: int, done_bytes: int = 0) -> None:
        """Print the first line. The next one is due in 10 s."""
        self.meter = ProgressMeter(task, total_bytes, done_bytes, self.clock)
        self.last_note = ""
        self.printed_at_s = self.meter.started_s
        self._write_line(self.meter, format_bytes_of(done_bytes, total_bytes))

    def advance(self, written_bytes: int) -> None:
        """Print a line if the last one is 10 s old."""
        if self.meter is None:
            return
        now = self.meter.advance(written_bytes)
        if now - self.printed_at_s >= LINE_INTERVAL_S:
            self.printed_at_s = now
            self._write_line(self.meter, self.meter.status(self.last_note))

    def note(self, text: str) -> None:
        """Keep the note for the next line."""
        self.last_note = text

    def end(self) -> None:
        """Print the last line."""
        if self.meter is not None:
            self._write_line(self.meter, self.meter.summary())
        self.meter = None

    def _write_line(self, meter: ProgressMeter, text: str) -> None:
        print(f"{meter.label}  {meter.percent:3d}%  {text}", file=self.stream, flush=True)


@dataclass(slots=True)
class JsonProgress:
    """Progress for programs: one JSON object per line at the start, every second, at each note, and at the end."""

    stream: TextIO
    clock: Clock = time.monotonic
    meter: ProgressMeter | None = None
    printed_at_s: float = 0.0

    def begin(self, task: str, total_bytes: int, done_bytes: int = 0) -> None:
        """Print the event `begin`."""
        self.meter = ProgressMeter(task, total_bytes, done_bytes, self.clock)
        self.printed_at_s = self.meter.started_s
        self._write_event(self.meter, "begin")

    def advance(self, written_bytes: int) -> None:
        """Print the event `progress` if the last one is a second old."""
        if self.meter is None:
            return
        now = self.meter.advance(written_bytes)
        if now - self.printed_at_s >= EVENT_INTERVAL_S:
            self.printed_at_s = now
            self._write_event(self.meter, "progress")

    def note(self, text: str) -> None:
        """Print the event `note`."""
        if self.meter is not None:
            self._write_event(self.meter, "note", text=text)

    def end(self) -> None:
        """Print the event `end`. An interrupted task has `done` below `total`."""
        if self.meter is not None:
            self._write_event(self.meter, "end")
        self.meter = None

    def _write_event(self, meter: ProgressMeter, event: str, **more: str) -> None:
        described = {
            "t": round(meter.elapsed_s(), 3),
            "event": event,
            "task": meter.task,
            "done": meter.done_bytes,
            "total": meter.total_bytes,
        }
        print(json.dumps({**described, **more}), file=self.stream, flush=True)


@dataclass(slots=True)
class BarProgress:
    """Progress for terminals: one line, redrawn in place at most ten times per second."""

    stream: TextIO
    clock: Clock = time.monotonic
    meter: ProgressMeter | None = None
    last_note: str = ""
    drawn_at_s: float = 0.0
    bar: RichProgress | None = None

    def begin(self, task: str, total_bytes: int, done_bytes: int = 0) -> None:
        """Draw the bar."""
        # An error may have left the last task without its `end`. Two bars would overwrite each other.
        self.end()
        self.meter = ProgressMeter(task, total_bytes, done_bytes, self.clock)
        self.last_note = ""
        self.drawn_at_s = self.meter.started_s
        self.bar = _rich_bar(self.stream)
        self.bar.add_task(
            self.meter.label,
            total=max(total_bytes, 1),
            state=format_bytes_of(done_bytes, total_bytes),
        )
        self.bar.start()
        self._draw_bar(self.meter, format_bytes_of(done_bytes, total_bytes))

    def advance(self, written_bytes: int) -> None:
        """Redraw the bar if the last drawing is a tenth of a second old."""
        if self.meter is not None:
            self._redraw_if_due(self.meter, self.meter.advance(written_bytes))

    def note(self, text: str) -> None:
        """Show the note behind the numbers, as far as the line is wide."""
        self.last_note = text
        if self.meter is not None:
            self._redraw_if_due(self.meter, self.clock())

    def end(self) -> None:
        """Draw the bar a last time. It stays on the screen."""
        if self.meter is not None and self.bar is not None:
            complete = self.meter.done_bytes >= self.meter.total_bytes
            # The full bar shows that the task is done. Without it, the words have to.
            state = self.meter.summary()
            if complete:
                state = f"{self.meter.bytes_and_rate()}  {format_clock(self.meter.elapsed_s())}"
            self._draw_bar(self.meter, state)
            self.bar.stop()
        self.meter = self.bar = None

    def _redraw_if_due(self, meter: ProgressMeter, now: float) -> None:
        if now - self.drawn_at_s >= REDRAW_INTERVAL_S:
            self.drawn_at_s = now
            self._draw_bar(meter, meter.status(self.last_note))

    def _draw_bar(self, meter: ProgressMeter, state: str) -> None:
        if self.bar is None:
            return
        # One column stays free: some terminals break the line after a character in the last one.
        taken = len(meter.label) + 2 + _bar_cells(self.bar.console.width) + 2
        state = f"{meter.percent:3d}%  {state}"[: max(0, self.bar.console.width - taken - 1)]
        # The bar of an empty task has a total of 1, and is full.
        completed = meter.done_bytes
        if not meter.total_bytes:
            completed = 1
        self.bar.update(self.bar.task_ids[0], completed=completed, state=state, refresh=True)


def _bar_cells(width: int) -> int:
    """Return the width of the bar: short on narrow lines, where the numbers matter more."""
    if width >= 100:
        return BAR_CELLS
    return 10


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
    """Return the Progress of a mode.

    `auto` is a bar on a terminal that can redraw a line, otherwise lines.

    Args:
        mode: Value of `--progress`.
        stream: Stream to print on.
        clock: Returns the time in seconds.

    Returns:
        The Progress.
    """
    if mode == "auto" and can_redraw(stream):
        mode = "bar"
    match mode:
        case "bar":
            return BarProgress(stream, clock)
        case "auto" | "lines":
            return LineProgress(stream, clock)
        case "json":
            return JsonProgress(stream, clock)
        case "none":
            return NullProgress()
