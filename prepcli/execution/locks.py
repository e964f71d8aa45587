"""File locks. The file names the holder, and the lock ends with its process."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from prepcli.core.errors import PrepError
from prepcli.engine.no_follow import open_no_follow

RETRY_EVERY_S = 0.05
LOCK_FILE_FLAGS = os.O_RDWR | os.O_CREAT


def acquire_lock(path: Path, locked_path: Path) -> int:
    """Return a descriptor with the lock. Closing it releases the lock.

    Raises:
        PrepError: Another process holds the lock. The error names it and `locked_path`.
        OSError: The file system has no locks, or the file cannot be opened.
    """
    # The file is never removed. A second process could otherwise lock a new file of the same name while
    # the first one holds the old file.
    with _open_lock_file(path) as fd:
        if not _try_flock(fd, fcntl.LOCK_EX):
            raise _locked_error(fd, locked_path)
        _write_holder(fd)
        return fd


def acquire_team_lock(path: Path, locked_path: Path, *, count: int) -> tuple[int, bool]:
    """Acquire a lock that `count` processes share if `count` is more than 1. One process at a time may call it.

    Args:
        path: The lock file.
        locked_path: Path for the error message.
        count: Maximum number of processes with the lock.

    Returns:
        The descriptor, and whether this process is the first holder.

    Raises:
        PrepError: The lock is held exclusively, or by a process while `count` is 1.
    """
    # The first process gets the lock exclusively, writes its name, and then shares it. `flock` is not
    # atomic when it converts a lock, so the caller admits one process at a time (the lock `door`).
    with _open_lock_file(path) as fd:
        is_first = _try_flock(fd, fcntl.LOCK_EX)
        if not is_first and (count == 1 or not _try_flock(fd, fcntl.LOCK_SH)):
            raise _locked_error(fd, locked_path)
        if is_first:
            _write_holder(fd)
        if is_first and count > 1:
            fcntl.flock(fd, fcntl.LOCK_SH)
        return fd, is_first


def acquire_lock_with_retries(path: Path, locked_name: str) -> int:
    """Acquire a lock that other processes probe with `is_locked`.

    Raises:
        PrepError: Another process holds the lock.
    """
    with _open_lock_file(path) as fd:
        while not _try_flock(fd, fcntl.LOCK_EX):
            # A probe holds a shared lock until its process runs again, which may take long. The holder's
            # is exclusive, so a shared lock that succeeds means that only probes are in the way.
            if not _try_flock(fd, fcntl.LOCK_SH):
                raise _locked_error(fd, locked_name)
            fcntl.flock(fd, fcntl.LOCK_UN)
            time.sleep(RETRY_EVERY_S)
        _write_holder(fd)
        return fd


def is_locked(path: Path) -> bool:
    """Return whether a process holds the lock.

    Raise OSError, e.g. FileNotFoundError without the file.
    """
    fd = open_no_follow(path, os.O_RDWR)
    try:
        # The lock is shared, so that two processes can call this at the same time. `close` releases it.
        return not _try_flock(fd, fcntl.LOCK_SH)
    finally:
        os.close(fd)


def acquire_shared_lock(path: Path) -> int:
    """Return a descriptor with a shared lock."""
    with _open_lock_file(path) as fd:
        fcntl.flock(fd, fcntl.LOCK_SH)
        return fd


def has_shared_holders(path: Path) -> bool:
    """Return whether a process holds a shared lock. No process may acquire it during the call."""
    fd = open_no_follow(path, LOCK_FILE_FLAGS)
    try:
        return not _try_flock(fd, fcntl.LOCK_EX)
    finally:
        os.close(fd)


@contextlib.contextmanager
def exclusive_lock(path: Path) -> Iterator[os.stat_result]:
    """Wait for the lock and hold it inside the context. Yields the stat result of the lock file."""
    fd = open_no_follow(path, LOCK_FILE_FLAGS)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield os.fstat(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def _open_lock_file(path: Path) -> Iterator[int]:
    """Open a lock file. The descriptor stays open unless the block raises, e.g. on a file system without locks."""
    fd = open_no_follow(path, LOCK_FILE_FLAGS)
    try:
        yield fd
    except BaseException:
        os.close(fd)
        raise


# `flock` belongs to the open file, not to the process: the kernel releases it when the last descriptor is
# closed, however the process ends. File systems of a network may show it to one machine only.


def _try_flock(fd: int, operation: int) -> bool:
    try:
        fcntl.flock(fd, operation | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _write_holder(fd: int) -> None:
    """Write this process's id, host and time into the lock file."""
    # The text is only for error messages. `flock` decides, so a kill between these calls is
    # harmless.
    os.ftruncate(fd, 0)
    start_time = time.strftime("%Y-%m-%d %H:%M:%S")
    os.pwrite(
        fd, f"process {os.getpid()} on {socket.gethostname()} since {start_time}\n".encode(), 0
    )


def _locked_error(fd: int, locked_name: Path | str) -> PrepError:
    """Return the error for a lock of another process."""
    # Any program may have written to the file: 200 bytes are enough for the line of
    # `_write_holder`.
    holder = os.pread(fd, 200, 0).decode(errors="replace").strip()
    return PrepError(
        f"{locked_name} is locked", f"another process works on it: {holder}", "wait until it ends"
    )
