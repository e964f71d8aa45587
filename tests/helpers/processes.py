"""Several processes of one `prep` command on this machine, each with CPU devices of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from prepcli.launch import local
from tests import CACHE, FLAGS
from tests.helpers.waiting import MAX_S

# Variables that started processes get from the process of the tests.
COMPILATION = (FLAGS, CACHE, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS")


@dataclass(frozen=True, slots=True)
class Change:
    """A difference of one process from the others of its job.

    Attributes:
        words: Further words of its command line.
        env: Further environment variables.
        prefix: Command that runs it, such as `prlimit --fsize=100000`.
    """

    words: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    prefix: tuple[str, ...] = ()


NO_CHANGE = Change()
NO_CHANGES: Mapping[int, Change] = MappingProxyType({})


def start_processes(
    *words: str,
    count: int,
    devices: int,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    module: str = "prepcli",
    stdin: Path | None = None,
    changes: Mapping[int, Change] = NO_CHANGES,
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
        changes: Differences of processes, by index.
    """
    port, all_changes = local.free_port(), [changes.get(index, NO_CHANGE) for index in range(count)]
    return [
        subprocess.Popen(
            [*change.prefix, sys.executable, "-m", module, *words, *change.words],
            cwd=cwd,
            env=local.process_environment(
                os.environ, index=index, count=count, port=port, devices=devices
            )
            | {name: os.environ[name] for name in COMPILATION if name in os.environ}
            | dict(env or {})
            | dict(change.env),
            stdin=stdin.open() if stdin and index == 0 else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index, change in enumerate(all_changes)
    ]


def join_job() -> None:
    """Connect this process to the others that `start_processes` has started with it."""
    import jax

    jax.distributed.initialize(
        os.environ["JAX_COORDINATOR_ADDRESS"],
        num_processes=int(os.environ["JAX_NUM_PROCESSES"]),
        process_id=int(os.environ["JAX_PROCESS_ID"]),
        cluster_detection_method="deactivate",
    )


def finish(
    processes: list[subprocess.Popen[str]], timeout_s: float = MAX_S
) -> list[tuple[int, str, str]]:
    """Wait for processes; return the exit code, stdout and stderr of each."""
    try:
        outputs = [process.communicate(timeout=timeout_s) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, *output) for process, output in zip(processes, outputs)]
