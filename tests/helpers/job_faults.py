"""Training in two processes, one of which is killed, stopped or suspended at a given point."""

from __future__ import annotations

import hashlib
import re
import signal
import subprocess
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from prepcli.formats.run_steps import saved_steps, step_folder
from prepcli.restore.item_reader import open_reader
from tests.helpers.processes import start_processes

ROOT = Path(__file__).parents[2]
MAX_S = 300.0
SETTINGS = {
    "mesh": "1,2,2",
    "train.steps": "40",
    "train.eval_every": "10",
    "checkpoint.every": "10",
    "cluster.heartbeat_timeout": "10",
}


@dataclass(frozen=True, slots=True)
class Fault:
    """A signal to one process of a job.

    Attributes:
        name: Name of the case.
        trigger: Regular expression of the output of any process after which the signal is sent.
        victim: Index of the process.
        number: The signal.
        delay_s: Seconds between the trigger and the signal.
    """

    name: str
    trigger: str
    victim: int
    number: signal.Signals
    delay_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a job.

    Attributes:
        codes: Exit code of each process; None if it was suspended.
        seconds: Seconds from the fault to the end of the last process that was not its victim.
        errors: Output of each process on stderr.
    """

    codes: tuple[int | None, ...]
    seconds: float
    errors: tuple[str, ...]

    def message(self, index: int) -> str:
        """Return what a process printed from `error:` on."""
        return "".join(self.errors[index].partition("error:")[1:])


def run_job(folder: Path, out: str, fault: Fault | None = None, **settings: str) -> Outcome:
    """Run `prep train recipe.toml` in two processes with two CPU devices each.

    Args:
        folder: Folder of the recipe.
        out: Folder of the run.
        fault: The fault; None without one.
        **settings: Further recipe keys, `__` for a dot.
    """
    keys = SETTINGS | {name.replace("__", "."): value for name, value in settings.items()}
    words = [word for key, value in keys.items() for word in ("--set", f"{key}={value}")]
    env = {"PYTHONPATH": str(ROOT)}
    command = ("train", "recipe.toml", "--out", out, *words)
    processes = start_processes(*command, count=2, devices=2, cwd=folder, env=env)
    outputs = [_Output(process) for process in processes]
    try:
        sent_s = _send(fault, processes, outputs) if fault else time.monotonic()
        suspended = {fault.victim} if fault and fault.number == signal.SIGSTOP else set[int]()
        for index in {0, 1} - suspended:
            processes[index].wait(timeout=MAX_S)
        seconds = max(outputs[index].end_s() for index in {0, 1} - suspended - ({fault.victim} if fault else set()))
        codes = tuple(None if index in suspended else process.returncode for index, process in enumerate(processes))
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


def _send(fault: Fault, processes: list[subprocess.Popen[str]], outputs: list[_Output]) -> float:
    """Send the signal of a fault after its trigger; return the time."""
    deadline_s = time.monotonic() + MAX_S
    while not any(re.search(fault.trigger, output.text()) for output in outputs):
        assert time.monotonic() < deadline_s, f"no process printed {fault.trigger!r}"
        time.sleep(0.01)
    time.sleep(fault.delay_s)
    processes[fault.victim].send_signal(fault.number)
    return time.monotonic()


class _Output:
    """What a process prints on stderr, read by a thread, and the time of its end."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
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
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._lines.append(line)
        self._end_s = time.monotonic()
