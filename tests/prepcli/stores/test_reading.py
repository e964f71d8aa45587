from __future__ import annotations

import os
import socket
import tracemalloc
from pathlib import Path

import pytest

from prepcli.core.errors import DamagedError, PrepError
from prepcli.stores.reading import (
    open_regular_file,
    read_complete_lines,
    read_regular_file,
    resolve_named_path,
)


def test_open_regular_file_follows_links(tmp_path: Path):
    (tmp_path / "file").write_bytes(b"text")
    (tmp_path / "link").symlink_to("file")
    with open_regular_file(tmp_path / "link") as file:
        assert file.read() == b"text"


def test_open_regular_file_refuses_other_kinds(tmp_path: Path):
    os.mkfifo(tmp_path / "fifo")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        for path in (tmp_path, tmp_path / "fifo", tmp_path / "socket", Path("/dev/zero")):
            with pytest.raises(PrepError, match="is not a file"):
                open_regular_file(path)


def test_open_regular_file_raises_os_errors(tmp_path: Path):
    with pytest.raises(FileNotFoundError):
        open_regular_file(tmp_path / "missing")


def test_open_regular_file_leaves_no_descriptor(tmp_path: Path):
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(PrepError):
        open_regular_file(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == before


def test_read_regular_file_has_a_limit(tmp_path: Path):
    (tmp_path / "file").write_bytes(b"12345")
    assert read_regular_file(tmp_path / "file", 5) == b"12345"
    with pytest.raises(PrepError, match="it has 5 bytes, the limit is 4"):
        read_regular_file(tmp_path / "file", 4)


def test_read_regular_file_allocates_only_the_file_size(tmp_path: Path):
    (tmp_path / "file").write_bytes(b"12345")
    tracemalloc.start()
    try:
        read_regular_file(tmp_path / "file")
        peak_nbytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_nbytes < 1 << 20


@pytest.mark.parametrize("name", ["train", "a/b.arrow", "a..b", "./c"])
def test_resolve_named_path_stays_inside(name: str):
    assert resolve_named_path(Path("data"), name, Path("data/list.json")) == Path("data") / name


@pytest.mark.parametrize(
    "name", ["../private", "a/../../b", "/etc/passwd", "", ".", "a\0b", 7, None]
)
def test_resolve_named_path_refuses_paths_outside(name: object):
    with pytest.raises(PrepError, match=r"data/list\.json names"):
        resolve_named_path(Path("data"), name, Path("data/list.json"))


def test_read_lines_yields_complete_lines(tmp_path: Path):
    path = tmp_path / "lines"
    path.write_bytes(b"one\n\ntwo\nthr")
    assert list(read_complete_lines(path)) == [b"one", b"", b"two"]


def test_read_lines_skips_long_lines(tmp_path: Path):
    path = tmp_path / "lines"
    path.write_bytes(b"1234\n12345\n" + b"x" * 1000 + b"\nend\n" + b"y" * 1000)
    assert list(read_complete_lines(path, max_nbytes=4)) == [b"1234", b"", b"", b"end"]


def test_read_lines_refuses_fifos(tmp_path: Path):
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(PrepError, match="is not a file"):
        next(read_complete_lines(tmp_path / "fifo"))


@pytest.mark.parametrize("rest", [b"", b".github.com/spec/v1\noid sha256:0\nsize 1\n"])
def test_open_regular_file_refuses_lfs_pointers(rest: bytes, tmp_path: Path):
    path = tmp_path / "data.jsonl"
    path.write_bytes(b"version https://git-lfs" + rest)
    with pytest.raises(DamagedError, match=r"data\.jsonl is a Git LFS pointer") as caught:
        open_regular_file(path)
    assert str(caught.value.hint) == "run `git lfs pull`"


def test_open_regular_file_opens_texts_that_begin_as_a_pointer(tmp_path: Path):
    path = tmp_path / "data.txt"
    path.write_bytes(b"version https://git-lfs" + bytes(1024))
    with open_regular_file(path) as file:
        assert file.read(7) == b"version"
