"""Measure wall time, CPU time and anonymous memory of a command's whole process tree from outside. Linux only."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROC = Path("/proc")
DROP_CACHES = PROC / "sys/vm/drop_caches"
PERIOD_S = 0.01
SCAN_EVERY = 5  # samples: a scan for new processes costs more than a sample of the known ones


@dataclass(frozen=True, slots=True)
class CommandCost:
    """Cost of one run of a command.

    Attributes:
        exit_code: Exit code of the command.
        wall_s: Wall time.
        cpu_s: User and system time of all processes that were waited for, without kernel threads.
        peak_nbytes: Maximum over samples of the anonymous and shared memory of all processes together.
        max_rss_nbytes: Exact maximum RSS of the largest single process, mapped files included; at least the RSS of
            this process when it started the command.
        stdout: Standard output of the command.
        stderr: Standard error of the command.
    """

    exit_code: int
    wall_s: float
    cpu_s: float
    peak_nbytes: int
    max_rss_nbytes: int
    stdout: str
    stderr: str


def measure(command: Sequence[str | Path], period_s: float = PERIOD_S) -> CommandCost:
    """Run a command and return its cost. An exception in this process kills the command's session."""
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        start_s = time.perf_counter()
        process = subprocess.Popen(command, stdout=stdout, stderr=stderr, start_new_session=True)
        with _sampled(process.pid, period_s) as samples:
            try:
                _, status, usage = os.wait4(process.pid, 0)
            except BaseException:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                raise
            wall_s = time.perf_counter() - start_s
        process.returncode = os.waitstatus_to_exitcode(status)
        texts = [
            os.pread(f.fileno(), os.fstat(f.fileno()).st_size, 0).decode(errors="replace")
            for f in (stdout, stderr)
        ]
    cpu_s = usage.ru_utime + usage.ru_stime
    return CommandCost(
        process.returncode, wall_s, cpu_s, max(samples), usage.ru_maxrss << 10, *texts
    )


def wrap_function(
    module: str, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> None:
    """Replace a function of this process by `wrap(function)`.

    Args:
        module: Its module, which is imported.
        name: Its name in the module. For a method `Class.method`.
        wrap: Returns the new function.
    """
    owner: Any = importlib.import_module(module)
    *classes, attribute = name.split(".")
    for class_name in classes:
        owner = getattr(owner, class_name)
    setattr(owner, attribute, wrap(getattr(owner, attribute)))


def drop_page_cache(paths: Sequence[Path]) -> str:
    """Write back the given files, or all files under the given folders, and evict them from the page cache.

    Returns:
        `drop_caches` if the system could drop all clean pages, else `fadvise` (advisory only).
    """
    for path in paths:
        for file in (path,) if path.is_file() else filter(Path.is_file, path.rglob("*")):
            _evict(file)
    try:
        DROP_CACHES.write_text("1")
    except OSError:
        return "fadvise"
    return "drop_caches"


def _evict(path: Path) -> None:
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(file)


@contextlib.contextmanager
def _sampled(root: int, period_s: float) -> Iterator[list[int]]:
    """Sample the memory of the process tree under `root` until the end of the block."""
    samples = [0]
    done = threading.Event()
    thread = threading.Thread(target=_sample, args=(root, period_s, done, samples), daemon=True)
    thread.start()
    try:
        yield samples
    finally:
        done.set()
        thread.join()


def _sample(root: int, period_s: float, done: threading.Event, samples: list[int]) -> None:
    processes: list[int] = []
    for count in itertools.count():
        if count % SCAN_EVERY == 0:
            processes = process_tree(root)
        samples.append(sum(map(anonymous_nbytes, processes)))
        if done.wait(period_s):
            return


def process_tree(root_pid: int) -> list[int]:
    """Return `root_pid`, its descendants, and the processes of its session (orphans stay in it)."""
    lineage = {
        int(path.name): _parent_and_session(path)
        for path in PROC.iterdir()
        if path.name.isdecimal()
    }
    members = {root_pid} | {
        process for process, (_, session) in lineage.items() if session == root_pid
    }
    while (
        more := {process for process, (parent, _) in lineage.items() if parent in members} - members
    ):
        members |= more
    return sorted(members)


def anonymous_nbytes(pid: int) -> int:
    """Return the anonymous and shared memory of a process in bytes, or 0 if it has ended."""
    fields = dict(
        line.split(":", 1) for line in _read(PROC / str(pid) / "status").splitlines() if ":" in line
    )
    return sum(int(fields.get(key, "0 kB").split()[0]) << 10 for key in ("RssAnon", "RssShmem"))


def _parent_and_session(path: Path) -> tuple[int, int]:
    """Return parent and session id of a process."""
    fields = _read(path / "stat").rpartition(")")[2].split()
    return (int(fields[1]), int(fields[3])) if fields else (0, 0)


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
