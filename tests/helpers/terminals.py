"""Run `prep` on a pseudo-terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from pathlib import Path

ROOT = Path(__file__).parents[2]
SIZE_AND_COLOR = ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR")


def run_on_terminal(*words: str, columns: int, shows_stderr: bool = True) -> tuple[int, str]:
    """Run a command on a pseudo-terminal of some columns, and return its exit code and its output there."""
    master, slave = pty.openpty()
    fcntl.ioctl(master, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in SIZE_AND_COLOR}
    environment |= {"TERM": "xterm-256color", "PYTHONPATH": str(ROOT), "JAX_NUM_CPU_DEVICES": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "prepcli", *words],
        stdin=slave,
        stdout=slave,
        stderr=slave if shows_stderr else subprocess.DEVNULL,
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
