"""How the bytes of an output reach the disk: by direct I/O, or through the page cache with paced writeback.

The faster mode is measured, and never changes the written bytes. Bytes that a file system can share with the source
are not written.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from enum import Enum

from prepcli.planning.slabs import PAGE

MIB = 1 << 20
# Maximum bytes of an output in the page cache.
WINDOW_NBYTES = 64 * MIB
# Smaller outputs use direct I/O: measuring would cost more than it gains.
MIN_MEASURED_NBYTES = 1 << 30
# Shorter writes are not measured.
TRIAL_NBYTES = 8 * MIB
# Number of measured writes in each mode.
TRIALS = 3
# Writeback is used below this ratio of its time to the time of direct I/O, which takes less CPU time.
MAX_WRITEBACK_RATIO = 0.9
# Above this ratio writeback is not measured again.
STOP_TRIALS_RATIO = 2.0
# <linux/fs.h>: SYNC_FILE_RANGE_WAIT_BEFORE is 1, WRITE 2, WAIT_AFTER 4
_START = 2
_WAIT = 7
# <linux/magic.h>: tmpfs and ramfs
_MEMORY_FILE_SYSTEMS = (0x01021994, 0x858458F6)
_BTRFS = 0x9123683E
# <linux/fs.h>: FICLONERANGE and `struct file_clone_range`: source descriptor, source offset, bytes, target offset.
# Architectures with another number answer ENOTTY.
_CLONE_RANGE = 0x4020940D
_CLONE_FIELDS = "=qQQQ"
# `struct statfs` is shorter on all architectures.
_MAX_STATFS_NBYTES = 256
# Answers of file systems without `fallocate`. The file then gets its size, but no disk space.
_UNSUPPORTED = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ENODEV, errno.ESPIPE)
_LIBC = ctypes.CDLL(None, use_errno=True)


class WriteMode(Enum):
    """How whole pages are written: with direct I/O, or through the page cache with explicit writeback."""

    DIRECT = "direct"
    WRITEBACK = "writeback"


class Writeback:
    """Byte ranges under writeback, of at most `window_nbytes` bytes together."""

    def __init__(self, window_nbytes: int = WINDOW_NBYTES) -> None:
        self._window_nbytes = window_nbytes
        self._started: deque[tuple[int, int, int]] = deque()  # descriptor, offset, bytes
        self._nbytes = 0
        # Several pipelines write to the files of an output.
        self._lock = threading.Lock()

    def start(self, fd: int, offset: int, nbytes: int) -> None:
        """Start writeback of a range's whole pages, and wait for older ranges beyond the window. Raises OSError."""
        start = -(-offset // PAGE) * PAGE
        stop = (offset + nbytes) // PAGE * PAGE
        if start >= stop:
            return
        with self._lock:
            start_writeback(fd, start, stop - start)
            self._started.append((fd, start, stop - start))
            self._nbytes += stop - start
            self._finish_oldest(self._window_nbytes)

    def drain(self) -> None:
        """Wait for all ranges. Raises OSError."""
        with self._lock:
            self._finish_oldest(0)

    def _finish_oldest(self, max_nbytes: int) -> None:
        """Wait for the oldest ranges until at most `max_nbytes` bytes are in the window."""
        while self._nbytes > max_nbytes:
            fd, offset, nbytes = self._started.popleft()
            self._nbytes -= nbytes
            finish_writeback(fd, offset, nbytes)


class WritePolicy:
    """Chooses between direct and buffered I/O for each write of an output.

    The first large writes try each mode in turn. The fastest one is then fixed.
    """

    def __init__(self, total_nbytes: int, has_direct: bool = True) -> None:
        self.writeback = Writeback()
        self._seconds_per_byte: dict[WriteMode, list[float]] = {mode: [] for mode in WriteMode}
        self._trial_lock = threading.Lock()
        is_measured = HAS_WRITEBACK and has_direct and total_nbytes >= MIN_MEASURED_NBYTES
        self._fixed: WriteMode | None = None
        if not is_measured:
            self._fixed = WriteMode.WRITEBACK
            if has_direct or not HAS_WRITEBACK:
                self._fixed = WriteMode.DIRECT

    @property
    def needs_alignment(self) -> bool:
        """Whether writes may use direct I/O. Buffers then need the page offset of the file."""
        return self._fixed is not WriteMode.WRITEBACK

    @contextlib.contextmanager
    def writing(self, nbytes: int) -> Iterator[WriteMode]:
        """Yield the mode of the write in the `with` block, and measure it. Raises OSError."""
        if self._fixed or nbytes < TRIAL_NBYTES:
            yield self._fixed or WriteMode.DIRECT
            return
        # One measurement at a time
        with self._trial_lock:
            mode = self._fixed or min(WriteMode, key=lambda mode: len(self._seconds_per_byte[mode]))
            start_s = time.perf_counter()
            yield mode
            self.writeback.drain()
            if self._fixed is None:
                self.add_measurement(mode, (time.perf_counter() - start_s) / nbytes)

    def add_measurement(self, mode: WriteMode, seconds_per_byte: float) -> None:
        """Add a measurement. After the last one the mode is fixed."""
        self._seconds_per_byte[mode].append(seconds_per_byte)
        direct_times = self._seconds_per_byte[WriteMode.DIRECT]
        writeback_times = self._seconds_per_byte[WriteMode.WRITEBACK]
        if len(direct_times) != len(writeback_times):
            return
        # The fastest write of each mode counts. Slower ones had to wait for other programs.
        ratio = min(writeback_times) / min(direct_times)
        if len(direct_times) == TRIALS or ratio > STOP_TRIALS_RATIO:
            self._fixed = WriteMode.DIRECT
            if ratio < MAX_WRITEBACK_RATIO:
                self._fixed = WriteMode.WRITEBACK


# Functions of the C library with their argument types. None for a function that does not exist.
_sync_file_range = getattr(_LIBC, "sync_file_range", None)
_fallocate = getattr(_LIBC, "fallocate", None)
if _sync_file_range is not None:
    _sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
if _fallocate is not None:
    _fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
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
    # Disk space is taken now, so that a full disk is an error before hours of work. In memory this would write all
    # pages once more, with zeros. btrfs keeps an allocated extent of up to 256 MiB until the last block of it is
    # replaced: shared runs would free nothing.
    if os.fstat(fd).st_size > nbytes:
        os.ftruncate(fd, nbytes)
    try:
        if nbytes and _file_system(fd) not in (*_MEMORY_FILE_SYSTEMS, _BTRFS):
            _call_uninterrupted(_fallocate, fd, 0, 0, nbytes)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
    os.ftruncate(fd, nbytes)


def is_in_memory(fd: int) -> bool:
    """Return whether the file system of an open file has no disk, such as tmpfs."""
    return _file_system(fd) in _MEMORY_FILE_SYSTEMS


def clone_range(fd: int, offset: int, source_fd: int, source_offset: int, nbytes: int) -> bool:
    """Let a byte range of a file share the disk blocks of a range of another file, as `cp --reflink` does.

    Args:
        fd: File to change.
        offset: First byte to replace. A multiple of the file system's block size.
        source_fd: File to share.
        source_offset: First byte to share. A multiple of the block size.
        nbytes: Number of bytes. A multiple of the block size, or 0 for all bytes up to the end of the source.

    Returns:
        Whether the range is shared. If not, it has to be written: the files are on two file systems, or on one without
        reflinks or with larger blocks. A write then reports any other error.
    """
    fields = struct.pack(_CLONE_FIELDS, source_fd, source_offset, nbytes, offset)
    try:
        fcntl.ioctl(fd, _CLONE_RANGE, fields)
    except OSError:
        return False
    return True


def _file_system(fd: int) -> int:
    """Return the magic number of the file system of an open file, or 0 if it is not known."""
    result = ctypes.create_string_buffer(_MAX_STATFS_NBYTES)
    if _LIBC.fstatfs(fd, result):
        return 0
    # The first field is `f_type`.
    return ctypes.c_long.from_buffer(result).value


def _call_uninterrupted(function: Callable[..., int] | None, *arguments: int) -> None:
    """Call a function of the C library, again after a signal interrupted it. Raises OSError."""
    if function is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    while function(*arguments):
        number = ctypes.get_errno()
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number))
