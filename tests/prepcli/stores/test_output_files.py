"""Output files: links are never followed, and each file is synced once, several at a time."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from prepcli.core.errors import PrepError
from prepcli.stores.files import (
    SYNC_THREADS,
    check_no_symlinks,
    open_no_follow,
    read_no_follow,
    sync_many,
    sync_paths,
    write_no_follow,
)

WRITE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
UNSAFE_FILES: dict[str, Callable[[Path, Path], object]] = {
    "symbolic link": lambda path, target: path.symlink_to(target),
    "hard link": lambda path, target: path.hardlink_to(target),
    "not a regular file": lambda path, target: os.mkfifo(path),
}


@pytest.mark.parametrize("kind", UNSAFE_FILES)
def test_open_no_follow_rejects_links(tmp_path: Path, kind: str):
    target = tmp_path / "target"
    target.write_text("mine")
    UNSAFE_FILES[kind](tmp_path / "unsafe", target)
    with pytest.raises(PrepError, match=kind):
        open_no_follow(tmp_path / "unsafe", WRITE)
    assert target.read_text() == "mine"


def test_write_no_follow_replaces_a_file(tmp_path: Path):
    write_no_follow(tmp_path / "file", b"longer")
    write_no_follow(tmp_path / "file", b"new")
    assert read_no_follow(tmp_path / "file") == b"new"


def test_open_no_follow_passes_other_errors_on(tmp_path: Path):
    with pytest.raises(FileNotFoundError):
        read_no_follow(tmp_path / "absent")


@pytest.mark.parametrize("place", ["folder", "folder/link", "folder/below/link"])
def test_check_no_symlinks_finds_links_anywhere(tmp_path: Path, place: str):
    (tmp_path / "real/below").mkdir(parents=True)
    path = tmp_path / place.replace("folder", "real")
    if place == "folder":
        path = tmp_path / "linked"
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PrepError, match="is a symbolic link"):
        check_no_symlinks(path if place == "folder" else tmp_path / "real")


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
