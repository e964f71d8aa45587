"""Syncing many files: each once, several at a time, and an error of one of them is raised."""

from __future__ import annotations

import errno
import threading
from pathlib import Path

import pytest

from prepcli.engine.sync_files import SYNC_THREADS, sync_many, sync_paths


@pytest.mark.parametrize("count", [0, 1, SYNC_THREADS, SYNC_THREADS + 1, 500])
def test_each_item_is_synced_once(count: int):
    synced: list[int] = []
    sync_many(synced.append, range(count))
    assert sorted(synced) == list(range(count))


def test_many_items_are_synced_at_the_same_time():
    barrier = threading.Barrier(SYNC_THREADS, timeout=60)
    met: list[int] = []

    def sync(item: int) -> None:
        # Each of the first items waits for the others. The barrier raises an error if they do not all come.
        if item < SYNC_THREADS:
            barrier.wait()
            met.append(item)

    sync_many(sync, range(2 * SYNC_THREADS))
    assert sorted(met) == list(range(SYNC_THREADS))


@pytest.mark.parametrize("count", [3, 500])
def test_error_of_one_item_is_raised(count: int):
    def sync(item: int) -> None:
        if item == count // 2:
            raise OSError(errno.EIO, "Input/output error")

    with pytest.raises(OSError, match="Input/output error"):
        sync_many(sync, range(count))


def test_absent_file_is_an_error(tmp_path: Path):
    paths = [tmp_path / str(number) for number in range(50)]
    for path in paths:
        path.touch()
    sync_paths(paths)
    paths[20].unlink()
    with pytest.raises(FileNotFoundError):
        sync_paths(paths)
