"""Tests of reads of regular files, of names in files, and of atomic writes."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest

from prepcli.core.errors import DamagedError, PrepError
from prepcli.stores.files import (
    open_regular_file,
    read_complete_lines,
    read_regular_file,
    replacing_file,
    resolve_named_path,
    write_file,
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


def test_write_file_creates_and_replaces(tmp_path: Path):
    path = tmp_path / "page.html"
    write_file(path, b"old")
    write_file(path, b"new")
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["page.html"]


def test_write_file_uses_the_umask(tmp_path: Path):
    write_file(tmp_path / "page.html", b"")
    (tmp_path / "other").touch()
    assert (tmp_path / "page.html").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_write_file_accepts_the_longest_name(tmp_path: Path):
    path = tmp_path / ("é" * 127 + "x")
    write_file(path, b"text")
    assert path.read_bytes() == b"text"


def test_write_file_keeps_an_existing_file_unless_asked(tmp_path: Path):
    path = tmp_path / "job.sh"
    path.write_bytes(b"old")
    with pytest.raises(FileExistsError):
        write_file(path, b"new", overwrite=False)
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["job.sh"]


def test_write_file_follows_no_link(tmp_path: Path):
    (tmp_path / "target").write_bytes(b"private")
    (tmp_path / "page.html").symlink_to("target")
    with pytest.raises(PrepError, match="it is a symbolic link"):
        write_file(tmp_path / "page.html", b"new")
    assert (tmp_path / "target").read_bytes() == b"private"


def test_write_file_refuses_fifos_and_folders(tmp_path: Path):
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", tmp_path):
        with pytest.raises(PrepError, match="it is not a regular file"):
            write_file(path, b"new")


def test_write_file_keeps_the_old_file_when_the_disk_is_full(tmp_path: Path):
    path = tmp_path / "page.html"
    path.write_bytes(b"old")
    program = (
        "import resource, signal, sys; from pathlib import Path; from prepcli.stores.files import write_file\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "try:\n    write_file(Path(sys.argv[1]), bytes(5000))\n"
        "except OSError as error:\n    sys.exit(error.errno)\n"
    )
    assert (
        subprocess.run([sys.executable, "-c", program, str(path)], check=False).returncode
        == errno.EFBIG
    )
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["page.html"]


def test_write_file_needs_no_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def link(source: Path, target: Path) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", link)
    path = tmp_path / "job.sh"
    write_file(path, b"new", overwrite=False)
    assert path.read_bytes() == b"new"
    with pytest.raises(FileExistsError):
        write_file(path, b"other", overwrite=False)
    assert os.listdir(tmp_path) == ["job.sh"]


def test_replacing_file_keeps_the_old_file_after_an_error(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"old")

    def write_half() -> None:
        with replacing_file(path) as file:
            file.write(b"new")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write_half()
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["metrics.jsonl"]
