"""Several processes of one `prep` command on this machine, each with CPU devices of its own."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from prepcli.core.compilation_cache import FOLDER_VARIABLE
from prepcli.launch import local
from tests import FLAGS
from tests.helpers.fork_server import ForkedProcess, start_python
from tests.helpers.waiting import MAX_S

# Variables that started processes get from the process of the tests.
COMPILATION = (
    *(FLAGS, FOLDER_VARIABLE),
    *("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"),
)
# JAX reads these variables when it is imported, which happens before the processes are forked.
RUN_MODULE = """
import os, runpy, sys
import jax

jax.config.update("jax_platforms", os.environ["JAX_PLATFORMS"])
jax.config.update("jax_num_cpu_devices", int(os.environ["JAX_NUM_CPU_DEVICES"]))
jax.config.update("jax_compilation_cache_dir", os.environ["JAX_COMPILATION_CACHE_DIR"])
sys.path.insert(0, os.getcwd())
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""


def start_processes(
    *words: str,
    count: int,
    devices: int,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    module: str = "prepcli",
    stdin: Path | None = None,
) -> list[ForkedProcess]:
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
    compilation = {name: os.environ[name] for name in COMPILATION if name in os.environ}
    processes = list[ForkedProcess]()
    for index in range(count):
        variables = local.process_environment(
            os.environ, index=index, count=count, port=port, devices=devices
        )
        process = start_python(
            RUN_MODULE,
            module,
            *words,
            cwd=cwd or Path.cwd(),
            env=variables | compilation | dict(env or {}),
            has_jax=True,
            stdin=stdin if stdin and index == 0 else os.devnull,
        )
        processes.append(process)
    return processes


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
    processes: Sequence[ForkedProcess], timeout_s: float = MAX_S
) -> list[tuple[int, str, str]]:
    """Wait for processes; return the exit code, stdout and stderr of each."""
    results = list[tuple[int, str, str]]()
    try:
        for process in processes:
            out, err = process.communicate(timeout=timeout_s)
            results.append((process.wait(), out.decode(), err.decode()))
    finally:
        for process in processes:
            process.kill()
    return results
