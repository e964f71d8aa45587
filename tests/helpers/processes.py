"""Several processes of one `prep` command on this machine, each with CPU devices of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from prepcli.launch import local


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
    port = local.free_port()
    return [
        subprocess.Popen(
            [sys.executable, "-m", module, *words],
            cwd=cwd,
            env=local.process_environment(os.environ, index=index, count=count, port=port, devices=devices)
            | dict(env or {}),
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
