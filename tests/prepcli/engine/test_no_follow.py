"""Files of an output: no link leads out of its folder."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from prepcli.engine.no_follow import check_no_symlinks, open_no_follow, read_no_follow, write_no_follow
from prepcli.errors import PrepError

WRITE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
LAID: dict[str, Callable[[Path, Path], object]] = {
    "symbolic link": lambda path, target: path.symlink_to(target),
    "hard link": lambda path, target: path.hardlink_to(target),
    "not a regular file": lambda path, target: os.mkfifo(path),
}


@pytest.mark.parametrize("kind", LAID)
def test_open_own_refuses_links(tmp_path: Path, kind: str):
    target = tmp_path / "target"
    target.write_text("mine")
    LAID[kind](tmp_path / "laid", target)
    with pytest.raises(PrepError, match=kind):
        open_no_follow(tmp_path / "laid", WRITE)
    assert target.read_text() == "mine"


def test_write_own_replaces_a_file(tmp_path: Path):
    write_no_follow(tmp_path / "file", b"longer")
    write_no_follow(tmp_path / "file", b"new")
    assert read_no_follow(tmp_path / "file") == b"new"


def test_open_own_leaves_other_errors_to_the_system(tmp_path: Path):
    with pytest.raises(FileNotFoundError):
        read_no_follow(tmp_path / "absent")


@pytest.mark.parametrize("place", ["folder", "folder/link", "folder/below/link"])
def test_check_no_links_finds_links_anywhere(tmp_path: Path, place: str):
    (tmp_path / "real/below").mkdir(parents=True)
    path = tmp_path / place.replace("folder", "real")
    if place == "folder":
        path = tmp_path / "linked"
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PrepError, match="is a symbolic link"):
        check_no_symlinks(path if place == "folder" else tmp_path / "real")
