"""Locks: they name their holder, and end with its process."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from prepcli.core.errors import PrepError
from prepcli.execution import locks
from prepcli.execution.locks import (
    acquire_lock,
    acquire_lock_with_retries,
    acquire_shared_lock,
    acquire_team_lock,
)

TAKE = """
import sys
from pathlib import Path

from prepcli.execution.locks import acquire_lock

acquire_lock(Path(sys.argv[1]), Path("run"))
"""


def test_lock_excludes_other_processes(tmp_path: Path):
    path = tmp_path / ".lock"
    path.write_text(
        "something longer than what is written there, of an earlier process on another machine\n"
        * 2
    )
    fd = acquire_lock(path, Path("run"))
    with pytest.raises(PrepError, match="run is locked") as caught:
        acquire_lock(path, Path("run"))
    assert f"another process works on it: process {os.getpid()} on " in caught.value.why
    assert "earlier" not in caught.value.why
    process = subprocess.run(
        [sys.executable, "-c", TAKE, path], capture_output=True, text=True, check=False
    )
    assert "run is locked" in process.stderr
    os.close(fd)
    os.close(acquire_lock(path, Path("run")))


def test_lock_ends_with_its_process(tmp_path: Path):
    path = tmp_path / ".lock"
    subprocess.run([sys.executable, "-c", TAKE, path], check=True)
    fd = acquire_lock(path, Path("run"))
    assert os.fstat(fd).st_ino == path.stat().st_ino
    os.close(fd)


class Clock:
    """A clock that only sleeping moves, and a probe that ends at a given time."""

    def __init__(self, probe: int, ends_at_s: float) -> None:
        self.now_s, self._probe, self._ends_at_s = 0.0, probe, ends_at_s

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        if self._probe >= 0 and self.now_s >= self._ends_at_s:
            os.close(self._probe)
            self._probe = -1

    strftime = staticmethod(time.strftime)


def test_lock_waits_for_a_probe_on_a_slow_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "lock"
    probe = os.open(path, os.O_RDWR | os.O_CREAT)
    fcntl.flock(probe, fcntl.LOCK_SH)
    monkeypatch.setattr(locks, "time", Clock(probe, ends_at_s=600.0))
    fd = locks.acquire_lock_with_retries(path, "share 0")
    assert locks.is_locked(path)
    os.close(fd)


def test_lock_of_another_process_is_refused(tmp_path: Path):
    path = tmp_path / "lock"
    fd = locks.acquire_lock_with_retries(path, "share 0")
    with pytest.raises(PrepError, match="share 0 is locked"):
        locks.acquire_lock_with_retries(path, "share 0")
    os.close(fd)
    os.close(locks.acquire_lock_with_retries(path, "share 0"))


ACQUIRE: dict[str, Callable[[Path], object]] = {
    "lock": lambda path: acquire_lock(path, path),
    "team lock": lambda path: acquire_team_lock(path, path, count=2),
    "retried lock": lambda path: acquire_lock_with_retries(path, "share"),
    "shared lock": acquire_shared_lock,
}


@pytest.mark.parametrize("name", ACQUIRE)
def test_lock_file_is_closed_if_locks_are_not_supported(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def flock(fd: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    open_before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match="No locks"):
        ACQUIRE[name](tmp_path / "lock")
    assert os.listdir("/proc/self/fd") == open_before
