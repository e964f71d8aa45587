"""Worker processes on this machine: each runs the same command with its own share of the one output."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from prepcli.console.progress import Progress
from prepcli.engine.budget import MIB, MIN_MEMORY_NBYTES
from prepcli.errors import INTERRUPTED, OK, RESUME_HINT, STOPPED, PrepError, usage_error
from prepcli.execution.execute import ConversionResult
from prepcli.execution.resume import CHECK_TASK
from prepcli.execution.signals import PARENT_VARIABLE, Stopped, block_signals
from prepcli.planning.shares import Share

MAX_BASELINE_NBYTES = 64 * MIB  # more than a Python process that has imported prep holds
STOP_GRACE_S = 60.0  # for a worker that was asked to stop


@dataclass(frozen=True, slots=True)
class ProcessOptions:
    """Process options of the command line.

    Attributes:
        processes: Value of `--processes`; None to ask the launcher's variables.
        num_workers: Value of `--workers`.
        argv: All arguments of the command, for the workers.
    """

    processes: str | None = None
    num_workers: int = 1
    argv: tuple[str, ...] = ()


ONE_PROCESS = ProcessOptions("1/0")  # ignores variables of launchers


def worker_memory_nbytes(memory_nbytes: int, num_workers: int, *, baseline_nbytes: int) -> int:
    """Return the memory budget of each worker.

    Args:
        memory_nbytes: Value of `--memory`, for all workers together.
        num_workers: Number of workers, including this process.
        baseline_nbytes: Memory of this process before it has done any work. A worker needs as much, but no more than
            MAX_BASELINE_NBYTES: a program that calls prep may hold more. That of this process does not count.

    Returns:
        Bytes for each worker.

    Raises:
        UsageError: A worker would have less than the minimum.
    """
    baseline_nbytes = min(baseline_nbytes, MAX_BASELINE_NBYTES)
    worker_nbytes = (memory_nbytes - (num_workers - 1) * baseline_nbytes) // num_workers
    if num_workers > 1 and worker_nbytes < MIN_MEMORY_NBYTES:
        max_workers = max(1, (memory_nbytes + baseline_nbytes) // (MIN_MEMORY_NBYTES + baseline_nbytes))
        needed_nbytes = num_workers * MIN_MEMORY_NBYTES + (num_workers - 1) * baseline_nbytes
        why = f"a worker needs {MIN_MEMORY_NBYTES // MIB} MiB, and {-(-baseline_nbytes // MIB)} MiB for Python"
        hint = f"`--memory {-(-needed_nbytes // MIB)}MiB`, or `--workers {max_workers}`"
        raise usage_error(f"`--workers {num_workers}` with `--memory {memory_nbytes // MIB}MiB` is too many", why, hint)
    return worker_nbytes


def worker_argv(argv: Sequence[str], share: Share, *, memory_nbytes: int) -> list[str]:
    """Return the arguments of a worker: this process's arguments, overridden by the worker's own."""
    end = argv.index("--") if "--" in argv else len(argv)
    worker_options = ["--workers", "1", "--processes", str(share), "--memory", str(memory_nbytes)]
    return [*argv[:end], *worker_options, "--json", "--quiet", "--progress", "json", *argv[end:]]


def add_worker_reports(
    result: ConversionResult, reports: Iterable[dict[str, Any]], *, baseline_nbytes: int
) -> ConversionResult:
    """Return the result plus the bytes and memory of the workers' reports."""
    outcome, peak_nbytes = result.outcome, result.peak_nbytes
    for report in reports:
        nbytes = report["bytes"]
        outcome = dataclasses.replace(
            outcome,
            read_nbytes=outcome.read_nbytes + nbytes["read"],
            written_nbytes=outcome.written_nbytes + nbytes["written"],
            copied_nbytes=outcome.copied_nbytes + nbytes["moved"] - nbytes["read"] - nbytes["written"],
            resumed_nbytes=outcome.resumed_nbytes + nbytes["resumed"],
        )
        peak_nbytes += baseline_nbytes + report["memory"]["peak"]
    return dataclasses.replace(result, outcome=outcome, peak_nbytes=peak_nbytes)


