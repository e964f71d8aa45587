"""Several processes of one `prep` command on this machine, each with CPU devices of its own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

REMOVED_PREFIXES = ("JAX_", "XLA_", "SLURM_", "OMPI_")  # would describe another job


def free_port() -> int:
    """Return a port that no socket uses now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def start_processes(
    *words: str,
    count: int,
    devices: int,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    module: str = "prepcli",
    stdin: Path | None = None,
) -> list[subprocess.Popen[str]]:
    """Start `python -m MODULE WORDS` in `count` processes with `devices` CPU devices each; process 0 is the first.

    Args:
        *words: Words of the command line.
        count: Number of processes.
        devices: CPU devices of each process.
        cwd: Working folder.
        env: Additional environment variables.
        module: Module that is run with the words in place of prep.
        stdin: File that process 0 reads as stdin; the others have an empty one.
    """
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(REMOVED_PREFIXES)}
    coordinator = f"127.0.0.1:{free_port()}"
    job = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices), "JAX_NUM_PROCESSES": str(count)}
    job |= {"JAX_COORDINATOR_ADDRESS": coordinator}
    return [
        subprocess.Popen(
            [sys.executable, "-m", module, *words],
            cwd=cwd,
            env={**inherited, **job, "JAX_PROCESS_ID": str(index), **(env or {})},
            stdin=stdin.open() if stdin and index == 0 else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(count)
    ]


def finish(processes: list[subprocess.Popen[str]], timeout_s: float = 300) -> list[tuple[int, str, str]]:
    """Wait for processes; return the exit code, stdout and stderr of each."""
    try:
        outputs = [process.communicate(timeout=timeout_s) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, *output) for process, output in zip(processes, outputs)]
