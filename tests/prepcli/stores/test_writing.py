from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from prepcli.core.errors import PrepError
from prepcli.stores.writing import replacing_file, write_file


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
        "import resource, signal, sys; from pathlib import Path; from prepcli.stores.writing import write_file\n"
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
