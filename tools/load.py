"""Run a command on a busy machine, to show that it assumes nothing about the time that a step takes.

    python -m tools.load --loops 8 --writers 6 --folder FOLDER [--runs N] -- COMMAND ARGS...

Each busy loop and each writer has a session of its own: Linux shares the CPU between sessions, so that a command in one
session gets a small part of it. A writer writes 16 MiB with one fsync per MiB, again and again. All of them end, and
their files are removed, when the command has ended or this process gets a signal.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

MIB = 1 << 20
FILE_MIB = 16
LOOP_ROUNDS = 1_000_000
SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
_FORK = multiprocessing.get_context("fork")


@contextmanager
def busy_machine(loops: int, writers: int, folder: Path) -> Iterator[None]:
    """Load the CPUs and the disk while the context is open.

    Args:
        loops: Number of busy loops.
        writers: Number of processes that write files.
        folder: Existing folder on the disk to load. It is left as it was.
    """
    parent = os.getpid()
    with tempfile.TemporaryDirectory(prefix="load-", dir=folder) as temporary:
        processes = [_FORK.Process(target=_loop, args=(parent,)) for _ in range(loops)]
        paths = [Path(temporary) / str(index) for index in range(writers)]
        processes += [_FORK.Process(target=_write, args=(parent, path)) for path in paths]
        try:
            for process in processes:
                process.start()
            yield
        finally:
            for process in processes:
                if process.pid is not None:
                    process.kill()
                    process.join()


def _loop(parent: int) -> None:
    """Use a CPU until the parent process has ended."""
    os.setsid()
    while os.getppid() == parent:
        for _ in range(LOOP_ROUNDS):
            pass


def _write(parent: int, path: Path) -> None:
    """Write and synchronize a file until the parent process has ended."""
    os.setsid()
    block = os.urandom(MIB)
    while os.getppid() == parent:
        with path.open("wb", buffering=0) as file:
            for _ in range(FILE_MIB):
                file.write(block)
                os.fsync(file.fileno())
    # A parent that was killed has not removed the folder.
    path.unlink()


def run_command(command: Sequence[str]) -> int:
    """Run a command in a session of its own and return its exit status. Kill its whole group if a signal ends this."""
    process = subprocess.Popen(command, start_new_session=True)
    try:
        return process.wait()
    finally:
        if process.returncode is None:
            # The signal may arrive after the command has ended, and before its status is stored.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def run_times(command: Sequence[str], runs: int, print_line: Callable[[str], None]) -> int:
    """Run a command a number of times and return how many runs ended with status 0."""
    num_passed = 0
    for number in range(1, runs + 1):
        start_s = time.monotonic()
        status = run_command(command)
        seconds = time.monotonic() - start_s
        num_passed += status == 0
        result = "passed" if status == 0 else f"failed with status {status}"
        print_line(f"run {number} of {runs} {result} after {seconds:.1f} s")
    print_line(f"{num_passed} of {runs} passed")
    return num_passed


def _exit_by_signal(number: int, _: FrameType | None) -> None:
    # A second signal must not end the removal of the load.
    for other in SIGNALS:
        signal.signal(other, signal.SIG_IGN)
    sys.exit(128 + number)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command of the arguments beside the load, and return 0 if all runs passed."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.load", description="Run a command on a busy machine."
    )
    parser.add_argument("--loops", type=int, default=8, help="Number of busy loops.")
    parser.add_argument(
        "--writers",
        type=int,
        default=6,
        help="Number of processes that write and synchronize files.",
    )
    parser.add_argument("--folder", type=Path, default=Path(), help="Folder on the disk to load.")
    parser.add_argument("--runs", type=int, default=1, help="Number of runs of the command.")
    parser.add_argument("command", nargs="+", help="The command, after `--`.")
    options = parser.parse_args(argv)
    for number in SIGNALS:
        signal.signal(number, _exit_by_signal)
    with busy_machine(options.loops, options.writers, options.folder):
        num_passed = run_times(
            options.command, options.runs, lambda line: print(line, file=sys.stderr, flush=True)
        )
    return 0 if num_passed == options.runs else 1


if __name__ == "__main__":
    sys.exit(main())
