"""Training in two processes, one of which is killed, stopped, suspended or started differently."""

from __future__ import annotations

import hashlib
import re
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np

from prepcli.formats.manifest import saved_steps, step_folder
from prepcli.restore.item_reader import open_reader
from tests.helpers.processes import start_processes
from tests.helpers.waiting import MAX_S, wait_until

ROOT = Path(__file__).parents[2]
SETTINGS = {
    "mesh": "1,2,2",
    "train.steps": "40",
    "train.eval_every": "10",
    "checkpoint.every": "10",
    "cluster.heartbeat_timeout": "10",
}
NO_SETTINGS: Mapping[str, str] = MappingProxyType({})


class JobProcess(Protocol):
    """A process of a job: a forked one, or a `subprocess.Popen[bytes]`."""

    returncode: Any
    stderr: Any

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the exit code and return it."""
        ...

    def send_signal(self, number: int, /) -> None:
        """Send a signal unless the process has ended."""
        ...

    def kill(self) -> None:
        """Send SIGKILL unless the process has ended."""
        ...


class StartProcesses(Protocol):
    """A function that starts the processes of a job, such as `start_processes`."""

    def __call__(
        self, *words: str, count: int, devices: int, cwd: Path, env: Mapping[str, str]
    ) -> Sequence[JobProcess]:
        """Start `prep WORDS` in `count` processes."""
        ...


@dataclass(frozen=True, slots=True)
class Fault:
    """A signal to one process of a job, a different start, or another event.

    Attributes:
        name: Name of the case.
        trigger: Regular expression of the output of any process after which the fault begins.
        victim: Index of the process.
        number: The signal; None for none.
        delay_s: Seconds between the trigger and the fault.
        start: Starts the processes.
        action: Called after the trigger with the folder of the run.
    """

    name: str
    trigger: str
    victim: int
    number: signal.Signals | None = None
    delay_s: float = 0.0
    start: StartProcesses = start_processes
    action: Callable[[Path], None] | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a job.

    Attributes:
        codes: Exit code of each process; None if it was suspended.
        seconds: Seconds from the fault to the end of the last process that received no signal.
        errors: Output of each process on stderr.
    """

    codes: tuple[int | None, ...]
    seconds: float
    errors: tuple[str, ...]

    def message(self, index: int) -> str:
        """Return what a process printed from `error:` on."""
        return "".join(self.errors[index].partition("error:")[1:])

    def warnings(self, index: int) -> list[str]:
        """Return the warnings of a process."""
        return [line for line in self.errors[index].splitlines() if line.startswith("warning:")]


def run_job(
    folder: Path,
    out: str,
    fault: Fault | None = None,
    *,
    settings: Mapping[str, str] = NO_SETTINGS,
    compiled: Path | None = None,
) -> Outcome:
    """Run `prep train recipe.toml` in two processes with two CPU devices each.

    Args:
        folder: Folder of the recipe.
        out: Folder of the run.
        fault: The fault; None without one.
        settings: Further recipe keys.
        compiled: Folder of compiled steps, which jax reads and writes; None to compile in each job.
    """
    words = [
        word
        for key, value in {**SETTINGS, **settings}.items()
        for word in ("--set", f"{key}={value}")
    ]
    env = {"PYTHONPATH": str(ROOT)}
    if compiled:
        env |= {
            "JAX_COMPILATION_CACHE_DIR": str(compiled),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
    command = ("train", "recipe.toml", "--out", out, *words)
    start = fault.start if fault else start_processes
    processes = start(*command, count=2, devices=2, cwd=folder, env=env)
    outputs = [_Output(process) for process in processes]
    try:
        sent_s = _begin(fault, processes, outputs, run=folder / out) if fault else time.monotonic()
        signalled = {fault.victim} if fault and fault.number else set[int]()
        suspended = signalled if fault and fault.number == signal.SIGSTOP else set[int]()
        for index in {0, 1} - suspended:
            processes[index].wait(timeout=MAX_S)
        seconds = max(outputs[index].end_s() for index in {0, 1} - suspended - signalled)
        codes = tuple(
            None if index in suspended else process.returncode
            for index, process in enumerate(processes)
        )
    finally:
        for process in processes:
            process.kill()
    return Outcome(codes, seconds - sent_s, tuple(output.text() for output in outputs))


def state_digest(run: Path) -> tuple[int, str]:
    """Return the last saved step of a run and a digest of all its leaves."""
    step = saved_steps(run)[-1]
    digest = hashlib.sha256()
    with open_reader(step_folder(run, step)) as reader:
        for name, leaf in sorted(reader.leaves.items()):
            buffer = np.empty(leaf.shape, leaf.dtype)
            reader.read(name, {tuple((0, extent) for extent in leaf.shape): buffer})
            digest.update(name.encode() + buffer.tobytes())
    return step, digest.hexdigest()


def _begin(
    fault: Fault, processes: Sequence[JobProcess], outputs: list[_Output], *, run: Path
) -> float:
    """Send the signal of a fault, or call its action, after its trigger; return the time."""
    wait_until(lambda: any(re.search(fault.trigger, output.text()) for output in outputs))
    time.sleep(fault.delay_s)
    if fault.number:
        processes[fault.victim].send_signal(fault.number)
    if fault.action:
        fault.action(run)
    return time.monotonic()


class _Output:
    """What a process prints on stderr, read by a thread, and the time of its end."""

    def __init__(self, process: JobProcess) -> None:
        self._process, self._lines, self._end_s = process, list[str](), 0.0
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def text(self) -> str:
        """Return the lines so far."""
        return "".join(self._lines)

    def end_s(self) -> float:
        """Return the time at which the process closed stderr."""
        self._thread.join(MAX_S)
        return self._end_s

    def _read(self) -> None:
        """Collect the lines of stderr until it ends."""
        for line in self._process.stderr:
            self._lines.append(line.decode())
        self._end_s = time.monotonic()
