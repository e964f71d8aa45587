"""Engines and commands of launched jobs, and processes to kill.

Only processes with the working folder of the test are found: this machine may run other jobs.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

from prepcli.launch.engines import ENGINES
from prepcli.launch.job import TRAIN, LaunchedCommand
from tests.helpers.waiting import wait_until

# The engines that read their script from stdin.
STDIN_ENGINES = [name for name, engine in ENGINES.items() if engine.submitted == "stdin"]
# Options that an engine needs for a training on 8 devices.
REQUIRED_OPTIONS = {
    "tpu": ("--accelerator", "v5p-16", "--zone", "us-east5-a"),
    "gke": ("--image", "image", "--devices-per-node", "8", "--claim", "runs"),
}


def train_command(recipe: str, arguments: Sequence[str] = ()) -> LaunchedCommand:
    """Return the command for training with a recipe."""
    return LaunchedCommand(name=TRAIN, recipe=recipe, arguments=tuple(arguments))


def kill_share(count: int, index: int) -> int:
    """Wait for the process of a share, kill it, and return its id."""
    wait_until(lambda: bool(share_processes(count, index)))
    process = share_processes(count, index)[0]
    os.kill(process, signal.SIGKILL)
    return process


def share_processes(count: int, index: int) -> list[int]:
    """Return the Python processes of a share."""
    words = f"\0--processes\0{count}/{index}\0"
    processes: list[int] = []
    for pid, line in _read_all("cmdline"):
        if words in line and "python" in line.partition("\0")[0]:
            processes.append(pid)
    return processes


def kill_training_process(index: int) -> None:
    """Kill the process of a job with this `JAX_PROCESS_ID`."""
    for pid, line in _read_all("environ"):
        if f"JAX_PROCESS_ID={index}" in line.split("\0"):
            os.kill(pid, signal.SIGKILL)


def _read_all(name: str) -> Iterator[tuple[int, str]]:
    """Yield each process id of this working folder with the text of a file in its folder of `/proc`."""
    here = Path.cwd()
    for path in Path("/proc").glob(f"[0-9]*/{name}"):
        # A process may end, or belong to the system.
        with contextlib.suppress(OSError):
            if path.with_name("cwd").readlink() == here:
                yield int(path.parent.name), path.read_text(errors="replace")
