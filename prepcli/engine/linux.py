"""Linux system calls without a function in `os`. Each call releases the GIL."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable

# <linux/fs.h>: SYNC_FILE_RANGE_WAIT_BEFORE is 1, WRITE 2, WAIT_AFTER 4
_START = 2
_WAIT = 7
# Answers of file systems without `fallocate`. The file then gets its size, but no disk space.
_UNSUPPORTED = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ENODEV, errno.ESPIPE)
_LIBC = ctypes.CDLL(None, use_errno=True)


def _find_function(name: str, *argument_types: type) -> Callable[..., int] | None:
    """Return a function of the C library, or None if it does not exist."""
    function = getattr(_LIBC, name, None)
    if function is not None:
        function.argtypes = argument_types
        function.restype = ctypes.c_int
    return function


_sync_file_range = _find_function(
    "sync_file_range", ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint
)
_fallocate = _find_function("fallocate", ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
HAS_WRITEBACK = _sync_file_range is not None


def start_writeback(fd: int, offset: int, nbytes: int) -> None:
    """Start to write the dirty pages of a byte range to disk. Raises OSError."""
    _call_uninterrupted(_sync_file_range, fd, offset, nbytes, _START)


def finish_writeback(fd: int, offset: int, nbytes: int) -> None:
    """Wait until the dirty pages of a byte range are on disk, and drop them from the page cache.

    Metadata may still be in memory: only `fdatasync` makes the range durable. Raises OSError for a failed write, which
    the system does not report again.
    """
    _call_uninterrupted(_sync_file_range, fd, offset, nbytes, _WAIT)
    os.posix_fadvise(fd, offset, nbytes, os.POSIX_FADV_DONTNEED)


def allocate(fd: int, nbytes: int) -> None:
    """Set a file's size and allocate its disk space if the file system supports that. Raises OSError."""
    # Disk space is taken now, so that a full disk is an error before hours of work.
    if os.fstat(fd).st_size > nbytes:
        os.ftruncate(fd, nbytes)
    try:
        if nbytes:
            _call_uninterrupted(_fallocate, fd, 0, 0, nbytes)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
    os.ftruncate(fd, nbytes)


def _call_uninterrupted(function: Callable[..., int] | None, *arguments: int) -> None:
    """Call a function of the C library, again after a signal interrupted it. Raises OSError."""
    if function is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    while function(*arguments):
        number = ctypes.get_errno()
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number))
