"""Progress displays, and lines that are redrawn in place on a terminal. The clock is a number."""

from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import struct
import termios
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TextIO

import pytest

from prepcli.commands.console.progress_displays import (
    BarProgress,
    JsonProgress,
    LineProgress,
    Mode,
    ProgressMeter,
    make_progress,
)
from prepcli.commands.console.ui import LiveBlock, Ui
from prepcli.core.observer import QUIET, NullProgress, Progress
from tests.helpers.screen import Screen

GIB, MIB = 1 << 30, 1 << 20
TOTAL = 26_031_728_640  # 24.24 GiB


@dataclass
class FakeClock:
    """A clock whose time is set by the test."""

    now_s: float = 100.0

    def __call__(self) -> float:
        return self.now_s


class Terminal(io.StringIO):
    """A stream that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


def advance(progress: Progress, time: FakeClock, seconds: float, nbytes: int) -> None:
    time.now_s += seconds
    progress.advance(nbytes)


def test_lines_are_printed_every_10_s() -> None:
    time, stream = FakeClock(), io.StringIO()
    progress = LineProgress(stream, time)
    progress.begin("save-init", TOTAL)
    for _ in range(30):
        advance(progress, time, 1, 761 * MIB)
    advance(progress, time, 2.7, TOTAL - 30 * 761 * MIB)
    progress.end()
    assert stream.getvalue().splitlines() == [
        "save-init    0%  0.00 of 24.24 GiB",
        "save-init   30%  7.43 of 24.24 GiB  761 MiB/s  23 s left",
        "save-init   61%  14.86 of 24.24 GiB  761 MiB/s  13 s left",
        "save-init   91%  22.29 of 24.24 GiB  761 MiB/s  3 s left",
        "save-init  100%  24.24 of 24.24 GiB  759 MiB/s  done in 32.7 s",
    ]


def test_lines_show_the_last_note() -> None:
    time, stream = FakeClock(), io.StringIO()
    progress = LineProgress(stream, time)
    progress.begin("save-init", 4 * GIB)
    progress.note("blocks.up 20/40")
    progress.note("blocks.up 21/40")
    advance(progress, time, 30, 2 * GIB)
    assert stream.getvalue().splitlines()[-1] == (
        "save-init   50%  2.00 of 4.00 GiB  68.3 MiB/s  30 s left   blocks.up 21/40"
    )


def test_lines_report_an_interrupted_task() -> None:
    time, stream = FakeClock(), io.StringIO()
    progress = LineProgress(stream, time)
    progress.begin("save-init", 4 * GIB)
    advance(progress, time, 5, GIB)
    progress.end()
    assert (
        stream.getvalue()
        .splitlines()[-1]
        .endswith("25%  1.00 of 4.00 GiB  205 MiB/s  interrupted after 5.0 s")
    )


def test_rate_excludes_bytes_of_an_earlier_run() -> None:
    time, stream = FakeClock(), io.StringIO()
    progress = LineProgress(stream, time)
    progress.begin("save-init", 4 * GIB, 3 * GIB)
    advance(progress, time, 30, 300 * MIB)
    assert stream.getvalue().splitlines() == [
        "save-init   75%  3.00 of 4.00 GiB",
        "save-init   82%  3.29 of 4.00 GiB  10.0 MiB/s  72 s left",
    ]


def test_empty_task_is_complete() -> None:
    stream = io.StringIO()
    progress = LineProgress(stream, FakeClock())
    progress.begin("verify", 0)
    progress.end()
    assert stream.getvalue().splitlines()[-1] == "verify  100%  0 of 0 bytes  done in 0.0 s"


def test_percent_is_rounded_down() -> None:
    time = FakeClock()
    meter = ProgressMeter("x", 1000, 0, time)
    meter.advance(999)
    assert meter.percent == 99


def test_eta_follows_the_rate_of_the_last_30_s() -> None:
    time = FakeClock()
    meter = ProgressMeter("x", 10_000, 0, time)
    for _ in range(100):  # 50 bytes a second
        time.now_s += 1
        meter.advance(50)
    for _ in range(60):  # then 10
        time.now_s += 1
        meter.advance(10)
    assert meter.rate() == pytest.approx(5600 / 160)
    assert meter.eta_s() == pytest.approx(4400 / 10, rel=0.05)


def test_eta_grows_while_no_bytes_are_written() -> None:
    time = FakeClock()
    meter = ProgressMeter("x", 100, 0, time)
    time.now_s += 10
    meter.advance(50)
    before = meter.eta_s()
    time.now_s += 10
    assert before == pytest.approx(10)
    assert meter.eta_s() == pytest.approx(20)


def test_rate_and_eta_are_none_without_time_or_bytes() -> None:
    time = FakeClock()
    meter = ProgressMeter("x", 100, 40, time)
    assert (meter.rate(), meter.eta_s()) == (None, None)
    time.now_s += 5
    assert (meter.rate(), meter.eta_s()) == (None, None)


def test_meter_keeps_few_samples() -> None:
    time = FakeClock()
    meter = ProgressMeter("x", 10**9, 0, time)
    for _ in range(10_000):
        time.now_s += 0.01
        meter.advance(1)
    assert len(meter.samples) <= 62


def test_json_progress_prints_one_object_per_line() -> None:
    time, stream = FakeClock(), io.StringIO()
    progress = JsonProgress(stream, time)
    progress.begin("save-init", 100, 10)
    for _ in range(6):
        advance(progress, time, 0.25, 10)
    progress.note("blocks.up")
    progress.end()
    events = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [event["event"] for event in events] == ["begin", "progress", "note", "end"]
    assert events[1] == {
        "t": 1.0,
        "event": "progress",
        "task": "save-init",
        "done": 50,
        "total": 100,
    }
    assert events[2]["text"] == "blocks.up"
    assert events[3]["done"] == 70


def test_bar_is_drawn_ten_times_per_second_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "110")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    time, stream = FakeClock(), Terminal()
    progress = BarProgress(stream, time)
    progress.begin("save-init", TOTAL)
    for _ in range(1000):  # one second
        advance(progress, time, 0.001, 870 * MIB // 1000)
        progress.note("blocks.up 21/40")
    drawn = stream.getvalue().count("save-init")
    progress.end()
    assert 10 <= drawn <= 14
    assert "870 MiB/s" in stream.getvalue()
    assert "blocks.up 21/40" in stream.getvalue()


def test_bar_ends_complete_with_its_duration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "110")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    time, stream = FakeClock(), Terminal()
    progress = BarProgress(stream, time)
    progress.begin("pad-vocab", 5_262_303_232)
    advance(progress, time, 4.3, 5_262_303_232)
    progress.end()
    last_line = [
        line for line in stream.getvalue().replace("\r", "\n").splitlines() if "pad-vocab" in line
    ][-1]
    assert last_line.endswith("━  100%  4.90 of 4.90 GiB  1.1 GiB/s  0:04")


@pytest.mark.parametrize("columns", [30, 40, 60, 80])
def test_bar_is_one_line_on_a_narrow_terminal(
    monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    time, stream = FakeClock(), Terminal()
    progress = BarProgress(stream, time)
    progress.begin("save-init", TOTAL)
    progress.note("a note that is much longer than the line " * 3)
    advance(progress, time, 10, GIB)
    assert "\n" not in stream.getvalue()
    assert "save-init" in stream.getvalue()


def test_progress_before_begin_prints_no_output() -> None:
    for progress in (LineProgress, JsonProgress, BarProgress):
        stream = Terminal()
        display = progress(stream, FakeClock())
        display.advance(5)
        display.note("x")
        display.end()
        assert stream.getvalue() == ""


@pytest.mark.parametrize(
    ("mode", "stream", "term", "expected"),
    [
        ("auto", Terminal(), "xterm", BarProgress),
        ("auto", Terminal(), "dumb", LineProgress),
        ("auto", Terminal(), "", LineProgress),
        ("auto", io.StringIO(), "xterm", LineProgress),
        ("bar", io.StringIO(), "dumb", BarProgress),
        ("lines", Terminal(), "xterm", LineProgress),
        ("json", Terminal(), "xterm", JsonProgress),
        ("none", Terminal(), "xterm", NullProgress),
    ],
)
def test_make_progress_chooses_by_stream_and_term(
    monkeypatch: pytest.MonkeyPatch, mode: Mode, stream: io.StringIO, term: str, expected: type
) -> None:
    monkeypatch.setenv("TERM", term)
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert type(make_progress(mode, stream)) is expected


@pytest.mark.parametrize("mode", ["lines", "bar"])
def test_control_characters_of_labels_are_escaped(
    mode: Mode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    time, stream = FakeClock(), Terminal()
    progress = make_progress(mode, stream, time)
    # A task may name a checkpoint of another user.
    progress.begin("read a\x1b]0;title\x07\nb", 100)
    progress.note("tensor\r\x9bw")
    advance(progress, time, 40, 50)
    progress.end()
    shown = stream.getvalue()
    assert "read a\\x1b]0;title\\x07\\nb" in shown
    assert "tensor\\r\\x9bw" in shown
    assert not {"\x07", "\x9b", "\x1b]"} & {*shown, *(["\x1b]"] if "\x1b]" in shown else [])}


@dataclass
class ScreenTerminal:
    """A pseudo-terminal: the stream of a program, and the screen that its bytes make."""

    stream: TextIO
    descriptor: int
    screen: Screen

    def resize(self, columns: int, lines: int = 24) -> None:
        fcntl.ioctl(self.descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def read_until(self, end: str) -> str:
        """Return the bytes up to an end, which may arrive in pieces."""
        written = ""
        while not written.endswith(end):
            written += os.read(self.descriptor, 1 << 16).decode()
        return written

    def read(self) -> list[str]:
        """Return the text of the screen."""
        self.stream.flush()
        os.set_blocking(self.descriptor, False)
        try:
            while data := os.read(self.descriptor, 1 << 16):
                self.screen.feed(data.decode())
        except BlockingIOError:
            pass
        return self.screen.text().splitlines()


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[ScreenTerminal]:
    """Return a terminal of 40 columns."""
    for name in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    master, slave = pty.openpty()
    with os.fdopen(slave, "w", encoding="utf-8") as stream:
        made = ScreenTerminal(stream, master, Screen())
        made.resize(40)
        yield made
    os.close(master)


def test_block_is_redrawn_in_place_and_stays(terminal: ScreenTerminal):
    block = LiveBlock(terminal.stream)
    block.draw([[("step 1", "bold")], [("loss 3", "")]])
    assert terminal.read() == ["step 1", "loss 3"]
    block.draw([[("step 2", "bold")], [("loss 2", "")], [("saved", "")]])
    assert terminal.read() == ["step 2", "loss 2", "saved"]
    block.close()
    terminal.stream.write("after\n")
    assert terminal.read() == ["step 2", "loss 2", "saved", "after"]


def test_text_is_printed_above_the_block(terminal: ScreenTerminal):
    block = LiveBlock(terminal.stream)
    block.draw([[("step 1", "")]])
    print("\x1b[1;33mwarning:\x1b[0m [disk] is full", file=block.stream)
    block.draw([[("step 2", "")]])
    print("x" * 60, file=block.stream)
    assert terminal.read() == ["warning: [disk] is full", "x" * 60, "step 2"]
    block.close()


def test_lines_are_cut_at_the_new_width(terminal: ScreenTerminal):
    block = LiveBlock(terminal.stream)
    block.draw([[("a" * 50, "")]])
    assert (block.width, terminal.read()) == (40, ["a" * 40])
    terminal.resize(60)
    block.draw([[("b" * 70, "")]])
    assert (block.width, terminal.read()) == (60, ["b" * 60])
    block.close()


def test_terminal_without_a_size_has_a_block(terminal: ScreenTerminal):
    terminal.resize(0, 0)
    block = LiveBlock(terminal.stream)
    block.draw([[("step 1", "")]])
    assert block.width > 0
    assert terminal.read() == ["step 1"]
    block.close()


def test_incomplete_line_is_printed_at_the_end(terminal: ScreenTerminal):
    block = LiveBlock(terminal.stream)
    block.draw([[("step 1", "")]])
    print("warning", end="", file=block.stream)
    block.close()
    assert terminal.read() == ["warning", "step 1"]


def test_error_of_another_thread_is_below_the_block(terminal: ScreenTerminal):
    ui = Ui("train", err=terminal.stream)
    block = ui.open_live_block()
    assert block is not None
    block.draw([[("step 1", "")]])
    ui.leave_live_block()
    print("error: lost", file=terminal.stream, flush=True)
    written = terminal.read_until("lost\r\n")
    assert written.rindex("\x1b[?25h") > written.rindex("\x1b[?25l")
    terminal.screen.feed(written)
    assert terminal.read() == ["step 1", "error: lost"]
    block.close()


def test_messages_of_every_ui_of_a_command_are_above_the_block(terminal: ScreenTerminal):
    """A store made before the block prints notes about retried requests in its own thread."""
    ui = Ui("train", err=terminal.stream)
    note_of_store = ui.for_process(0).note
    block = ui.open_live_block()
    assert block is not None
    block.draw([[("step 1", "")], [("loss 2", "")]])
    thread = threading.Thread(target=note_of_store, args=("asking again",))
    thread.start()
    thread.join()
    block.draw([[("step 2", "")], [("loss 1", "")]])
    assert terminal.read() == ["asking again", "step 2", "loss 1"]
    block.close()
    note_of_store("done")
    assert terminal.read() == ["asking again", "step 2", "loss 1", "done"]


def test_ui_opens_a_block_only_on_a_terminal(
    terminal: ScreenTerminal, monkeypatch: pytest.MonkeyPatch
):
    def is_live(ui: Ui) -> bool:
        block = ui.open_live_block()
        if block is not None:
            block.close()
        return block is not None

    ui = Ui("train", err=terminal.stream)
    assert is_live(ui)
    assert is_live(ui.for_process(0))
    assert not is_live(ui.for_process(1))
    assert not is_live(ui.for_process(0, all_print=True))
    assert not is_live(Ui("train", err=terminal.stream, level=QUIET))
    assert not is_live(Ui("train", err=terminal.stream, progress_mode="lines"))
    with open(os.devnull, "w", encoding="utf-8") as stream:
        assert not is_live(Ui("train", err=stream))
    with os.fdopen(os.dup(terminal.stream.fileno()), "w", encoding="latin-1") as stream:
        assert not is_live(Ui("train", err=stream))
    monkeypatch.setenv("TERM", "dumb")
    assert not is_live(ui)
