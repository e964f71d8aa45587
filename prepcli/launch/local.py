"""Several processes of one `prep` command on this machine, each with CPU devices of its own."""

from __future__ import annotations

import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from prepcli.errors import FAILED, INTERRUPTED, OK, RESUME_HINT, STOPPED, PrepError

REMOVED_PREFIXES = ("JAX_", "XLA_", "SLURM_", "OMPI_")  # would describe another job or other devices
POLL_S = 0.1
FAILURE_GRACE_S = 10.0  # for the other processes after one has failed
STOP_GRACE_S = 60.0  # for the other processes after one was stopped


def free_port() -> int:
    """Return a port that no socket uses now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def process_environment(
    environ: Mapping[str, str], *, index: int, count: int, port: int, devices: int
) -> dict[str, str]:
    """Return the environment of one process of a local job.

    Args:
        environ: Environment variables, of which those of other jobs are removed.
        index: Index of the process, from 0.
        count: Number of processes.
        port: Port of process 0.
        devices: CPU devices of each process.
    """
    inherited = {name: value for name, value in environ.items() if not name.startswith(REMOVED_PREFIXES)}
    platform = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)}
    address = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}", "JAX_NUM_PROCESSES": str(count)}
    return {**inherited, **platform, **address, "JAX_PROCESS_ID": str(index)}


def start_processes(
    words: Sequence[str],
    *,
    count: int,
    devices: int,
    environ: Mapping[str, str],
    env: Mapping[str, str],
    cwd: Path | None = None,
) -> list[subprocess.Popen[str]]:
    """Start `prep WORDS` in several processes; process 0 is the first.

    Args:
        words: Words of the command line.
        count: Number of processes.
        devices: CPU devices of each process.
        environ: Environment to inherit from.
        env: Variables that are added to it.
        cwd: Working folder.
    """
    port = free_port()
    return [
        subprocess.Popen(
            [sys.executable, "-m", "prepcli", *words],
            cwd=cwd,
            env=process_environment(environ, index=index, count=count, port=port, devices=devices) | dict(env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,  # Ctrl-C reaches the parent only, which forwards it once
        )
        for index in range(count)
    ]


@dataclass(slots=True)
class ProcessWatcher:
    """Passes on the output of processes and signals to them, until all have ended.

    Attributes:
        processes: The processes, started with pipes.
        on_line: Receives each line of stderr with the index of its process.
        poll_signal: Returns the name of a signal for the processes, empty if there is none.
    """

    processes: Sequence[subprocess.Popen[str]]
    on_line: Callable[[int, str], None]
    poll_signal: Callable[[], str]
    _lines: queue.SimpleQueue[tuple[int, str]] = field(default_factory=queue.SimpleQueue)
    _results: dict[int, str] = field(default_factory=dict)
    _forwarded: str = ""
    _first_failed: int | None = None
    _deadline_s: float = float("inf")

    def wait(self) -> str:
        """Wait until all processes have ended, and return the stdout of process 0.

        Raises:
            PrepError: A process failed or was stopped. The first one determines the exit code.
        """
        readers = [thread for index in range(len(self.processes)) for thread in self._start_readers(index)]
        try:
            while any(process.poll() is None for process in self.processes):
                self._pass_lines(POLL_S)
                self._forward_signal()
                self._end_survivors()
        finally:
            for process in self.processes:
                process.kill()
        for thread in readers:
            thread.join()
        self._pass_lines(0)
        self._note_failure()
        if self._first_failed is not None:
            raise self._failure(self._first_failed)
        return self._results[0]

    def _start_readers(self, index: int) -> list[threading.Thread]:
        process = self.processes[index]
        targets = [(self._read_lines, process.stderr), (self._read_result, process.stdout)]
        threads = [threading.Thread(target=target, args=(index, stream), daemon=True) for target, stream in targets]
        for thread in threads:
            thread.start()
        return threads

    def _read_lines(self, index: int, stream: TextIO) -> None:
        for line in stream:
            self._lines.put((index, line.rstrip("\n")))

    def _read_result(self, index: int, stream: TextIO) -> None:
        self._results[index] = stream.read()

    def _pass_lines(self, timeout_s: float) -> None:
        """Pass on the lines that have arrived, waiting for the first one."""
        try:
            self.on_line(*self._lines.get(timeout=timeout_s or None, block=timeout_s > 0))
            while True:
                self.on_line(*self._lines.get_nowait())
        except queue.Empty:
            pass

    def _forward_signal(self) -> None:
        name = self.poll_signal()
        if name and not self._forwarded:
            self._forwarded = name
            for process in self.processes:
                process.send_signal(signal.Signals[name])

    def _end_survivors(self) -> None:
        """Kill the other processes some time after the first one has failed: they may wait for it forever."""
        self._note_failure()
        if time.monotonic() > self._deadline_s:
            for process in self.processes:
                process.kill()

    def _note_failure(self) -> None:
        if self._first_failed is None:
            failed = (i for i, process in enumerate(self.processes) if process.poll() not in (None, OK))
            self._first_failed = next(failed, None)
            if self._first_failed is not None:
                is_stopped = self._code(self._first_failed) in (STOPPED, INTERRUPTED)
                self._deadline_s = time.monotonic() + (STOP_GRACE_S if is_stopped else FAILURE_GRACE_S)

    def _code(self, index: int) -> int:
        """Return the exit code of `prep` for a process that has ended, also for one that a signal killed."""
        code = self.processes[index].returncode
        if code >= 0:
            return code
        is_forwarded = bool(self._forwarded) and code == -signal.Signals[self._forwarded]
        return (INTERRUPTED if self._forwarded == "SIGINT" else STOPPED) if is_forwarded else FAILED

    def _failure(self, index: int) -> PrepError:
        code, returncode = self._code(index), self.processes[index].returncode
        if code in (STOPPED, INTERRUPTED):
            what = f"stopped by {self._forwarded}" if self._forwarded else f"process {index} was stopped"
            return PrepError(what, f"process {index} exited with {code}", RESUME_HINT, code)
        killed = f"was killed by {signal.Signals(-returncode).name}" if returncode < 0 else f"exited with {returncode}"
        return PrepError(f"process {index} {killed}", "", f"the lines that begin with [{index}] show its error", code)
