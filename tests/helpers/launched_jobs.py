"""Find and kill a process of a launched conversion or training."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

from tests.helpers.waiting import wait_until


def kill_share(count: int, index: int) -> int:
    """Wait for the process of a share, kill it, and return its id."""
    found: list[int] = []

    def find() -> bool:
        found[:] = share_processes(count, index)
        return bool(found)

    wait_until(find)
    os.kill(found[0], signal.SIGKILL)
    return found[0]


def share_processes(count: int, index: int) -> list[int]:
    """Return the Python processes of a share."""
    words = f"\0--processes\0{count}/{index}\0"
    found: list[int] = []
    for pid, line in _read_all("cmdline"):
        if words in line and "python" in line.partition("\0")[0]:
            found.append(pid)
    return found


def kill_training_process(index: int) -> None:
    """Kill the processes of a job of `JAX_PROCESS_ID` on this machine."""
    for pid, line in _read_all("environ"):
        if f"JAX_PROCESS_ID={index}" in line.split("\0"):
            os.kill(pid, signal.SIGKILL)


def _read_all(name: str) -> Iterator[tuple[int, str]]:
    """Yield each process id with the text of a file in its folder of `/proc`."""
    for path in Path("/proc").glob(f"[0-9]*/{name}"):
        # A process may end, or belong to the system.
        with contextlib.suppress(OSError):
            yield int(path.parent.name), path.read_text(errors="replace")
