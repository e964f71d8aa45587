"""Output files: links are never followed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from prepcli.core.errors import PrepError
from prepcli.engine.no_follow import (
    check_no_symlinks,
    open_no_follow,
    read_no_follow,
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
