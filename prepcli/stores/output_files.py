"""Files of an output: opened without following links of another user in its folder, and synced several at a time."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from prepcli.core.errors import PrepError
from prepcli.core.worker_thread import run_in_threads
from prepcli.stores.files import fsync_path, io_error

# Journalling file systems commit concurrent syncs together: on ext4, 1,500 files of 64 KiB took 8.1 s one after
# another, 0.3 s in 8 threads and 0.2 s in 32.
SYNC_THREADS = 16

T = TypeVar("T")


def open_no_follow(path: Path, flags: int) -> int:
    """Open a regular file of an output, or create it with `O_CREAT`.

    Args:
        path: The file. Its last component is never followed. `check_no_symlinks` checks the folders above it.
        flags: Flags of `os.open`. `O_TRUNC` takes effect only after the file is checked.

    Returns:
        The file descriptor.

    Raises:
        PrepError: The path is a symbolic link, has a second name (hard link), or is not a regular file.
        OSError: The system refuses to open it.
    """
    # O_NOFOLLOW fails for a link. O_NONBLOCK keeps the open of a FIFO from waiting for its other end.
    # O_TRUNC waits until the open file is known to be the output's own: a hard link would empty the
    # other file of that name.
    safe_flags = flags & ~os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        fd = os.open(path, safe_flags, 0o644)
    except OSError as error:
        # ELOOP on Linux, EMLINK on FreeBSD
        if error.errno in (errno.ELOOP, errno.EMLINK):
            raise _unsafe_file_error(path, "is a symbolic link") from error
        # A FIFO without a reader, or a socket.
        if error.errno == errno.ENXIO:
            raise _unsafe_file_error(path, "is not a regular file") from error
        raise
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise _unsafe_file_error(path, "is not a regular file")
        if flags & (os.O_WRONLY | os.O_RDWR) and status.st_nlink > 1:
            raise _unsafe_file_error(path, "has a second name (hard link)")
        if flags & os.O_TRUNC:
            os.ftruncate(fd, 0)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _unsafe_file_error(path: Path, why: str) -> PrepError:
    """Return the error for an unsafe path."""
    return PrepError(
        f"{path} cannot be used",
        f"it {why}, and writing to it could change another file",
        "remove it",
    )


def write_no_follow(path: Path, data: bytes) -> None:
    """Write a whole file of an output. Raises the errors of `open_no_follow`."""
    fd = open_no_follow(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
    finally:
        os.close(fd)


def read_no_follow(path: Path) -> bytes:
    """Read a whole file of an output. Raises the errors of `open_no_follow`."""
    with open(open_no_follow(path, os.O_RDONLY), "rb") as file:
        return file.read()


def check_not_symlink(path: Path) -> None:
    """Raise PrepError for a symbolic link."""
    if path.is_symlink():
        raise _unsafe_file_error(path, "is a symbolic link")


def check_no_symlinks(folder: Path) -> None:
    """Raise PrepError if the folder, or anything in it, is a symbolic link."""
    check_not_symlink(folder)
    for parent, folders, files in os.walk(folder):
        for name in (*folders, *files):
            check_not_symlink(Path(parent, name))


def sync_paths(paths: Sequence[Path]) -> None:
    """Make files durable. Raise the first OSError."""
    sync_many(fsync_path, paths)


def sync_many(sync: Callable[[T], object], items: Sequence[T]) -> None:
    """Call a sync function for each item. Raise the first error."""
    # Few files are not worth threads.
    if len(items) <= SYNC_THREADS:
        for item in items:
            sync(item)
        return
    pending = deque(items)

    def sync_pending() -> None:
        while pending:
            try:
                item = pending.popleft()
            except IndexError:  # another thread took the last item
                return
            sync(item)

    errors = run_in_threads(sync_pending, SYNC_THREADS, on_interruption=pending.clear)
    if errors:
        raise errors[0]


def remove_path(path: Path) -> None:
    """Remove a file, a link or a folder with its contents, if it exists. The target of a link stays."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def is_same_file(file_stat: os.stat_result, path: Path) -> bool:
    """Return whether a path leads to the file or folder of the stat result. Raise PrepError if nobody can tell."""
    try:
        return os.path.samestat(file_stat, path.stat())
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise io_error(path, error) from error
