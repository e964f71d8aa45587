"""Worker processes on this machine: each runs the same command with its own share of the one output."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from prepcli.core.errors import (
    INTERRUPTED,
    OK,
    RESUME_HINT,
    STOPPED,
    Option,
    PrepError,
    text,
    usage_error,
)
from prepcli.core.json_values import JsonObject
from prepcli.core.launchers import PARENT_VARIABLE
from prepcli.core.observer import LockedProgress, Progress
from prepcli.core.signals import Stopped, block_signals
from prepcli.engine.budget import MIB, MIN_MEMORY_NBYTES, anonymous_nbytes
from prepcli.engine.conversion_result import ConversionResult
from prepcli.planning.work_units import Share
from prepcli.restore.digest_checks import CHECK_TASK

# Above the memory of a Python process that has only imported prep.
MAX_BASELINE_NBYTES = 64 * MIB
# Time for a worker to end after a signal. It is killed afterwards.
STOP_GRACE_S = 60.0


@dataclass(frozen=True, slots=True)
class ProcessOptions:
    """Process options of the command line.

    Attributes:
        processes: Value of `--processes`, or None to ask the launcher's variables.
        num_workers: Value of `--workers`.
        argv: All arguments of the command, for the workers.
    """

    processes: str | None = None
    num_workers: int = 1
    argv: tuple[str, ...] = ()


# Ignores the variables of launchers.
ONE_PROCESS = ProcessOptions("1/0")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutionOptions:
    """How an output is written. `allow_overflow` decides between an error and infinities, the others change no byte.

    Attributes:
        memory_nbytes: Memory budget of this process and its workers.
        overwrite: Replace an existing output.
        restart: Delete what an unfinished earlier conversion has written, and write it again.
        allow_overflow: Cast out-of-range values to infinity.
        process_options: Share of this process in the work.
    """

    memory_nbytes: int
    overwrite: bool = False
    restart: bool = False
    allow_overflow: bool = False
    process_options: ProcessOptions = ONE_PROCESS


def worker_memory_nbytes(memory_nbytes: int, num_workers: int, *, baseline_nbytes: int) -> int:
    """Return the memory budget of each worker.

    Args:
        memory_nbytes: Value of `--memory`, for all workers together.
        num_workers: Number of workers, including this process.
        baseline_nbytes: Memory of this process before it has done any work. Each other worker is assumed to need as
            much before it works, at most MAX_BASELINE_NBYTES: this process may be a program that calls prep and has
            other data in memory. The baseline of this process is not part of the budget.

    Returns:
        Bytes for each worker.

    Raises:
        UsageError: A worker would have less than the minimum.
    """
    baseline_nbytes = min(baseline_nbytes, MAX_BASELINE_NBYTES)
    worker_nbytes = (memory_nbytes - (num_workers - 1) * baseline_nbytes) // num_workers
    if num_workers > 1 and worker_nbytes < MIN_MEMORY_NBYTES:
        fitting = (memory_nbytes + baseline_nbytes) // (MIN_MEMORY_NBYTES + baseline_nbytes)
        needed_nbytes = num_workers * MIN_MEMORY_NBYTES + (num_workers - 1) * baseline_nbytes
        minimum = f"{MIN_MEMORY_NBYTES // MIB} MiB"
        raise usage_error(
            text(
                "{} with {} is too many",
                Option("workers", num_workers),
                Option("memory", f"{memory_nbytes // MIB}MiB"),
            ),
            f"a worker needs {minimum}, and {-(-baseline_nbytes // MIB)} MiB for Python",
            text(
                "{}, or {}",
                Option("memory", f"{-(-needed_nbytes // MIB)}MiB"),
                Option("workers", max(1, fitting)),
            ),
        )
    return worker_nbytes


def worker_argv(argv: Sequence[str], share: Share, *, memory_nbytes: int) -> list[str]:
    """Return the arguments of a worker: this process's arguments, overridden by the worker's own."""
    # The last occurrence of an option counts. After `--` there are only names.
    end = argv.index("--") if "--" in argv else len(argv)
    worker_options = ["--workers", "1", "--processes", str(share), "--memory", str(memory_nbytes)]
    return [*argv[:end], *worker_options, "--json", "--quiet", "--progress", "json", *argv[end:]]


class WorkerPool:
    """The workers of a command on this machine. Leaving the context by an error stops them.

    Attributes:
        share: Share of this process.
        indices: Indices of this process and its workers.
        memory_nbytes: Memory budget of each process.
        progress: Progress of this process and its workers together.
    """

    def __init__(
        self,
        options: ProcessOptions,
        share: Share,
        *,
        memory_nbytes: int,
        progress: Progress,
    ) -> None:
        """Divide a share and its memory among this process and its workers, without starting them.

        Args:
            options: Number of workers, and the arguments of the command.
            share: Share of this process and its workers together.
            memory_nbytes: Memory budget of this process and its workers together.
            progress: Progress of this process.
        """
        self._baseline_nbytes = anonymous_nbytes()
        self.memory_nbytes = worker_memory_nbytes(
            memory_nbytes, options.num_workers, baseline_nbytes=self._baseline_nbytes
        )
        self.share, *worker_shares = share.split(options.num_workers)
        self.indices = range(self.share.index, self.share.index + options.num_workers)
        self._worker_argvs: list[list[str]] = []
        for worker_share in worker_shares:
            argv = worker_argv(options.argv, worker_share, memory_nbytes=self.memory_nbytes)
            self._worker_argvs.append(argv)
        self._running: list[_Worker] = []
        self._shared_progress = _SharedProgress(progress, self.check)
        self.progress: Progress = progress
        if self._worker_argvs:
            self.progress = self._shared_progress

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *error: object) -> None:
        # All workers get a signal first, so that they stop at the same time. Each keeps its durable bytes.
        for worker in self._running:
            worker.process.terminate()
        for worker in self._running:
            worker.end()
        if self._worker_argvs:
            self._shared_progress.inner.end()

    def start(self) -> None:
        """Start all workers."""
        for argv in self._worker_argvs:
            # A signal between the creation and the append would leave the worker running.
            with block_signals():
                self._running.append(_Worker(argv, self._shared_progress.add))

    def worker_pids(self) -> list[int]:
        """Return the process ids of the workers."""
        return [worker.process.pid for worker in self._running]

    def check(self) -> None:
        """Raise the error of a failed worker: its PrepError, or Stopped."""
        for worker in self._running:
            if worker.process.poll() not in (None, OK):
                raise worker.failure()

    def add_reports(self, result: ConversionResult) -> None:
        """Wait until all workers have ended, and add their bytes, times and memory to this process's result."""
        if not self._running:
            return
        for worker in self._running:
            worker.process.wait()
        self.check()
        for worker in self._running:
            worker_result = ConversionResult.from_json(worker.report())
            if worker_result is None:
                raise PrepError("a worker ended without a report", "", RESUME_HINT)
            result.add(worker_result)
            result.peak_nbytes += self._baseline_nbytes + worker_result.peak_nbytes


