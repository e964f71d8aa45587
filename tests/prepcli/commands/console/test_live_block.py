"""Lines that are redrawn in place on a terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import termios
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TextIO

import pytest

from prepcli.commands.console.ui import LiveBlock, Ui
from prepcli.core.observer import QUIET
from tests.helpers.screen import Screen


@dataclass
class Terminal:
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
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    """Return a terminal of 40 columns."""
    for name in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    master, slave = pty.openpty()
    with os.fdopen(slave, "w", encoding="utf-8") as stream:
        made = Terminal(stream, master, Screen())
        made.resize(40)
        yield made
    os.close(master)


def test_block_is_redrawn_in_place_and_stays(terminal: Terminal):
    block = LiveBlock(terminal.stream)
    block.draw([[("step 1", "bold")], [("loss 3", "")]])
    assert terminal.read() == ["step 1", "loss 3"]
    block.draw([[("step 2", "bold")], [("loss 2", "")], [("saved", "")]])
    assert terminal.read() == ["step 2", "loss 2", "saved"]
    block.close()
    terminal.stream.write("after\n")
    assert terminal.read() == ["step 2", "loss 2", "saved", "after"]


def test_text_is_printed_above_the_block(terminal: Terminal):
    block = LiveBlock(terminal.stream)
    block.draw([[("step 1", "")]])
    print("\x1b[1;33mwarning:\x1b[0m [disk] is full", file=block.stream)
    block.draw([[("step 2", "")]])
    print("x" * 60, file=block.stream)
    assert terminal.read() == ["warning: [disk] is full", "x" * 60, "step 2"]
    block.close()


def test_lines_are_cut_at_the_new_width(terminal: Terminal):
    block = LiveBlock(terminal.stream)
    block.draw([[("a" * 50, "")]])
    assert (block.width, terminal.read()) == (40, ["a" * 40])
    terminal.resize(60)
    block.draw([[("b" * 70, "")]])
    assert (block.width, terminal.read()) == (60, ["b" * 60])
    block.close()


def test_terminal_without_a_size_has_a_block(terminal: Terminal):
    terminal.resize(0, 0)
    block = LiveBlock(terminal.stream)
    block.draw([[("step 1", "")]])
    assert block.width > 0
    assert terminal.read() == ["step 1"]
    block.close()


def test_incomplete_line_is_printed_at_the_end(terminal: Terminal):
    block = LiveBlock(terminal.stream)
    block.draw([[("step 1", "")]])
    print("warning", end="", file=block.stream)
    block.close()
    assert terminal.read() == ["warning", "step 1"]


def test_error_of_another_thread_is_below_the_block(terminal: Terminal):
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


def test_messages_of_every_ui_of_a_command_are_above_the_block(terminal: Terminal):
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


def test_ui_opens_a_block_only_on_a_terminal(terminal: Terminal, monkeypatch: pytest.MonkeyPatch):
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
