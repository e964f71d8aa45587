"""One process at a time: a lock on a file that says who has it, and that ends with its process."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from prepcli.engine.no_follow import open_no_follow
from prepcli.errors import PrepError

RETRY_FOR_S = 1.0  # for so long, at most, a free lock may seem to be held because somebody looks at it
RETRY_EVERY_S = 0.05


def acquire_lock(path: Path, locked_path: Path) -> int:
    """A descriptor that holds the lock until it is closed. PrepError names the process that works on `what`."""
    fd = _open(path)
    if not _try_flock(fd, fcntl.LOCK_EX):
        raise _locked_error(fd, locked_path)
    _write_holder(fd)
    return fd


def acquire_team_lock(path: Path, locked_path: Path, count: int) -> tuple[int, bool]:
    """A descriptor that holds a lock that `count` processes may share if it is more than 1, and whether this one is the
    first. PrepError where others hold it. To be called by one process at a time."""
    fd = _open(path)
    first = _try_flock(fd, fcntl.LOCK_EX)
    if not first and (count == 1 or not _try_flock(fd, fcntl.LOCK_SH)):
        raise _locked_error(fd, locked_path)
    if first:
        _write_holder(fd)
    if first and count > 1:
        fcntl.flock(fd, fcntl.LOCK_SH)
    return fd, first


def acquire_lock_with_retries(path: Path, locked_name: str) -> int:
    """A lock that others look at with `is_held`: PrepError if it is still held after a moment."""
    fd = _open(path)
    until = time.monotonic() + RETRY_FOR_S
    while not _try_flock(fd, fcntl.LOCK_EX):
        if time.monotonic() > until:
            raise _locked_error(fd, locked_name)
        time.sleep(RETRY_EVERY_S)
    _write_holder(fd)
    return fd


def is_locked(path: Path) -> bool:
    """Whether a process holds a lock; OSError (there is no such file: FileNotFoundError)."""
    fd = open_no_follow(path, os.O_RDWR)
    try:
        return not _try_flock(fd, fcntl.LOCK_SH)
    finally:
        os.close(fd)


def acquire_shared_lock(path: Path) -> int:
    """A descriptor that holds a lock as others may too."""
    fd = _open(path)
    fcntl.flock(fd, fcntl.LOCK_SH)
    return fd


def has_shared_holders(path: Path) -> bool:
    """Whether any process holds a lock by `hold_together`. Nobody may take it meanwhile."""
    fd = _open(path)
    try:
        return not _try_flock(fd, fcntl.LOCK_EX)
    finally:
        os.close(fd)


@contextlib.contextmanager
def exclusive_lock(path: Path) -> Iterator[os.stat_result]:
    """Wait for the lock and hold it within: what is yielded tells which file it is."""
    fd = _open(path)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield os.fstat(fd)
    finally:
        os.close(fd)


def _open(path: Path) -> int:
    return open_no_follow(path, os.O_RDWR | os.O_CREAT)


def _try_flock(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _write_holder(fd: int) -> None:
    os.ftruncate(fd, 0)
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    os.pwrite(fd, f"process {os.getpid()} on {socket.gethostname()} since {since}\n".encode(), 0)


def _locked_error(fd: int, locked_name: Path | str) -> PrepError:
    holder = os.pread(fd, 200, 0).decode(errors="replace").strip()
    os.close(fd)
    return PrepError(f"{locked_name} is locked", f"another process works on it: {holder}", "wait for it")
