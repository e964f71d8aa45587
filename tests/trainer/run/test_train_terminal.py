"""`prep train` on a pseudo-terminal: the view that is redrawn in place, and the text around it."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from prepcli.core.errors import OK
from tests.helpers.screen import Screen
from tests.helpers.train_runs import set_keys
from tests.helpers.training_folder import make_training_folder

ROOT = Path(__file__).parents[3]
SETTINGS = ("mesh=1,1,1", "train.steps=3", "data.holdout=0", "checkpoint.every=2")
HIDE_CURSOR, SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"


def run_on_terminal(*words: str) -> tuple[int, str]:
    """Run `prep` on a pseudo-terminal of 100 columns, and return its exit code and its output."""
    master, slave = pty.openpty()
    fcntl.ioctl(master, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    environment = {
        name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")
    }
    environment |= {"TERM": "xterm-256color", "PYTHONPATH": str(ROOT), "JAX_NUM_CPU_DEVICES": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "prepcli", *words],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env=environment,
    )
    os.close(slave)
    output = bytearray()
    try:
        while data := os.read(master, 1 << 16):
            output += data
    except OSError:  # the process closed the terminal
        pass
    os.close(master)
    return process.wait(), output.decode()


def test_train_draws_its_view_on_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    make_training_folder()
    overrides = set_keys(*SETTINGS)
    code, output = run_on_terminal("train", "recipe.toml", "--out", "run", *overrides)
    screen = Screen()
    screen.feed(output)
    lines = screen.text().splitlines()
    assert code == OK, screen.text()
    assert sum("finished" in line for line in lines) == 1, "the view is redrawn in place"
    assert not any("training" in line.split()[1:2] for line in lines)
    assert any(line.endswith("3/3  100%") for line in lines)
    assert sum(line.startswith("loss ") for line in lines) == 1
    assert output.rindex(SHOW_CURSOR) > output.rindex(HIDE_CURSOR)
