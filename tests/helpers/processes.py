"""Several processes of one `prep` command on this machine, each with CPU devices of its own."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from prepcli.launch import local


def start_processes(
    *words: str, count: int, devices: int, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> list[subprocess.Popen[str]]:
    """Start `prep WORDS` in `count` processes with `devices` CPU devices each; process 0 is the first.

    Args:
        *words: Words of the command line.
        count: Number of processes.
        devices: CPU devices of each process.
        cwd: Working folder.
        env: Additional environment variables.
    """
    return local.start_processes(words, count=count, devices=devices, environ=os.environ, env=env or {}, cwd=cwd)


def finish(processes: list[subprocess.Popen[str]], timeout_s: float = 300) -> list[tuple[int, str, str]]:
    """Wait for processes; return the exit code, stdout and stderr of each."""
    try:
        outputs = [process.communicate(timeout=timeout_s) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, *output) for process, output in zip(processes, outputs)]
