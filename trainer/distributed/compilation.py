"""Compilation that a signal or a time limit can end: in a thread that is abandoned, or in a process of its own."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, Any

import jax

from prepcli.core.errors import Option, PrepError, text
from prepcli.core.worker_thread import run_abandonable


class CompiledFunction:
    """A function of arrays, compiled once per combination of shapes, dtypes, shardings and static arguments.

    Attributes:
        compile_s: Seconds of compilation so far.
    """

    def __init__(self, jitted: Any) -> None:
        """Take a function of `jax.jit`."""
        self._jitted = jitted
        self._executables: dict[Any, Callable[..., Any]] = {}
        self.compile_s = 0.0

    def __call__(self, *arrays: Any, **static: Any) -> Any:
        """Call the function, after its compilation for the first arguments of their kind."""
        leaves, structure = jax.tree.flatten(arrays)
        # `compile` makes an executable for exactly these arguments. It rejects other shapes and shardings,
        # where `jit` would silently compile again.
        key = (
            structure,
            *((leaf.shape, leaf.dtype, leaf.sharding) for leaf in leaves),
            *static.items(),
        )
        if key not in self._executables:
            # Compile before the first call, to count its time without the execution.
            started_at = time.monotonic()
            lowered = self._jitted.lower(*arrays, **static)
            # XLA compiles for minutes in one call, during which the main thread could handle no signal.
            self._executables[key] = run_abandonable(lowered.compile)
            self.compile_s += time.monotonic() - started_at
        return self._executables[key](*arrays)


# A process that compiles for devices that this machine does not have.
#
# XLA compiles in one call of C++ code. The call takes minutes, reports no progress and cannot be interrupted. A process
# can be ended: at a time limit, by Ctrl-C, and when its parent ends.

# JAX reads these once per process. libtpu would otherwise look for a TPU host, and lock the machine's TPU.
_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
# A line of the process that begins with this names its phase. Its last other line is the answer.
_PHASE = "phase: "
_FIRST_PHASE = "start"
# Seconds between two reports of the same phase.
NOTE_S = 30.0


def ignore_phase(phase: str, elapsed_s: float) -> None:
    """Ignore a phase."""


@dataclass(frozen=True, slots=True)
class CompileWatch:
    """Reports and time limit of a compilation."""

    # Receives the phase and the seconds since the start, at each new phase and every `note_s` seconds
    on_phase: Callable[[str, float], None] = ignore_phase
    limit_s: float | None = None  # Time limit of the compilation in seconds. None means no limit.
    note_s: float = NOTE_S  # Seconds between two reports of the same phase


UNWATCHED = CompileWatch()


def run_compile_process(
    module: str, request: str, num_cpu_devices: int, watch: CompileWatch = UNWATCHED
) -> str:
    """Run a module in a process with simulated CPU devices only.

    Args:
        module: Module to run. It calls `read_request` and `report_phase`, and writes its answer to stdout as one line.
        request: The request: one line.
        num_cpu_devices: Number of CPU devices.
        watch: Reports and time limit.

    Returns:
        The last line of its output.

    Raises:
        PrepError: The process failed, or reached the time limit.
    """
    environment = os.environ | _ENVIRONMENT | {"JAX_NUM_CPU_DEVICES": str(num_cpu_devices)}
    # -P: a file of the current folder must not be imported in place of a package.
    command = [sys.executable, "-P", "-m", module]
    # A file, not a pipe: the parent reads only stdout, and a full pipe would block the process.
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=environment,
        )
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            _send_request(process.stdin, request)
            answer = _wait_for_answer(process.stdout, watch)
            returncode = process.wait()
        finally:
            # No process is left after Ctrl-C or the time limit. `communicate` reaps it and closes
            # its pipes.
            process.kill()
            process.communicate()
        if returncode or answer is None:
            errors.seek(0)
            last_line = (errors.read().splitlines() or ["no message"])[-1]
            why = f"exit code {returncode}: {last_line:.300}"
            hint = "check the free memory of this host, or plan without the compilation"
            raise PrepError("the compilation failed", why, hint)
    return answer


def _send_request(stdin: IO[str], request: str) -> None:
    """Write the request. Keep stdin open: its end shows the process that the parent has ended."""
    try:
        stdin.write(f"{request}\n")
        stdin.flush()
    except BrokenPipeError:
        # The process has failed. Its exit code and its last line say why.
        pass


def _wait_for_answer(stdout: IO[str], watch: CompileWatch) -> str | None:
    """Wait until the process closes its stdout. Return its last line."""
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    # A thread reads, because reading a line from a pipe has no timeout.
    threading.Thread(target=_read_lines, args=(stdout, lines), daemon=True).start()
    start_s = time.monotonic()
    phase = _FIRST_PHASE
    answer: str | None = None
    while True:
        elapsed_s = time.monotonic() - start_s
        if watch.limit_s is not None and elapsed_s >= watch.limit_s:
            what = f"the step was not compiled within {watch.limit_s:g} s"
            hint = text(
                "a longer {}, or the estimate without {}",
                Option("compile_timeout"),
                Option("compile"),
            )
            raise PrepError(what, f"its last phase was `{phase}`", hint)
        wait_s = watch.note_s
        if watch.limit_s is not None:
            wait_s = min(wait_s, watch.limit_s - elapsed_s)
        try:
            line = lines.get(timeout=wait_s)
        except queue.Empty:
            watch.on_phase(phase, time.monotonic() - start_s)
            continue
        if line is None:
            return answer
        if line.startswith(_PHASE):
            phase = line.removeprefix(_PHASE)
            watch.on_phase(phase, time.monotonic() - start_s)
        else:
            answer = line


def _read_lines(stdout: IO[str], lines: queue.SimpleQueue[str | None]) -> None:
    """Put the lines of stdout into a queue, then None."""
    for line in stdout:
        lines.put(line.rstrip("\n"))
    lines.put(None)


def read_request() -> Any:
    """Return the request of the parent process. This process ends when its parent does."""
    request = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    return request


def _end_with_parent() -> None:
    """End this process when its stdin ends."""
    sys.stdin.read()
    # The end of stdin shows that the parent is gone. `sys.exit` would end only this thread while
    # the main thread is inside XLA.
    os._exit(1)


def report_phase(phase: str) -> None:
    """Report the begin of a phase to the parent process."""
    sys.stdout.write(f"{_PHASE}{phase}\n")
    sys.stdout.flush()
