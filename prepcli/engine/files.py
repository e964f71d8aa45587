"""Read and write files, such as the data files of an output, in runs: contiguous byte ranges.

Whole pages are transferred by direct I/O where the file system supports it and it is faster. Reads take from the page
cache what it has.
"""

from __future__ import annotations

import errno
import os
import resource
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar, Protocol

import numpy as np

from prepcli.algebra.strided_copies import StridedCopy
from prepcli.core.errors import GET_AGAIN_HINT, RERUN_HINT, DamagedError, Option, PrepError, text
from prepcli.core.formatting import count_text
from prepcli.engine.write_policy import (
    WriteMode,
    WritePolicy,
    allocate,
    clone_range,
    is_in_memory,
)
from prepcli.planning.plan import Plan
from prepcli.planning.slabs import LONG_RUN_NBYTES, PAGE
from prepcli.stores.buffers import ByteArray, ClosedAfterBlock
from prepcli.stores.files import check_no_symlinks, io_error, open_no_follow, sync_many

# File descriptors left for other uses, e.g. the claims and raw files of units that are not synced yet.
RESERVED_DESCRIPTORS = 512
# More files are opened for each access instead of kept open: an item with one file per chunk may have 10^5.
MAX_KEPT_FILES = 1000
# Bytes written to the page cache before their writeback starts.
WRITEBACK_NBYTES = 4 << 20
# Shorter reads are not looked up in the page cache first.
MIN_CACHED_NBYTES = 1 << 20
# A Python that was built for an old C library has no flags for `preadv`.
_CACHED_ONLY: int | None = getattr(os, "RWF_NOWAIT", None)
_Call = Callable[[int, list[memoryview], int], int]  # os.preadv or os.pwritev


class RunReader(Protocol):
    """A reader of runs from numbered files, blobs or host arrays."""

    def read_run(self, copy: StridedCopy, into: ByteArray) -> ByteArray:
        """Read one run, i.e. one contiguous byte range.

        Args:
            copy: A copy with a single run.
            into: Page-aligned buffer with room for the run and a page.

        Returns:
            The part of `into` with the run. It has the same page offset as the run in the file.
        """
        ...

    def read_runs(self, copies: Sequence[StridedCopy], into: ByteArray) -> ByteArray:
        """Read the runs of all copies one after another into a buffer.

        A copy describes strided bytes of a file. A run is a contiguous byte range of the copy.

        Args:
            copies: The copies to read.
            into: The buffer.

        Returns:
            The filled part of the buffer.
        """
        ...


class RunWriter(Protocol):
    """A writer of runs to numbered files or objects."""

    @property
    def needs_alignment(self) -> bool:
        """Whether the data of a write must have the page offset of its first byte in the file."""
        ...

    def write(self, copies: Sequence[StridedCopy], data: ByteArray) -> None:
        """Write all runs of the copies from `data`, where they are packed one after another. Raises PrepError."""
        ...


