"""What a long task tells the outside, in bytes, and the ways to show it: a bar, lines, JSON objects, nothing.

A Progress is told of by one thread at a time. Time comes from the clock that is handed in, so tests need not sleep.
"""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol, TextIO

from prepcli.console.formatting import format_bytes_of, format_clock, format_duration, format_rate, format_time_left

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress

Clock = Callable[[], float]
Mode = Literal["auto", "bar", "lines", "json", "none"]

LINE_INTERVAL_S = 30.0
EVENT_INTERVAL_S = 1.0
REDRAW_INTERVAL_S = 0.1
SAMPLE_INTERVAL_S = 0.5
ETA_WINDOW_S = 30.0
BAR_CELLS = 30


class Progress(Protocol):
    """What a long task tells the outside: bytes, never characters."""

    def begin(self, task: str, total_bytes: int, done_bytes: int = 0) -> None:
        """A task starts; `done_bytes` of its total are there already, from a journal."""
        ...

    def advance(self, written_bytes: int) -> None:
        """So many more bytes are written."""
        ...

    def note(self, text: str) -> None:
        """What is being done now, shown behind the numbers; replaces the note before."""
        ...

    def end(self) -> None:
        """The task is over: complete, or broken off when bytes are missing."""
        ...


@dataclass(slots=True)
class ProgressMeter:
    """How far a task is: `rate` over all bytes of this run, `eta_s` from the last 30 seconds."""

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
        """Count the bytes; returns the time, so that a caller asks the clock once."""
        now = self.clock()
        self.done_bytes += written_bytes
        if now - self.samples[-1][0] >= SAMPLE_INTERVAL_S:
            self.samples.append((now, self.done_bytes))
        while len(self.samples) > 1 and now - self.samples[1][0] >= ETA_WINDOW_S:
            self.samples.popleft()
        return now

    @property
    def percent(self) -> int:
        """Rounded down, so that 100 means all of it; an empty task is complete."""
        return 100 * self.done_bytes // self.total_bytes if self.total_bytes else 100

    def elapsed_s(self) -> float:
        """Seconds since the task began."""
        return self.clock() - self.started_s

    def rate(self) -> float | None:
        """Bytes per second of this run, None until time has passed and bytes were written."""
        took_s, written_bytes = self.elapsed_s(), self.done_bytes - self.resumed_bytes
        return written_bytes / took_s if took_s > 0 and written_bytes > 0 else None

    def eta_s(self) -> float | None:
        """Seconds that are left at the pace of the last 30 s, None where that pace is unknown or zero."""
        then_s, then_bytes = self.samples[0]
        now_s, gained_bytes = self.clock(), self.done_bytes - then_bytes
        if now_s <= then_s or gained_bytes <= 0:
            return None
        return max(0, self.total_bytes - self.done_bytes) * (now_s - then_s) / gained_bytes

    def bytes_and_rate(self) -> str:
        """`11.15 of 24.24 GiB  870 MiB/s`, without a rate that is not known yet."""
        rate = self.rate()
        return format_bytes_of(self.done_bytes, self.total_bytes) + (f"  {format_rate(rate)}" if rate else "")

    def status(self, note: str) -> str:
        """The numbers, the time that is left, and the note."""
        eta_s = self.eta_s()
        left = f"  {format_time_left(eta_s)}" if eta_s is not None else ""
        return self.bytes_and_rate() + left + (f"   {note}" if note else "")

    def summary(self) -> str:
        """The numbers and how the task ended: `done in 32.7 s`, or that bytes are missing."""
        how = "done in" if self.done_bytes >= self.total_bytes else "broken off after"
        return f"{self.bytes_and_rate()}  {how} {format_duration(self.elapsed_s())}"


class NullProgress:
    """Says nothing: the default wherever a Progress is taken."""

    def begin(self, task: str, total_bytes: int, done_bytes: int = 0) -> None:
        """Nothing."""

    def advance(self, written_bytes: int) -> None:
        """Nothing."""

    def note(self, text: str) -> None:
        """Nothing."""

    def end(self) -> None:
        """Nothing."""


@dataclass(slots=True)
class LineProgress:
    """For logs: a line at the beginning, each 30 s, and at the end."""

    stream: TextIO
    clock: Clock = time.monotonic
    meter: ProgressMeter | None = None
    last_note: str = ""
    printed_at_s: float = 0.0

    def begin(self, task: str, total_bytes: int, done_bytes: int = 0) -> None:
        """The first line; the next one is due in 30 s."""
        self.meter, self.last_note = ProgressMeter(task, total_bytes, done_bytes, self.clock), ""
        self.printed_at_s = self.meter.started_s
        self._line(self.meter, format_bytes_of(done_bytes, total_bytes))

    def advance(self, written_bytes: int) -> None:
        """A line, if the last one is 30 s old."""
        if self.meter is None:
            return
        now = self.meter.advance(written_bytes)
        if now - self.printed_at_s >= LINE_INTERVAL_S:
            self.printed_at_s = now
            self._line(self.meter, self.meter.status(self.last_note))

    def note(self, text: str) -> None:
        """Kept for the next line."""
        self.last_note = text

    def end(self) -> None:
        """The last line."""
        if self.meter is not None:
            self._line(self.meter, self.meter.summary())
        self.meter = None

    def _line(self, meter: ProgressMeter, text: str) -> None:
        print(f"{meter.task}  {meter.percent:3d}%  {text}", file=self.stream, flush=True)


