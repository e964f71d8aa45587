"""File locks. The file names the holder, and the lock ends with its process."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from prepcli.core.errors import PrepError
from prepcli.execution.output_paths import is_same_file
from prepcli.stores.output_files import open_no_follow, read_no_follow

LOCK_FILE_FLAGS = os.O_RDWR | os.O_CREAT
# Other processes may remove or rename the folder of a lock meanwhile.
MAX_TRIES = 100


def acquire_lock(path: Path, locked_path: Path) -> int:
    """Return a descriptor with the lock. Closing it releases the lock.

    Raises:
        PrepError: Another process holds the lock. The error names it and `locked_path`.
        OSError: The file system has no locks, or the file cannot be opened.
    """
    # The file is never removed. A second process could otherwise lock a new file of the same name while
    # the first one holds the old file.
    fd = try_lock(path)
    if fd is None:
        why = f"another process works on it: {holder_of(path)}"
        raise PrepError(f"{locked_path} is locked", why, "wait until it ends")
    _write_holder(fd)
    return fd


def join_lock(path: Path) -> tuple[int, bool]:
    """Acquire a lock that any number of processes share. One process at a time may call it.

    Args:
        path: The lock file.

    Returns:
        The descriptor, and whether this process is the first holder.

    Raises:
        OSError: The file system has no locks, or the file cannot be opened.
    """
    # The first process gets the lock exclusively, writes its name, and then shares it. `flock` is not
    # atomic when it converts a lock, so the caller admits one process at a time (the lock `door`).
    fd = try_lock(path)
    if fd is None:
        return lock_file(path, fcntl.LOCK_SH), False
    _write_holder(fd)
    fcntl.flock(fd, fcntl.LOCK_SH)
    return fd, True


def try_lock(path: Path) -> int | None:
    """Return a descriptor with the lock, or None if another descriptor has it. Closing it releases the lock."""
    try:
        return lock_file(path, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return None


def holder_of(path: Path) -> str:
    """Return the process that first acquired a lock, for messages."""
    # Any program may have written to the file: 200 bytes are enough for the line of `_write_holder`.
    return read_no_follow(path)[:200].decode(errors="replace").strip()


def is_locked(path: Path) -> bool:
    """Return whether a process holds the lock.

    Raise OSError, e.g. FileNotFoundError without the file.
    """
    fd = open_no_follow(path, os.O_RDWR)
    try:
        # An exclusive lock also finds the holders of a shared one. `close` releases it.
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def lock_file(path: Path, operation: int = fcntl.LOCK_EX) -> int:
    """Wait for the lock of a file, and return a descriptor with it. Closing it releases the lock.

    Args:
        path: The lock file.
        operation: Operation of `flock`.

    Raises:
        BlockingIOError: Another descriptor has the lock, and the operation does not wait.
        OSError: The file system has no locks, or the file cannot be opened.
    """
    # `flock` belongs to the open file, not to the process: the kernel releases it when the last descriptor is
    # closed, however the process ends. File systems of a network may show it to one machine only.
    fd = open_no_follow(path, LOCK_FILE_FLAGS)
    try:
        fcntl.flock(fd, operation)
    except BaseException:
        os.close(fd)
        raise
    return fd


@contextlib.contextmanager
def exclusive_lock(path: Path) -> Iterator[None]:
    """Wait for the lock and hold it inside the context."""
    fd = lock_file(path)
    try:
        yield
    finally:
        os.close(fd)


def lock_in_folder(
    path: Path, make_folder: Callable[[], object], lock: Callable[[Path], int]
) -> int:
    """Create a folder, and return a descriptor with the lock of a file in it.

    Args:
        path: The lock file.
        make_folder: Creates the folder if necessary.
        lock: Returns a descriptor with the lock.

    Raises:
        PrepError: Other processes remove the folder again and again, or `lock` raises it.
        OSError: The folder cannot be created, or the file system has no locks.
    """
    # A lock on a deleted or renamed file is useless: another process creates a new file and locks that one. The lock
    # counts only if the path still leads to the locked file.
    for tries_left in reversed(range(MAX_TRIES)):
        try:
            make_folder()
            fd = lock(path)
        except FileNotFoundError:
            if not tries_left:
                raise
            continue
        if is_same_file(os.fstat(fd), path):
            return fd
        os.close(fd)
    why = "other processes remove it again and again"
    raise PrepError(f"{path.parent} cannot be locked", why, "end the other processes")


def _write_holder(fd: int) -> None:
    """Write this process's id, host and time into the lock file."""
    # The text is only for error messages. `flock` decides, so a kill between these calls is
    # harmless.
    os.ftruncate(fd, 0)
    start_time = time.strftime("%Y-%m-%d %H:%M:%S")
    os.pwrite(
        fd, f"process {os.getpid()} on {socket.gethostname()} since {start_time}\n".encode(), 0
    )
