"""Locks: they name their holder, and end with its process."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from prepcli.core.errors import PrepError
from prepcli.execution.folder_output import acquire_lock, holder_of, is_locked, join_lock, try_lock

TAKE = """
import sys
from pathlib import Path

from prepcli.execution.folder_output import acquire_lock

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


def test_joined_lock_has_one_first_holder(tmp_path: Path):
    path = tmp_path / "lock"
    first, is_first = join_lock(path)
    second, is_second_first = join_lock(path)
    assert (is_first, is_second_first) == (True, False)
    assert holder_of(path).startswith(f"process {os.getpid()} on ")
    os.close(first)
    assert is_locked(path)
    os.close(second)
    assert not is_locked(path)
    third, is_third_first = join_lock(path)
    assert is_third_first
    os.close(third)


def test_tried_lock_is_refused_while_it_is_held(tmp_path: Path):
    fd = try_lock(tmp_path / "lock")
    assert fd is not None
    assert try_lock(tmp_path / "lock") is None
    os.close(fd)
    fd = try_lock(tmp_path / "lock")
    assert fd is not None
    os.close(fd)


ACQUIRE: dict[str, Callable[[Path], object]] = {
    "lock": lambda path: acquire_lock(path, path),
    "joined lock": join_lock,
    "tried lock": try_lock,
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