class Files(ClosedAfterBlock):
    """Numbered files to read or write.

    Each is open twice: with O_DIRECT for whole pages, and buffered for partial pages. If there are more than
    `MAX_KEPT_FILES`, each access opens its file, without direct I/O.

    Attributes:
        is_read_back: Whether synced bytes are soon read. They then stay in the page cache.
        are_in_memory: Whether all files are on a file system without a disk, such as tmpfs.
    """

    is_read_back: ClassVar[bool] = False

    def __init__(self, paths: Sequence[Path], sizes: Sequence[int] | None = None) -> None:
        """Open files for reading, or for writing if `sizes` is given.

        Args:
            paths: The files.
            sizes: Sizes of the files to write. Files of another size are created or resized.

        Raises:
            PrepError: A file cannot be opened, or is a link.
        """
        self.paths = tuple(paths)
        self._sizes = tuple(sizes or ())
        # Empty if each access opens its file.
        self._buffered: list[int] = []
        # -1 for a file without direct I/O
        self._direct: list[int] = []
        self._descriptors: list[int] = []
        self._unsynced: set[int] = set()
        self._unsynced_lock = threading.Lock()  # another thread may sync
        self._sync_lock = threading.Lock()
        self._write_error: PrepError | None = None
        self.are_in_memory = True
        self._is_kept_open = len(self.paths) <= MAX_KEPT_FILES
        # Device and inode of each file that is not kept open.
        self._identities: list[tuple[int, int]] = []
        # Shared runs are read from the written file.
        flags = os.O_RDONLY if sizes is None else os.O_RDWR | os.O_CREAT
        if self._is_kept_open:
            _raise_open_file_limit(2 * len(self.paths))
        try:
            for i, path in enumerate(self.paths):
                self._open_file(path, flags, None if sizes is None else sizes[i])
                if not self._is_kept_open:
                    self._identities.append(_file_identity(self._buffered[0]))
                    self.close()
        except BaseException:
            self.close()
            raise
        if not self._is_kept_open:
            self._direct = [-1] * len(self.paths)
        self.policy = WritePolicy(sum(self._sizes), has_direct=any(fd >= 0 for fd in self._direct))

    @property
    def needs_alignment(self) -> bool:
        """Whether writes may use direct I/O. Buffers then need the page offset of the file."""
        return self.policy.needs_alignment

    def _open_file(self, path: Path, flags: int, size: int | None) -> None:
        """Open a file for buffered and for direct I/O, and allocate its size."""
        try:
            if size is None:
                fd = os.open(path, flags | os.O_CLOEXEC)
                self._descriptors.append(fd)
                direct_flags = flags
            else:
                # Outputs are never written through links, not even through a link created just now.
                fd = open_no_follow(path, flags)
                self._descriptors.append(fd)
                direct_flags = flags & ~os.O_CREAT | os.O_NOFOLLOW
                if os.fstat(fd).st_size != size:
                    allocate(fd, size)
            self._buffered.append(fd)
        except OSError as error:
            raise io_error(path, error) from error
        has_disk = not is_in_memory(fd)
        if has_disk:
            self.are_in_memory = False
        if self._is_kept_open:
            # tmpfs accepts O_DIRECT since Linux 6.6 and copies as ever, but aligned writes need one more copy.
            self._direct.append(self._open_direct(path, direct_flags) if has_disk else -1)

    def _open_direct(self, path: Path, flags: int) -> int:
        """Open a file for direct I/O, and return its descriptor, or -1 without direct I/O."""
        try:
            fd = os.open(path, flags | os.O_DIRECT | os.O_CLOEXEC)
        except OSError:
            # The file system does not support direct I/O.
            return -1
        self._descriptors.append(fd)
        return fd

    def _acquire(self, file: int) -> int:
        """Return a buffered descriptor of a file. `_release` ends its use. Raise PrepError if it cannot be opened."""
        if self._is_kept_open:
            return self._buffered[file]
        path = self.paths[file]
        try:
            if self._sizes:
                fd = open_no_follow(path, os.O_RDWR)
            else:
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise io_error(path, error) from error
        if _file_identity(fd) != self._identities[file]:
            os.close(fd)
            if self._sizes:
                raise _replaced_error(path)
            what = f"{path} was changed by another program"
            raise PrepError(what, "while prep read it", RERUN_HINT)
        return fd

    def _release(self, fd: int) -> None:
        """Close a descriptor of `_acquire`, unless the file is kept open."""
        if not self._is_kept_open:
            os.close(fd)

    def close(self) -> None:
        """Close every descriptor. Unsynced data may still be in the page cache."""
        for fd in self._descriptors:
            os.close(fd)
        self._buffered = []
        self._direct = []
        self._descriptors = []

    def check_unchanged(self) -> None:
        """Raise PrepError if a written file was replaced, removed or resized by another process."""
        # A rename over the path leaves the open file without a name. Its bytes would be lost,
        # although every write succeeds.
        for file, (path, size) in enumerate(zip(self.paths, self._sizes)):
            try:
                status = path.stat()
                if self._is_kept_open:
                    identity = _file_identity(self._buffered[file])
                else:
                    identity = self._identities[file]
            except OSError as error:
                raise io_error(path, error) from error
            if (status.st_dev, status.st_ino) != identity or status.st_size != size:
                raise _replaced_error(path)

    def read_run(self, copy: StridedCopy, into: ByteArray) -> ByteArray:
        """Read one run. See `RunReader.read_run`. Raise PrepError if the file cannot be read or is too short."""
        # Direct I/O reads whole pages, e.g. bytes 5,000 to 9,000 as bytes 4,096 to 12,288. The run is
        # then at byte 904 of the buffer, with the page offset that it has in the file.
        page_offset = copy.file_offset % PAGE
        padded_nbytes = page_offset + copy.width
        run = into[page_offset:padded_nbytes]
        if self._direct[copy.file] >= 0:
            pages = into[: -(-padded_nbytes // PAGE) * PAGE]
            # A file may end inside its last page: only the run's own bytes are required.
            start = copy.file_offset - page_offset
            self._transfer_all(os.preadv, copy.file, True, pages, start, padded_nbytes)
        else:
            self._transfer_all(os.preadv, copy.file, False, run, copy.file_offset, copy.width)
        return run

    def read_runs(self, copies: Sequence[StridedCopy], into: ByteArray) -> ByteArray:
        """Read the runs of all copies. See `RunReader.read_runs`."""
        filled = 0
        for copy in copies:
            run_nbytes = copy.run_nbytes
            for offset in copy.run_offsets():
                # Direct I/O needs whole pages: the offsets in the file and in the buffer, and the length.
                is_paged = not (offset | run_nbytes | filled) % PAGE
                run = into[filled : filled + run_nbytes]
                self._transfer_all(os.preadv, copy.file, is_paged, run, offset, run_nbytes)
                filled += run_nbytes
        return into[:filled]

    def write(self, copies: Sequence[StridedCopy], data: ByteArray) -> None:
        """Write all runs of the copies from `data`, where they are packed one after another. Raises PrepError."""
        try:
            with self.policy.writing(sum(copy.nbytes for copy in copies)) as mode:
                self._write_runs(mode, copies, data)
        except OSError as error:  # the system reports a failed writeback only once
            self._write_error = io_error(self.paths[copies[-1].file], error)
            raise self._write_error from error

    def _write_runs(self, mode: WriteMode, copies: Sequence[StridedCopy], data: ByteArray) -> None:
        """Write all runs in the given mode."""
        done = 0
        for copy in copies:
            run_nbytes = copy.run_nbytes
            for offset in copy.run_offsets():
                run = data[done : done + run_nbytes]
                if mode is WriteMode.DIRECT:
                    self._transfer_by_pages(os.pwritev, copy.file, run, offset)
                else:
                    self._write_back(copy.file, run, offset)
                done += run_nbytes
            self._mark_unsynced(copy.file)

    def _write_back(self, file: int, data: ByteArray, offset: int) -> None:
        """Write through the page cache, in blocks up to page boundaries: each page is written to disk once.

        Writeback of short runs is left to `sync`, because later runs may write to the same pages.
        """
        start = 0
        is_long = data.size >= LONG_RUN_NBYTES
        while start < data.size:
            stop = min(data.size, start + WRITEBACK_NBYTES - (offset + start) % PAGE)
            self._transfer_all(
                os.pwritev, file, False, data[start:stop], offset + start, stop - start
            )
            if is_long and self._is_kept_open and not self.are_in_memory:
                self.policy.writeback.start(self._buffered[file], offset + start, stop - start)
            start = stop

    def read_at(self, file: int, offset: int, into: ByteArray) -> None:
        """Fill `into` with a file's bytes from `offset` on, with direct I/O if both have the same page offset."""
        self._transfer_by_pages(os.preadv, file, into, offset)

    def share(self, copy: StridedCopy, source: Files, source_copy: StridedCopy) -> bool:
        """Let a run of whole blocks share the disk blocks of a run of another file, in place of writing it.

        Args:
            copy: The run to replace, a copy without dims.
            source: The other files.
            source_copy: The run to share, of the same width.

        Returns:
            Whether the run is shared. See `clone_range`.

        Raises:
            PrepError: A file cannot be opened.
        """
        source_fd = source._acquire(source_copy.file)
        try:
            fd = self._acquire(copy.file)
            try:
                is_shared = clone_range(
                    fd, copy.file_offset, source_fd, source_copy.file_offset, copy.width
                )
            finally:
                self._release(fd)
        finally:
            source._release(source_fd)
        if is_shared:
            self._mark_unsynced(copy.file)
        return is_shared

    def write_bytes(self, file: int, data: bytes, *, offset: int = 0) -> None:
        """Write bytes outside of tensors, such as a header."""
        self._transfer_all(
            os.pwritev, file, False, np.frombuffer(data, np.uint8), offset, len(data)
        )
        self._mark_unsynced(file)

    def _mark_unsynced(self, file: int) -> None:
        """Include a file in the next sync. Called after writing, since a sync may run at the same time."""
        with self._unsynced_lock:
            self._unsynced.add(file)

    def _transfer_by_pages(self, call: _Call, file: int, data: ByteArray, offset: int) -> None:
        """Transfer a run with direct I/O for its whole pages and buffered I/O for its ends."""
        # A run of 10,000 bytes at offset 5,000 has two partial pages around one whole page:
        #
        #   buffered 5,000..8,192   direct 8,192..12,288   buffered 12,288..15,000
        nbytes = data.size
        # The example has pages_start = 3,192 and pages_stop = 7,288, both relative to the run.
        pages_start = -offset % PAGE
        pages_stop = nbytes - (offset + nbytes) % PAGE
        # Without a whole page, or with another page offset in memory, all bytes take the buffered
        # way.
        if pages_start >= pages_stop or (data.ctypes.data + pages_start) % PAGE:
            pages_start = pages_stop = nbytes
        for is_paged, start, stop in (
            (False, 0, pages_start),
            (True, pages_start, pages_stop),
            (False, pages_stop, nbytes),
        ):
            if start < stop:
                part = data[start:stop]
                self._transfer_all(call, file, is_paged, part, offset + start, stop - start)

    def _transfer_all(
        self, call: _Call, file: int, is_paged: bool, data: ByteArray, offset: int, nbytes: int
    ) -> None:
        """Repeat a system call until `nbytes` bytes are transferred."""
        buffered_fd = self._acquire(file)
        fd = buffered_fd
        done = 0
        view = data.data
        if is_paged and self._direct[file] >= 0:
            fd = self._direct[file]
            if call is os.preadv and nbytes >= MIN_CACHED_NBYTES:
                done = _read_cached(buffered_fd, view, offset)
        try:
            while done < nbytes:
                try:
                    count = call(fd, [view[done:]], offset + done)
                except OSError as error:
                    if error.errno == errno.EINVAL and fd != buffered_fd:
                        # Some file systems reject direct I/O only now. The direct descriptor stays open: another
                        # thread may be using it.
                        fd = self._direct[file] = buffered_fd
                        continue
                    raise io_error(self.paths[file], error) from error
                if count <= 0:
                    missing = count_text(nbytes - done, "byte is", "bytes are")
                    why = f"{missing} missing at byte {offset + done:,}"
                    raise DamagedError(f"{self.paths[file].name} is cut short", why, GET_AGAIN_HINT)
                done += count
                if done < nbytes and fd != buffered_fd and (offset + done) % PAGE:
                    # A short count ended inside a page, and direct I/O cannot go on from there.
                    fd = buffered_fd
        finally:
            self._release(buffered_fd)

    def sync(self) -> None:
        """Make all written bytes durable.

        Raises:
            PrepError: Writing failed, now or in an earlier call: the system reports a failed write only once.
        """
        # Another caller may have taken the files of this one: its sync must be complete, too.
        with self._sync_lock:
            if self._write_error:
                raise self._write_error
            with self._unsynced_lock:
                unsynced = self._unsynced
                self._unsynced = set()
            try:
                sync_many(self._sync_file, sorted(unsynced))
            except PrepError as error:
                # No later call knows which of these files are durable.
                self._write_error = self._write_error or error
                raise
            except BaseException:
                # E.g. the system starts no further thread
                with self._unsynced_lock:
                    self._unsynced |= unsynced
                raise
            # A writer of another lane may have got the only report of a failed writeback meanwhile.
            if self._write_error:
                raise self._write_error

    def _sync_file(self, file: int) -> None:
        """Make the written bytes of one file durable. Raises PrepError."""
        fd = self._acquire(file)
        try:
            os.fdatasync(fd)
            if not (self.is_read_back or self.are_in_memory):
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        except OSError as error:
            self._write_error = io_error(self.paths[file], error)
            raise self._write_error from error
        finally:
            self._release(fd)


def open_data_files(plan: Plan, folder: Path) -> Files:
    """Create the data files of an output with their sizes and headers, and open them to write.

    Args:
        plan: The plan of the output.
        folder: Folder of the incomplete output.

    Raises:
        PrepError: The folder has symbolic links, or a file cannot be written.
    """
    check_no_symlinks(folder)
    paths = [folder / plan.item / file.path for file in plan.files]
    for parent in {path.parent for path in paths}:
        parent.mkdir(parents=True, exist_ok=True)
    files = Files(paths, [file.size for file in plan.files])
    try:
        for number, file in enumerate(plan.files):
            for offset, data in ((0, file.header), *file.constant_ranges):
                if data:
                    files.write_bytes(number, data, offset=offset)
    except BaseException:
        files.close()
        raise
    return files


def missing_nbytes(plan: Plan, folder: Path) -> int:
    """Return the number of bytes of data files without disk space so far. `folder` need not exist."""
    missing = 0
    for file in plan.files:
        missing += file.size - allocated_size(folder / plan.item / file.path)
    return missing


def allocated_size(path: Path) -> int:
    """Return the size of the file on disk, or 0 if it does not exist."""
    try:
        # `st_blocks` counts units of 512 bytes on every file system. Holes are not counted.
        return path.stat().st_blocks * 512
    except OSError:
        return 0


def _read_cached(fd: int, view: memoryview, offset: int) -> int:
    """Read the bytes from `offset` on that are in the page cache, and return the size of their whole pages.

    A model that was just downloaded or written is in memory. Direct I/O would read it from disk again.
    """
    if _CACHED_ONLY is None:
        return 0
    try:
        # Ends before the first page that is not in memory.
        count = os.preadv(fd, [view], offset, _CACHED_ONLY)
    except (OSError, NotImplementedError):
        # The first page is not in memory, or the system cannot tell.
        return 0
    return count if count == len(view) else count // PAGE * PAGE


def _replaced_error(path: Path) -> PrepError:
    """Return the error for a path changed by another program."""
    return PrepError(
        f"{path} was changed by another program",
        "while prep wrote to it",
        text("start again with {}", Option("restart", True)),
    )


def _file_identity(fd: int) -> tuple[int, int]:
    """Return the device and the inode of an open file."""
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


def _raise_open_file_limit(count: int) -> None:
    """Raise the soft limit of open files to allow `count` more, as far as the hard limit allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    open_count = 0
    if os.path.isdir("/proc/self/fd"):
        open_count = len(os.listdir("/proc/self/fd"))
    needed = open_count + count + RESERVED_DESCRIPTORS
    if soft != resource.RLIM_INFINITY and needed > soft:
        new_limit = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, new_limit), hard))
