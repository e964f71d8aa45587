"""Workers: this command again, in further processes on this machine, each with a share of its own of the one output."""

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
from prepcli.errors import INTERRUPTED, OK, STOPPED, PrepError, usage_error
from prepcli.execution.execute import ConversionResult
from prepcli.execution.resume import CHECK_TASK
from prepcli.execution.signals import PARENT_VARIABLE, Stopped, block_signals
from prepcli.planning.shares import Share

MAX_BASELINE_NBYTES = (
    64 * MIB
)  # more than Python with prep takes at its start; a program that calls us may hold far more
STOP_GRACE_S = 60.0  # for a worker that was told to stop


@dataclass(frozen=True, slots=True)
class ProcessOptions:
    """What the command line says of processes: `--processes`, `--workers`, and all of its words, for workers."""

    processes: str | None = None
    num_workers: int = 1
    argv: tuple[str, ...] = ()


ONE_PROCESS = ProcessOptions("1/0")  # whatever a launcher says


def worker_memory_nbytes(memory_nbytes: int, num_workers: int, baseline_nbytes: int) -> int:
    """What each worker may use, where `own_nbytes` is what this process takes before it has done anything, and a worker
    too, but for what a program that calls us holds; this process's own does not count. A usage PrepError where that is
    too little."""
    baseline_nbytes = min(baseline_nbytes, MAX_BASELINE_NBYTES)
    each = (memory_nbytes - (num_workers - 1) * baseline_nbytes) // num_workers
    if num_workers > 1 and each < MIN_MEMORY_NBYTES:
        most = max(1, (memory_nbytes + baseline_nbytes) // (MIN_MEMORY_NBYTES + baseline_nbytes))
        needed = num_workers * MIN_MEMORY_NBYTES + (num_workers - 1) * baseline_nbytes
        why = f"a worker needs {MIN_MEMORY_NBYTES // MIB} MiB, and {-(-baseline_nbytes // MIB)} MiB for Python"
        hint = f"`--memory {-(-needed // MIB)}MiB`, or `--workers {most}`"
        raise usage_error(f"`--workers {num_workers}` with `--memory {memory_nbytes // MIB}MiB` is too many", why, hint)
    return each


def worker_argv(argv: Sequence[str], share: Share, memory_nbytes: int) -> list[str]:
    """The command line of a worker: that of this process, and what is its own, said last."""
    end = argv.index("--") if "--" in argv else len(argv)
    own = ["--workers", "1", "--processes", str(share), "--memory", str(memory_nbytes)]
    return [*argv[:end], *own, "--json", "--quiet", "--progress", "json", *argv[end:]]


def add_worker_reports(
    result: ConversionResult, reports: Iterable[dict[str, Any]], baseline_nbytes: int
) -> ConversionResult:
    """What this process did with what its workers report, and the memory of all of them."""
    outcome, peak_nbytes = result.outcome, result.peak_nbytes
    for report in reports:
        told = report["bytes"]
        outcome = dataclasses.replace(
            outcome,
            read_nbytes=outcome.read_nbytes + told["read"],
            written_nbytes=outcome.written_nbytes + told["written"],
            copied_nbytes=outcome.copied_nbytes + told["moved"] - told["read"] - told["written"],
            resumed_nbytes=outcome.resumed_nbytes + told["resumed"],
        )
        peak_nbytes += baseline_nbytes + report["memory"]["peak"]
    return dataclasses.replace(result, outcome=outcome, peak_nbytes=peak_nbytes)


class WorkerPool:
    """The workers of a command. Within the context they are there, once started; leaving it by an error stops them."""

    def __init__(self, argv: Sequence[str], shares: Iterable[Share], memory_nbytes: int, progress: Progress) -> None:
        """Nothing is started yet."""
        self._worker_argvs = [worker_argv(argv, share, memory_nbytes) for share in shares]
        self._running: list[_Worker] = []
        self._shared_progress = _SharedProgress(progress, self.check)
        self.progress: Progress = self._shared_progress if self._worker_argvs else progress

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for worker in self._running:
            worker.process.terminate()
        for worker in self._running:
            worker.end()
        if self._worker_argvs:
            self._shared_progress.inner.end()

    def start(self) -> None:
        """Start them all."""
        for words in self._worker_argvs:
            with block_signals():  # a worker that was made and is not known would be waited for and never told
                self._running.append(_Worker(words, self._shared_progress.add))

    def check(self) -> None:
        """Raise what ended a worker before its time: its PrepError, or Stopped."""
        for worker in self._running:
            if worker.process.poll() not in (None, OK):
                raise worker.failure()

    def wait_for_reports(self) -> list[dict[str, Any]]:
        """What each worker reports, once all have ended."""
        for worker in self._running:
            worker.process.wait()
        self.check()
        return [worker.report() for worker in self._running]


class _Worker:
    def __init__(self, words: Sequence[str], add: Callable[[int], None]) -> None:
        self._report = b""
        self._last_message = b""  # what it last said that was not progress
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "prepcli", *words],  # -P: nothing is imported from where the command is given
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, PARENT_VARIABLE: str(os.getpid())},
            start_new_session=True,  # Ctrl-C is for this process: it tells its workers
        )
        self._listeners = [
            threading.Thread(target=self._read_report, daemon=True),
            threading.Thread(target=self._read_progress, args=(add,), daemon=True),
        ]
        for listener in self._listeners:
            listener.start()

    def _read_report(self) -> None:
        if self.process.stdout:
            self._report = self.process.stdout.read()

    def _read_progress(self, add: Callable[[int], None]) -> None:
        task, done = None, 0  # unknown until its first word: what was there when it began is counted already
        for line in self.process.stderr or ():
            match _parse_json(line):
                case {"event": "begin", "task": str(name), "done": int(now)} if task is None and name != CHECK_TASK:
                    task, done = name, now
                case {"event": str(), "task": str(name), "done": int(now)}:
                    if name == task and now > done:  # what it does after its share is not counted
                        add(now - done)
                        done = now
                case _:
                    self._last_message = line

    def report(self) -> dict[str, Any]:
        """The object that it printed before it ended; empty if there is none."""
        for listener in self._listeners:
            listener.join()
        found = _parse_json(self._report)
        return found if isinstance(found, dict) else {}

    def failure(self) -> PrepError | Stopped:
        """Why it ended."""
        code = self.process.returncode
        if code in (STOPPED, INTERRUPTED):
            return Stopped("a signal to a worker")
        if code < 0:
            name = signal.Signals(-code).name
            return PrepError(
                f"a worker was killed by {name}", "not by prep: out of memory?", "run it again: it goes on"
            )
        told = self.report().get("error", {})
        what = told.get("what") or self._last_message.decode(errors="replace").strip() or f"a worker ended with {code}"
        return PrepError(what, told.get("why", ""), told.get("hint", ""), code)

    def end(self) -> None:
        """Wait for it, not for ever, and let go of what belongs to it."""
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
    """One Progress for several processes; it ends when all of them have."""

    inner: Progress
    check: Callable[[], None]
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self, task: str, total_bytes: int, done_bytes: int = 0) -> None:
        """Of all of them."""
        with self._lock:
            self.inner.begin(task, total_bytes, done_bytes)

    def advance(self, written_bytes: int) -> None:
        """So many more bytes are written here; raises if that is of no use any more, because a worker failed."""
        self.add(written_bytes)
        self.check()

    def add(self, written_bytes: int) -> None:
        """So many more bytes are written by a worker."""
        with self._lock:
            self.inner.advance(written_bytes)

    def note(self, text: str) -> None:
        """As it is."""
        with self._lock:
            self.inner.note(text)

    def end(self) -> None:
        """Not yet."""


def _parse_json(data: bytes) -> object:
    with contextlib.suppress(ValueError):
        return json.loads(data)
    return None
