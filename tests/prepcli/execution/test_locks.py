"""Locks of outputs and of local runs: they name their holder, and end with its process."""

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
from prepcli.execution import training_folder
from prepcli.execution.folder_output import acquire_lock, holder_of, is_locked, join_lock, try_lock
from prepcli.execution.training_folder import LOCK, FolderStorage
from prepcli.formats.manifest import RECIPE_FILE

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


def acquired(folder: Path) -> FolderStorage:
    place = FolderStorage(folder)
    place.acquire(pytest.fail)
    return place


def test_release_after_error_removes_new_folders(tmp_path: Path):
    acquired(tmp_path / "runs" / "a").release(after_error=True)
    assert list(tmp_path.iterdir()) == []


def test_release_after_error_keeps_tokens_and_earlier_folders(tmp_path: Path):
    (tmp_path / "data").mkdir()
    acquired(tmp_path).release(after_error=True)
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_release_after_error_keeps_the_lock_file_of_a_begun_run(tmp_path: Path):
    (tmp_path / RECIPE_FILE).touch()
    acquired(tmp_path).release(after_error=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == [LOCK, RECIPE_FILE]
    acquired(tmp_path).release()


def test_acquire_is_refused_while_another_holds_the_run(tmp_path: Path):
    first = acquired(tmp_path)
    first.acquire(pytest.fail)  # a second call changes nothing
    with pytest.raises(PrepError, match="is locked"):
        acquired(tmp_path)
    first.release()
    acquired(tmp_path).release()


def test_acquire_does_not_take_a_removed_lock_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A failed start removes the folder after this one has opened the lock file in it."""
    folder, acquire_lock = tmp_path / "run", training_folder.acquire_lock
    failed = acquired(folder)

    def acquire_late(path: Path, locked_path: Path) -> int:
        monkeypatch.setattr(training_folder, "acquire_lock", acquire_lock)
        failed.release()
        fd = acquire_lock(path, locked_path)
        path.unlink()
        folder.rmdir()
        return fd

    monkeypatch.setattr(training_folder, "acquire_lock", acquire_late)
    second = acquired(folder)
    assert [path.name for path in folder.iterdir()] == [LOCK]
    with pytest.raises(PrepError, match="is locked"):
        acquired(folder)
    second.release()
