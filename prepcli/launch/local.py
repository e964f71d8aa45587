"""Several processes of one `prep` command on this machine, each with separate CPU devices."""

from __future__ import annotations

import contextlib
import queue
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, TextIO

from prepcli.core.errors import INTERRUPTED, OK, RESUME_HINT, STOPPED, PrepError
from prepcli.core.option_spec import PositiveInt, option
from prepcli.launch.job import JobOptions

# Variables with these prefixes would describe another job or other devices.
REMOVED_PREFIXES = (
    "JAX_",
    "XLA_",
    "SLURM_",
    "OMPI_",
)
POLL_S = 0.1
# Added to the time-out of the heartbeat: a busy machine needs time to report a lost process.
GRACE_MARGIN_S = 60.0
# First and last port of the range from which the kernel assigns local ports of connections
ASSIGNED_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
# The default of Linux
DEFAULT_FIRST_ASSIGNED_PORT = 32_768
# Services have smaller ones, and the default port of the coordinator is 11,111.
FIRST_PORT = 12_000
# With fewer ports below the assigned ones, two jobs could choose the same port.
MIN_PORTS = 1000
MAX_PORT_TRIES = 100


class LocalOptions(JobOptions):
    """Options of processes on this machine."""

    processes: Annotated[
        PositiveInt,
        option("N", "Start N processes.", default=2, maximum=64, position=1),
    ]
    devices: Annotated[
        PositiveInt, option("M", "Use M CPU devices in each.", default=1, position=1)
    ]


def free_port() -> int:
    """Return an unused port, outside of the kernel's range of local ports if that leaves enough ports."""
    # The job binds the port seconds later. Until then a connection to anywhere could get a port of
    # the kernel's range as its local one.
    num_ports = _first_assigned_port() - FIRST_PORT
    if num_ports >= MIN_PORTS:
        for _ in range(MAX_PORT_TRIES):
            port = FIRST_PORT + secrets.randbelow(num_ports)
            with contextlib.suppress(OSError):
                return _bound_port(port)
    # Port 0: the kernel chooses one of its range.
    return _bound_port(0)