class _Worker:
    """A running worker, with readers of its report and its progress."""

    def __init__(self, argv: Sequence[str], on_progress: Callable[[int], None]) -> None:
        self._report = b""
        # Last line on stderr without progress.
        self._last_message = b""
        self.process = subprocess.Popen(
            # -P: no imports from the current folder
            [sys.executable, "-P", "-m", "prepcli", *argv],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, PARENT_VARIABLE: str(os.getpid())},
            # Ctrl-C goes to the foreground session only: this process, which then stops its workers
            start_new_session=True,
        )
        # A worker that fills a pipe would wait for ever, so both pipes are read all the time.
        self._listeners = [
            threading.Thread(target=self._read_report, daemon=True),
            threading.Thread(target=self._read_progress, args=(on_progress,), daemon=True),
        ]
        for listener in self._listeners:
            listener.start()

    def _read_report(self) -> None:
        if self.process.stdout:
            self._report = self.process.stdout.read()

    def _read_progress(self, on_progress: Callable[[int], None]) -> None:
        """Read the worker's stderr to its end, report progress, and keep the last message of an error."""
        # Each line of a worker's stderr is a JSON event of its progress, or a message of an error.
        # The first task is the conversion. Its bytes that were durable before are counted already.
        task = None
        done = 0
        for line in self.process.stderr or ():
            match _parse_json(line):
                case {"event": "begin", "task": str(name), "done": int(now)} if (
                    task is None and name != CHECK_TASK
                ):
                    task = name
                    done = now
                case {"event": str(), "task": str(name), "done": int(now)}:
                    # Later tasks of the worker are not counted.
                    if name == task and now > done:
                        on_progress(now - done)
                        done = now
                case _:
                    self._last_message = line

    def report(self) -> JsonObject:
        """Return the worker's JSON report, or an empty dict if there is none."""
        for listener in self._listeners:
            listener.join()
        report = _parse_json(self._report)
        return report if isinstance(report, dict) else {}

    def failure(self) -> PrepError | Stopped:
        """Return the error of the worker."""
        code = self.process.returncode
        if code in (STOPPED, INTERRUPTED):
            return Stopped("a signal to a worker")
        if code < 0:
            name = signal.Signals(-code).name
            return PrepError(
                f"a worker was killed by {name}",
                "prep did not send the signal: the machine may be out of memory",
                RESUME_HINT,
            )
        texts = {"what": "", "why": "", "hint": ""}
        error = self.report().get("error")
        if isinstance(error, dict):
            texts |= {key: str(error[key]) for key in texts if key in error}
        last_message = self._last_message.decode(errors="replace").strip()
        what = texts["what"] or last_message or f"a worker ended with {code}"
        return PrepError(what, texts["why"], texts["hint"], code)

    def end(self) -> None:
        """Wait up to STOP_GRACE_S for the worker to end, kill it if it still runs, and close its pipes."""
        try:
            self.process.wait(STOP_GRACE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for listener in self._listeners:
            listener.join()
        for stream in (self.process.stdout, self.process.stderr):
            if stream:
                stream.close()


class _SharedProgress(LockedProgress):
    """One Progress for several processes. It ends after all of them have ended."""

    def __init__(self, inner: Progress, check: Callable[[], None]) -> None:
        super().__init__(inner)
        self._check = check

    def advance(self, written_bytes: int) -> None:
        """Count bytes written by this process. Raise if a worker has failed."""
        self.add(written_bytes)
        self._check()

    def add(self, written_bytes: int) -> None:
        """Count bytes written by a worker."""
        super().advance(written_bytes)

    def end(self) -> None:
        """Ignore the end of one process: workers may still be running."""


def _parse_json(data: bytes) -> object:
    with contextlib.suppress(ValueError):
        return json.loads(data)
    return None