class WorkerPool:
    """The workers of a command. Leaving the context by an error stops them."""

    def __init__(self, argv: Sequence[str], shares: Iterable[Share], *, memory_nbytes: int, progress: Progress) -> None:
        """Prepare the arguments of the workers, without starting them."""
        self._worker_argvs = [worker_argv(argv, share, memory_nbytes=memory_nbytes) for share in shares]
        self._running: list[_Worker] = []
        self._shared_progress = _SharedProgress(progress, self.check)
        self.progress: Progress = self._shared_progress if self._worker_argvs else progress

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for worker in self._running:
            worker.process.terminate()
        for worker in self._running:
            worker.end()
        if self._worker_argvs:
            self._shared_progress.inner.end()

    def start(self) -> None:
        """Start all workers."""
        for argv in self._worker_argvs:
            with block_signals():  # a signal between creation and append would leave the worker running
                self._running.append(_Worker(argv, self._shared_progress.add))

    def check(self) -> None:
        """Raise the error of a worker that ended early: its PrepError, or Stopped."""
        for worker in self._running:
            if worker.process.poll() not in (None, OK):
                raise worker.failure()

    def wait_for_reports(self) -> list[dict[str, Any]]:
        """Wait until all workers have ended, and return the JSON report of each."""
        for worker in self._running:
            worker.process.wait()
        self.check()
        return [worker.report() for worker in self._running]


class _Worker:
    """A running worker, with threads that read its report and its progress."""

    def __init__(self, argv: Sequence[str], on_progress: Callable[[int], None]) -> None:
        self._report = b""
        self._last_message = b""  # last line on stderr that is not progress
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "prepcli", *argv],  # -P: no imports from the current folder
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, PARENT_VARIABLE: str(os.getpid())},
            start_new_session=True,  # Ctrl-C goes to this process, which stops its workers
        )
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
        task, done = None, 0  # unknown until the first event; bytes that were durable before are counted already
        for line in self.process.stderr or ():
            match _parse_json(line):
                case {"event": "begin", "task": str(name), "done": int(now)} if task is None and name != CHECK_TASK:
                    task, done = name, now
                case {"event": str(), "task": str(name), "done": int(now)}:
                    if name == task and now > done:  # later tasks of the worker are not counted
                        on_progress(now - done)
                        done = now
                case _:
                    self._last_message = line

    def report(self) -> dict[str, Any]:
        """Return the worker's JSON report; empty if there is none."""
        for listener in self._listeners:
            listener.join()
        report = _parse_json(self._report)
        return report if isinstance(report, dict) else {}

    def failure(self) -> PrepError | Stopped:
        """Return the error that ended the worker."""
        code = self.process.returncode
        if code in (STOPPED, INTERRUPTED):
            return Stopped("a signal to a worker")
        if code < 0:
            name = signal.Signals(-code).name
            return PrepError(
                f"a worker was killed by {name}",
                "not by prep: out of memory?",
                RESUME_HINT,
            )
        error = self.report().get("error", {})
        what = error.get("what") or self._last_message.decode(errors="replace").strip() or f"a worker ended with {code}"
        return PrepError(what, error.get("why", ""), error.get("hint", ""), code)

    def end(self) -> None:
        """Wait for the worker up to STOP_GRACE_S, then kill it, and close its pipes."""
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


@dataclass(slots=True)
class _SharedProgress:
    """One Progress for several processes. It ends after all of them have ended."""

    inner: Progress
    check: Callable[[], None]
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self, task: str, total_bytes: int, done_bytes: int = 0) -> None:
        """Begin the task of all processes."""
        with self._lock:
            self.inner.begin(task, total_bytes, done_bytes)

    def advance(self, written_bytes: int) -> None:
        """Count bytes written by this process; raise if a worker has failed."""
        self.add(written_bytes)
        self.check()

    def add(self, written_bytes: int) -> None:
        """Count bytes written by a worker."""
        with self._lock:
            self.inner.advance(written_bytes)

    def note(self, text: str) -> None:
        """Pass the note on."""
        with self._lock:
            self.inner.note(text)

    def end(self) -> None:
        """Ignore the end of one process: workers may still be running."""


def _parse_json(data: bytes) -> object:
    with contextlib.suppress(ValueError):
        return json.loads(data)
    return None