def _first_assigned_port() -> int:
    """Return the first port of the kernel's range of local ports."""
    try:
        return int(ASSIGNED_PORTS.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return DEFAULT_FIRST_ASSIGNED_PORT


def _bound_port(port: int) -> int:
    """Bind a port for a moment, and return its number. Raise OSError if it is in use."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", port))
        return listener.getsockname()[1]


def process_environment(
    environ: Mapping[str, str], *, index: int, count: int, port: int, devices: int
) -> dict[str, str]:
    """Return the environment of process `index` of a local job. It does not inherit REMOVED_PREFIXES from `environ`."""
    inherited = {
        name: value for name, value in environ.items() if not name.startswith(REMOVED_PREFIXES)
    }
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
    """Start `prep WORDS` in several processes with `env` added to `environ`. Process 0 is the first."""
    port = free_port()
    return [
        subprocess.Popen(
            [sys.executable, "-m", "prepcli", *words],
            cwd=cwd,
            env=process_environment(environ, index=index, count=count, port=port, devices=devices)
            | dict(env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
            # Ctrl-C reaches the parent only, which forwards it once.
            start_new_session=True,
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
        grace_s: Seconds between the first failure or stop and the kill of the remaining processes.
    """

    processes: Sequence[subprocess.Popen[str]]
    on_line: Callable[[int, str], None]
    poll_signal: Callable[[], str]
    grace_s: float
    _lines: queue.SimpleQueue[tuple[int, str]] = field(default_factory=queue.SimpleQueue)
    _results: dict[int, str] = field(default_factory=dict)
    _forwarded: str = ""
    _has_lines: set[int] = field(default_factory=set)
    # Exit codes of the processes that this watcher did not kill.
    _returncodes: dict[int, int] = field(default_factory=dict)
    _deadline_s: float = float("inf")

    def wait(self) -> str:
        """Wait until all processes have ended, and return the stdout of process 0.

        Raises:
            PrepError: A process failed or was stopped. The first cause determines the exit code.
        """
        readers: list[threading.Thread] = []
        for index, process in enumerate(self.processes):
            # One thread per pipe: a process that fills an unread pipe, 64 KiB on Linux, would wait forever.
            pipes = ((self._read_lines, process.stderr), (self._read_result, process.stdout))
            for read, pipe in pipes:
                readers.append(threading.Thread(target=read, args=(index, pipe), daemon=True))
                readers[-1].start()
        try:
            while (
                len(self._returncodes) < len(self.processes)
                and time.monotonic() <= self._deadline_s
            ):
                self._forward_lines(POLL_S)
                self._forward_signal()
                self._record_ended_processes()
        finally:
            for process in self.processes:
                process.kill()
        # The pipes close with their processes, so the readers end. Their last lines may come after the last poll.
        for thread in readers:
            thread.join()
        self._forward_lines(0)
        failed = [index for index, returncode in self._returncodes.items() if returncode != OK]
        if failed:
            raise self._failure_error(min(failed, key=self._rank))
        return self._results[0]

    def _read_lines(self, index: int, stream: TextIO) -> None:
        for line in stream:
            self._lines.put((index, line.rstrip("\n")))

    def _read_result(self, index: int, stream: TextIO) -> None:
        self._results[index] = stream.read()

    def _forward_lines(self, timeout_s: float) -> None:
        """Pass on the available lines, waiting for the first one."""
        try:
            self._forward_line(*self._lines.get(timeout=timeout_s or None, block=timeout_s > 0))
            while True:
                self._forward_line(*self._lines.get_nowait())
        except queue.Empty:
            pass

    def _forward_line(self, index: int, line: str) -> None:
        self._has_lines.add(index)
        self.on_line(index, line)

    def _forward_signal(self) -> None:
        name = self.poll_signal()
        if name and not self._forwarded:
            self._forwarded = name
            for process in self.processes:
                process.send_signal(signal.Signals[name])

    def _record_ended_processes(self) -> None:
        """Record ended processes. The first failure sets the deadline of the remaining ones.

        They may wait for the failed process forever, or until the watchdog misses its heartbeat.
        """
        for index, process in enumerate(self.processes):
            returncode = process.poll()
            if returncode is None or index in self._returncodes:
                continue
            self._returncodes[index] = returncode
            # Only the first failure sets the deadline: later ones do not extend it.
            if returncode != OK and self._deadline_s == float("inf"):
                self._deadline_s = time.monotonic() + self.grace_s
            if self._is_lost(index):
                self.on_line(index, f"process {index} {self._end_text(index)}; the others stop")

    def _is_lost(self, index: int) -> bool:
        """Return whether a process ended by a signal from outside, e.g. `kill -9`."""
        return self._returncodes[index] < 0 and not self._is_forwarded(index)

    def _is_forwarded(self, index: int) -> bool:
        return (
            bool(self._forwarded) and self._returncodes[index] == -signal.Signals[self._forwarded]
        )

    def _rank(self, index: int) -> int:
        """Return the rank of a failure. The failure with the lowest rank is the cause of the other ones.

        Several processes may have ended between two polls, so the order of their ends is unknown. A killed process
        reports no error. JAX then aborts or stops its peers.
        """
        returncode = self._returncodes[index]
        if self._is_lost(index):
            return 1 if returncode == -signal.SIGABRT else 0
        return 3 if self._exit_code(index) in (STOPPED, INTERRUPTED) else 2

    def _exit_code(self, index: int) -> int:
        """Return the exit code of `prep` for an ended process.

        A process killed by a signal counts as stopped: the same command resumes the run.
        """
        returncode = self._returncodes[index]
        if returncode >= 0:
            return returncode
        return INTERRUPTED if self._is_forwarded(index) and self._forwarded == "SIGINT" else STOPPED

    def _end_text(self, index: int) -> str:
        returncode = self._returncodes[index]
        if returncode < 0:
            return f"was killed by {signal.Signals(-returncode).name}"
        return f"exited with {returncode}"

    def _failure_error(self, index: int) -> PrepError:
        code = self._exit_code(index)
        end = f"process {index} {self._end_text(index)}"
        if self._is_lost(index):
            return PrepError(end, "the others cannot continue without it", RESUME_HINT, code)
        if code in (STOPPED, INTERRUPTED):
            what = f"process {index} was stopped"
            if self._forwarded:
                what = f"stopped by {self._forwarded}"
            return PrepError(what, end, RESUME_HINT, code)
        if index in self._has_lines:
            return PrepError(end, "", f"the lines that begin with [{index}] show its error", code)
        return PrepError(end, "it printed no message", "run the same command in one process", code)
