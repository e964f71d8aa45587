"""The lock of a local run: what a start leaves that ends early."""

from __future__ import annotations

from pathlib import Path

import pytest

from prepcli.core.errors import PrepError
from prepcli.execution import training_folder
from prepcli.execution.training_folder import LOCK, FolderStorage
from prepcli.formats.manifest import RECIPE_FILE


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
