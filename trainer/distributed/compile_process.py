"""A process that compiles for devices that this machine does not have.

XLA compiles in one call of C++ code that takes minutes, reports nothing and cannot be interrupted. A process can be
ended: at a time limit, by Ctrl-C, and when its parent ends.
"""

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

from trainer.models.errors import PrepError

# JAX reads these once per process. libtpu would otherwise look for a TPU host, and lock the machine's TPU.
_ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
_PHASE = "phase: "  # begins a line of the process that names its phase
_FIRST_PHASE = "start"
NOTE_S = 30.0  # between two reports of the same phase


def ignore_phase(phase: str, elapsed_s: float) -> None:
    """Ignore a phase."""


@dataclass(frozen=True, slots=True)
class CompileWatch:
    """Reports and time limit of a compilation.

    Attributes:
        on_phase: Receives the phase and the seconds since the start, at each new phase and every `note_s` seconds.
        limit_s: Seconds after which the compilation is ended; None without limit.
        note_s: Seconds between two reports of the same phase.
    """

    on_phase: Callable[[str, float], None] = ignore_phase
    limit_s: float | None = None
    note_s: float = NOTE_S


UNWATCHED = CompileWatch()


def run_compile_process(module: str, request: str, num_cpu_devices: int, watch: CompileWatch = UNWATCHED) -> str:
    """Run a module in a process whose JAX has simulated CPU devices only.

    Args:
        module: Module to run. It calls `read_request` and `report_phase`, and writes its answer to stdout as one line.
        request: The request: one line.
        num_cpu_devices: Number of CPU devices.
        watch: Reports and time limit.

    Returns:
        The last line that the module writes.

    Raises:
        PrepError: The process failed, or reached the time limit.
    """
    environment = os.environ | _ENVIRONMENT | {"JAX_NUM_CPU_DEVICES": str(num_cpu_devices)}
    command = [sys.executable, "-P", "-m", module]  # -P: no imports from the current folder
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
        )
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            _send(process.stdin, request)
            answer = _wait(process.stdout, watch)
            returncode = process.wait()
        finally:
            process.kill()
            process.communicate()
        if returncode or answer is None:
            errors.seek(0)
            last_line = (errors.read().splitlines() or ["no message"])[-1]
            raise PrepError("the compilation failed", f"exit code {returncode}: {last_line:.300}")
    return answer


def _send(stdin: IO[str], request: str) -> None:
    """Write the request; stdin stays open, so that the process sees the end of its parent."""
    try:
        stdin.write(f"{request}\n")
        stdin.flush()
    except BrokenPipeError:
        pass  # the process has failed; its exit code and its last line say why


def _wait(stdout: IO[str], watch: CompileWatch) -> str | None:
    """Wait until the process closes its stdout; return its last line.

    Raises:
        PrepError: The time limit was reached.
    """
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    threading.Thread(target=_read_lines, args=(stdout, lines), daemon=True).start()
    start_s = time.monotonic()
    phase = _FIRST_PHASE
    answer: str | None = None
    while True:
        elapsed_s = time.monotonic() - start_s
        if watch.limit_s is not None and elapsed_s >= watch.limit_s:
            raise _limit_error(watch.limit_s, phase)
        wait_s = watch.note_s if watch.limit_s is None else min(watch.note_s, watch.limit_s - elapsed_s)
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
    for line in stdout:
        lines.put(line.rstrip("\n"))
    lines.put(None)


def _limit_error(limit_s: float, phase: str) -> PrepError:
    what = f"the step was not compiled within {limit_s:g} s"
    hint = "a longer `--compile-timeout`, or the estimate without `--compile`"
    return PrepError(what, f"its last phase was `{phase}`", hint)


def read_request() -> Any:
    """Return the request of the parent process; this process ends when its parent does."""
    request = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    return request


def _end_with_parent() -> None:
    sys.stdin.read()
    os._exit(1)


def report_phase(phase: str) -> None:
    """Report the begin of a phase to the parent process."""
    sys.stdout.write(f"{_PHASE}{phase}\n")
    sys.stdout.flush()