@dataclass(slots=True)
class JsonProgress:
    """For programs: one object a line, when a task begins, each second, at each note, and when it ends."""

    stream: TextIO
    clock: Clock = time.monotonic
    meter: ProgressMeter | None = None
    printed_at_s: float = 0.0

    def begin(self, task: str, total_bytes: int, done_bytes: int = 0) -> None:
        """Event `begin`."""
        self.meter = ProgressMeter(task, total_bytes, done_bytes, self.clock)
        self.printed_at_s = self.meter.started_s
        self._event(self.meter, "begin")

    def advance(self, written_bytes: int) -> None:
        """Event `progress`, if the last one is old enough."""
        if self.meter is None:
            return
        now = self.meter.advance(written_bytes)
        if now - self.printed_at_s >= EVENT_INTERVAL_S:
            self.printed_at_s = now
            self._event(self.meter, "progress")

    def note(self, text: str) -> None:
        """Event `note`."""
        if self.meter is not None:
            self._event(self.meter, "note", text=text)

    def end(self) -> None:
        """Event `end`; `done` below `total` says that it was broken off."""
        if self.meter is not None:
            self._event(self.meter, "end")
        self.meter = None

    def _event(self, meter: ProgressMeter, event: str, **more: str) -> None:
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
    """For people: one line that is redrawn in place, at most ten times a second."""

    stream: TextIO
    clock: Clock = time.monotonic
    meter: ProgressMeter | None = None
    last_note: str = ""
    drawn_at_s: float = 0.0
    bar: RichProgress | None = None

    def begin(self, task: str, total_bytes: int, done_bytes: int = 0) -> None:
        """Draw the bar."""
        self.end()
        self.meter, self.last_note = ProgressMeter(task, total_bytes, done_bytes, self.clock), ""
        self.drawn_at_s = self.meter.started_s
        self.bar = _rich_bar(self.stream)
        self.bar.add_task(task, total=max(total_bytes, 1), state=format_bytes_of(done_bytes, total_bytes))
        self.bar.start()
        self._draw(self.meter, format_bytes_of(done_bytes, total_bytes))

    def advance(self, written_bytes: int) -> None:
        """Redraw, if the last picture is a tenth of a second old."""
        if self.meter is not None:
            self._redraw_if_due(self.meter, self.meter.advance(written_bytes))

    def note(self, text: str) -> None:
        """Shown behind the numbers as far as the line is wide."""
        self.last_note = text
        if self.meter is not None:
            self._redraw_if_due(self.meter, self.clock())

    def end(self) -> None:
        """The last picture stays on the screen."""
        if self.meter is not None and self.bar is not None:
            complete = self.meter.done_bytes >= self.meter.total_bytes
            clock = f"{self.meter.bytes_and_rate()}  {format_clock(self.meter.elapsed_s())}"
            self._draw(self.meter, clock if complete else self.meter.summary())
            self.bar.stop()
        self.meter = self.bar = None

    def _redraw_if_due(self, meter: ProgressMeter, now: float) -> None:
        if now - self.drawn_at_s >= REDRAW_INTERVAL_S:
            self.drawn_at_s = now
            self._draw(meter, meter.status(self.last_note))

    def _draw(self, meter: ProgressMeter, state: str) -> None:
        if self.bar is None:
            return
        taken = len(meter.task) + 2 + _bar_cells(self.bar.console.width) + 2
        state = f"{meter.percent:3d}%  {state}"[: max(0, self.bar.console.width - taken - 1)]
        completed = meter.done_bytes if meter.total_bytes else 1
        self.bar.update(self.bar.task_ids[0], completed=completed, state=state, refresh=True)


def _bar_cells(width: int) -> int:
    """A short bar where the line is narrow: the numbers matter more."""
    return BAR_CELLS if width >= 100 else 10


def _rich_bar(stream: TextIO) -> RichProgress:
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as RichProgress
    from rich.table import Column

    console = Console(file=stream, force_terminal=True)
    return RichProgress(
        TextColumn("{task.description} ", markup=False, table_column=Column(no_wrap=True)),
        BarColumn(bar_width=_bar_cells(console.width)),
        TextColumn(" {task.fields[state]}", markup=False, table_column=Column(no_wrap=True)),
        console=console,
        auto_refresh=False,
        redirect_stdout=False,
        redirect_stderr=False,
    )


def make_progress(mode: Mode, stream: TextIO, clock: Clock = time.monotonic) -> Progress:
    """The Progress for a mode; `auto` is a bar on a terminal that can redraw a line, and lines anywhere else.

    FORCE_COLOR and its kin make rich believe in terminals that are pipes; only isatty and TERM decide here.
    """
    if mode == "auto":
        redraws = stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb")
        mode = "bar" if redraws else "lines"
    kinds = {"bar": BarProgress, "lines": LineProgress, "json": JsonProgress}
    return kinds[mode](stream, clock) if mode in kinds else NullProgress()
