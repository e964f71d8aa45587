"""Linux system calls: effects, fallbacks and errors."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from prepcli.engine import linux
from prepcli.engine.linux import allocate, finish_writeback, start_writeback

MIB = 1 << 20


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    opened = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    yield opened
    os.close(opened)


def failing(number: int) -> Callable[..., int]:
    """Return a system call that fails with an error number."""

    def call(*_: int) -> int:
        ctypes.set_errno(number)
        return -1

    return call


def test_allocate_reserves_disk_space(fd: int):
    allocate(fd, MIB)
    assert os.fstat(fd).st_size == MIB
    assert os.fstat(fd).st_blocks * 512 >= MIB
    assert os.pread(fd, MIB, 0) == bytes(MIB)


@pytest.mark.parametrize("nbytes", [0, 100, MIB])
def test_allocate_truncates_a_longer_file(fd: int, nbytes: int):
    os.pwrite(fd, b"x" * 2 * MIB, 0)
    allocate(fd, nbytes)
    assert os.pread(fd, 3 * MIB, 0) == b"x" * nbytes


@pytest.mark.parametrize("call", [None, failing(errno.EOPNOTSUPP), failing(errno.ENOSYS)])
def test_allocate_falls_back_without_support(fd: int, call, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(linux, "_fallocate", call)
    allocate(fd, MIB)
    assert os.fstat(fd).st_size == MIB


def test_allocate_reports_a_full_disk(fd: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(linux, "_fallocate", failing(errno.ENOSPC))
    with pytest.raises(OSError, match="No space left") as raised:
        allocate(fd, MIB)
    assert raised.value.errno == errno.ENOSPC


def test_writeback_cleans_a_byte_range(fd: int):
    os.pwrite(fd, b"x" * MIB, 0)
    start_writeback(fd, 0, MIB)
    finish_writeback(fd, 0, MIB)
    assert os.pread(fd, MIB, 0) == b"x" * MIB


@pytest.mark.parametrize("call", [start_writeback, finish_writeback])
def test_writeback_reports_errors(call: Callable[[int, int, int], None]):
    with pytest.raises(OSError, match="Bad file descriptor"):
        call(-1, 0, MIB)


def test_start_writeback_repeats_an_interrupted_call(fd: int, monkeypatch: pytest.MonkeyPatch):
    results = iter([-1, 0])

    def interrupted(*_: int) -> int:
        ctypes.set_errno(errno.EINTR)
        return next(results)

    monkeypatch.setattr(linux, "_sync_file_range", interrupted)
    start_writeback(fd, 0, MIB)
    assert not list(results)
