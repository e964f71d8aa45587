"""Commands that are killed or stopped right before one of their changes to files.

A kill at a random moment rarely falls between two changes that follow each other. Here a command runs with an audit
hook of Python that counts its changes, whatever module makes them: files opened for writing, writes, renames, links,
removals, new folders, truncations and locks.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from tests.helpers.fork_server import ForkedProcess, run_python, start_python
from tests.helpers.waiting import MAX_S, wait_until

Act = Literal["count", "kill", "stop"]

SCRIPT = """
import os, signal, sys, threading

act, point, *words = sys.argv[1:]
point = int(point)
changes = {"os.rename", "os.link", "os.symlink", "os.remove", "os.mkdir", "os.rmdir", "os.truncate"}
changes |= {"fcntl.flock", "fcntl.lockf"}
opens_to_write = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
lock = threading.Lock()
count = 0

def pass_change():
    global count
    with lock:
        count += 1
        is_due = count == point
    if is_due and act != "count":
        os.kill(os.getpid(), signal.SIGKILL if act == "kill" else signal.SIGSTOP)

def watch(event, arguments):
    is_write = event == "open" and isinstance(arguments[2], int) and arguments[2] & opens_to_write
    if event in changes or (is_write and not str(arguments[0]).startswith("/dev/")):
        pass_change()

def counted(write):
    def write_and_count(fd, *arguments):
        if fd > 2:
            pass_change()
        return write(fd, *arguments)
    return write_and_count

# Writes have no audit event.
for name in ("write", "pwrite", "pwritev", "writev"):
    setattr(os, name, counted(getattr(os, name)))
sys.addaudithook(watch)
sys.argv = ["prep", *words]
from prepcli.commands.cli.main import main

code = main()
if act == "count":
    print(count, file=sys.stderr)
sys.exit(code)
"""


def count_changes(*words: str, cwd: Path) -> int:
    """Run `prep WORDS` in a folder, and return the number of its changes to files."""
    run = run_python(SCRIPT, "count", "0", *words, cwd=cwd)
    assert run.returncode == 0, run.stderr
    return int(run.stderr.split()[-1])


def start_until(act: Act, point: int, *words: str, cwd: Path) -> ForkedProcess:
    """Start `prep WORDS` in a folder. It is killed, or stops, right before change number `point`, from 1 on."""
    return start_python(SCRIPT, act, str(point), *words, cwd=cwd)


def kill_before(point: int, *words: str, cwd: Path) -> int:
    """Kill `prep WORDS` right before change number `point`, and return its exit code."""
    process = start_until("kill", point, *words, cwd=cwd)
    process.communicate(timeout=MAX_S)
    return process.wait()


def wait_until_stopped(process: ForkedProcess) -> bool:
    """Wait until a process stops or ends. Return whether it is stopped."""
    wait_until(lambda: process.poll() is not None or _state(process.pid) == "T")
    return process.poll() is None


def go_on(process: ForkedProcess) -> None:
    """Let a stopped process go on."""
    process.send_signal(signal.SIGCONT)


def spread_points(count: int, number: int) -> Iterator[int]:
    """Yield `number` points spread over the changes 1 to `count`, with the first and the last ones."""
    for index in range(number):
        yield 1 + round(index * (count - 1) / (number - 1))


def _state(pid: int) -> str:
    """Return the state of a process as in /proc, or an empty text if it has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return text.rpartition(")")[2].split()[0]
