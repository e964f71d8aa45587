"""Files read and written in runs: whole pages by direct I/O where the file system has it and it is not slower."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import resource
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Protocol

import numpy as np
import numpy.typing as npt

from prepcli.engine.io_policy import WriteMode, WritePolicy
from prepcli.engine.linux import allocate
from prepcli.engine.no_follow import open_no_follow
from prepcli.errors import PrepError
from prepcli.planning.slabs import LONG_RUN_NBYTES, PAGE
from prepcli.planning.strided_copies import StridedCopy

ByteArray = npt.NDArray[np.uint8]
RESERVED_DESCRIPTORS = 32  # for whatever else is opened
BLOCK_NBYTES = 4 << 20  # bytes copied into the page cache before their writeback starts
_Call = Callable[[int, list[memoryview], int], int]  # os.preadv or os.pwritev


def allocate_buffer(nbytes: int) -> ByteArray:
    """Page-aligned memory that is only taken when it is touched, in huge pages where the system has them."""
    memory = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)


class RunReader(Protocol):
    """What the engine reads from: runs of numbered files, or of what has the same form."""

    def read_run(self, copy: StridedCopy, into: ByteArray) -> ByteArray:
        """Read a copy that is one run; it comes back as deep in a page as `copy.offset` is."""
        ...

    def read_runs(self, copies: Sequence[StridedCopy], into: ByteArray) -> ByteArray:
        """Read all runs of the copies one after another."""
        ...


class Files:
    """Numbered files, each open twice: for whole pages (O_DIRECT) and buffered for ragged ends."""

    def __init__(self, paths: Sequence[Path], sizes: Sequence[int] | None = None) -> None:
        """Open for reading, or with `sizes` for writing: files are made, or kept if they have their size."""
        self.paths = tuple(paths)
        self._sizes = tuple(sizes or ())
        self._buffered: list[int] = []
        self._direct: list[int] = []
        self._opened: list[int] = []
        self._written: set[int] = set()
        self._writing = threading.Lock()  # of `_written`: another thread may sync
        self._lost: PrepError | None = None
        flags = os.O_RDONLY if sizes is None else os.O_WRONLY | os.O_CREAT
        _raise_open_file_limit(2 * len(self.paths))
        try:
            for i, path in enumerate(self.paths):
                self._open_file(path, flags, None if sizes is None else sizes[i])
        except BaseException:
            self.close()
            raise
        self.policy = WritePolicy(sum(self._sizes), has_direct=any(fd >= 0 for fd in self._direct))

    def _open_file(self, path: Path, flags: int, size: int | None) -> None:
        try:
            opened = os.open(path, flags | os.O_CLOEXEC) if size is None else open_no_follow(path, flags)
            self._buffered.append(self._track_descriptor(opened))
            if size is not None and os.fstat(self._buffered[-1]).st_size != size:
                allocate(self._buffered[-1], size)
            same = 0 if size is None else os.O_NOFOLLOW
            self._direct.append(self._track_descriptor(_open_direct(path, flags & ~os.O_CREAT | same)))
        except OSError as error:
            raise io_error(path, error) from error

    def _track_descriptor(self, fd: int) -> int:
        self._opened.append(fd)
        return fd

    def __enter__(self) -> Files:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close every descriptor; what was not synced may still be in memory."""
        for fd in self._opened:
            if fd >= 0:
                os.close(fd)
        self._buffered, self._direct, self._opened = [], [], []

    def check_unchanged(self) -> None:
        """PrepError if a file that was written has not its name or size any more: somebody did something to it."""
        for path, fd, size in zip(self.paths, self._buffered, self._sizes):
            try:
                found, named = os.fstat(fd), path.stat()
            except OSError as error:
                raise io_error(path, error) from error
            if not os.path.samestat(found, named) or found.st_size != size:
                raise PrepError(f"{path} was changed by somebody else", "while it was written", "`--restart`")

    def read_run(self, copy: StridedCopy, into: ByteArray) -> ByteArray:
        """Read a copy that is one run; it comes back as deep in a page as it lies in the file."""
        lead = copy.file_offset % PAGE
        need = lead + copy.width
        if self._direct[copy.file] >= 0:
            self._transfer_all(
                os.preadv, copy.file, True, into[: -(-need // PAGE) * PAGE], copy.file_offset - lead, need
            )
        else:
            self._transfer_all(os.preadv, copy.file, False, into[lead:need], copy.file_offset, copy.width)
        return into[lead:need]

    def read_runs(self, copies: Sequence[StridedCopy], into: ByteArray) -> ByteArray:
        """Read all runs of the copies one after another."""
        at = 0
        for copy in copies:
            run = copy.run_nbytes
            for offset in copy.run_offsets():
                pages = not (offset | run | at) % PAGE
                self._transfer_all(os.preadv, copy.file, pages, into[at : at + run], offset, run)
                at += run
        return into[:at]

    def write(self, copies: Sequence[StridedCopy], data: ByteArray) -> None:
        """Write the bytes of all runs of the copies, which follow each other in `data`."""
        try:
            with self.policy.writing(sum(copy.nbytes for copy in copies)) as mode:
                self._write_runs(mode, copies, data)
        except OSError as error:  # of writeback, which the system reports once
            self._lost = io_error(self.paths[copies[-1].file], error)
            raise self._lost from error

    def _write_runs(self, mode: WriteMode, copies: Sequence[StridedCopy], data: ByteArray) -> None:
        at = 0
        for copy in copies:
            run = copy.run_nbytes
            for offset in copy.run_offsets():
                if mode is WriteMode.DIRECT:
                    self._transfer_by_pages(os.pwritev, copy.file, data[at : at + run], offset)
                else:
                    self._write_back(copy.file, data[at : at + run], offset)
                at += run
            self._mark_unsynced(copy.file)

    def _write_back(self, file: int, data: ByteArray, offset: int) -> None:
        """Write through the page cache, in blocks that end where pages end: each page goes to the disk once.

        Short runs are left to `sync`: later ones may write to the same pages.
        """
        low, is_long = 0, data.size >= LONG_RUN_NBYTES
        while low < data.size:
            high = min(data.size, low + BLOCK_NBYTES - (offset + low) % PAGE)
            self._transfer_all(os.pwritev, file, False, data[low:high], offset + low, high - low)
            if is_long:
                self.policy.writeback.start(self._buffered[file], offset + low, high - low)
            low = high

    def read_at(self, file: int, offset: int, into: ByteArray) -> None:
        """Fill `into` from a file: whole pages past the page cache where memory and file are as deep in a page."""
        self._transfer_by_pages(os.preadv, file, into, offset)

    def write_bytes(self, file: int, data: bytes, offset: int = 0) -> None:
        """Write the first bytes of a file, or others that are no tensor's."""
        self._transfer_all(os.pwritev, file, False, np.frombuffer(data, np.uint8), offset, len(data))
        self._mark_unsynced(file)

    def _mark_unsynced(self, file: int) -> None:
        """The next sync includes a file. Called after its bytes were written: a sync may run at the same time."""
        with self._writing:
            self._written.add(file)

    def _transfer_by_pages(self, call: _Call, file: int, data: ByteArray, offset: int) -> None:
        size = data.size
        low, high = -offset % PAGE, size - (offset + size) % PAGE  # the whole pages in between
        if low >= high or (data.ctypes.data + low) % PAGE:
            low = high = size
        for pages, start, stop in ((False, 0, low), (True, low, high), (False, high, size)):
            if start < stop:
                self._transfer_all(call, file, pages, data[start:stop], offset + start, stop - start)

    def _transfer_all(self, call: _Call, file: int, is_paged: bool, data: ByteArray, offset: int, nbytes: int) -> None:
        fd = self._direct[file] if is_paged and self._direct[file] >= 0 else self._buffered[file]
        done, view = 0, data.data
        while done < nbytes:
            try:
                count = call(fd, [view[done:]], offset + done)
            except OSError as error:
                if error.errno == errno.EINVAL and fd != self._buffered[file]:  # a file system that only says so now
                    fd = self._direct[file] = self._buffered[file]  # the other one stays open: a thread may be using it
                    continue
                raise io_error(self.paths[file], error) from error
            if count <= 0:
                raise PrepError(
                    f"{self.paths[file].name} is cut short",
                    f"{nbytes - done:,} bytes are missing at byte {offset + done:,}",
                )
            done += count
            if done < nbytes and fd != self._buffered[file] and (offset + done) % PAGE:
                fd = self._buffered[file]  # a short count leaves the rest ragged

    def sync(self) -> None:
        """Make everything written so far durable. PrepError where that failed once: asked again the system says yes."""
        if self._lost:
            raise self._lost
        with self._writing:
            written, self._written = self._written, set()
        for file in sorted(written):
            fd = self._buffered[file]
            try:
                os.fdatasync(fd)
            except OSError as error:
                self._lost = io_error(self.paths[file], error)
                raise self._lost from error
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def _raise_open_file_limit(count: int) -> None:
    """Let this process have so many more files open, as far as the system does: by default far fewer than it could."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    there = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    needed = there + count + RESERVED_DESCRIPTORS
    if soft != resource.RLIM_INFINITY and needed > soft:
        most = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))


def _open_direct(path: Path, flags: int) -> int:
    """A descriptor past the page cache; -1 where the file system has none."""
    try:
        return os.open(path, flags | os.O_DIRECT | os.O_CLOEXEC)
    except OSError:
        return -1


def io_error(path: Path, error: OSError) -> PrepError:
    """What the system said of a file, as an error that names it."""
    why = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        hint = "free some room and run the same command again: it goes on from where it stopped"
        return PrepError(f"the disk that holds {path.name} is full", why, hint)
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return PrepError(f"cannot read or write {path}", why, "`ulimit -n` says how many: let it be more")
    return PrepError(f"cannot read or write {path}", why)
