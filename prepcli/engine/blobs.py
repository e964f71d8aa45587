"""Blobs: byte sequences other than plain local files, such as decoded chunks and remote files."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol, runtime_checkable

import numpy as np

from prepcli.algebra.strided_copies import StridedCopy
from prepcli.engine.chunk_cache import DEFAULT_CACHE_NBYTES, ChunkCache
from prepcli.engine.files import PAGE, Files
from prepcli.stores.buffers import Blob, BlobReader, ByteArray


@dataclass(frozen=True, slots=True)
class MemoryBlob:
    """A few bytes in memory."""

    name: str
    content: bytes

    def open(self) -> MemoryBlob:
        """Return the blob itself."""
        return self

    def read_at(self, offset: int, into: ByteArray) -> None:
        """Fill `into` with the bytes from `offset` on."""
        data = self.content[offset : offset + into.size]
        into[:] = np.frombuffer(data, np.uint8)

    def close(self) -> None:
        """Do nothing."""


@runtime_checkable
class CachedBlob(Blob, Protocol):
    """A blob with chunks to decode into a cache of several blobs."""

    def open_with_cache(self, cache: ChunkCache) -> BlobReader:
        """Return a reader with the cache of decoded chunks `cache`."""
        ...


def open_blobs(
    blobs: Sequence[Path | Blob], cache_nbytes: int = DEFAULT_CACHE_NBYTES
) -> Files | FilesAndBlobs:
    """Open files and blobs for reading by number.

    Args:
        blobs: Paths of files, and blobs.
        cache_nbytes: Maximum memory for decoded chunks, over all blobs.

    Returns:
        A reader, to be closed as a context manager.
    """
    paths = [blob for blob in blobs if isinstance(blob, Path)]
    if len(paths) == len(blobs):
        return Files(paths)
    return FilesAndBlobs(blobs, cache_nbytes)


class FilesAndBlobs:
    """A reader of numbered files and blobs."""

    def __init__(
        self, blobs: Sequence[Path | Blob], cache_nbytes: int = DEFAULT_CACHE_NBYTES
    ) -> None:
        self._stack = contextlib.ExitStack()
        cache = ChunkCache(cache_nbytes)
        # The reader of each blob, or the number of its file in `_files`.
        self._readers: list[int | BlobReader] = []
        paths = [blob for blob in blobs if isinstance(blob, Path)]
        # If a blob cannot be opened, the inner stack closes the ones before it. Otherwise `close` does.
        with contextlib.ExitStack() as stack:
            self._files = stack.enter_context(Files(paths))
            numbers = itertools.count()
            for blob in blobs:
                if isinstance(blob, Path):
                    self._readers.append(next(numbers))
                else:
                    self._readers.append(_open_blob(blob, cache, stack))
            self._stack = stack.pop_all()

    def __enter__(self) -> FilesAndBlobs:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        filled: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the files and the readers of the blobs."""
        self._stack.close()

    def read_run(self, copy: StridedCopy, into: ByteArray) -> ByteArray:
        """Read one run, i.e. one contiguous byte range.

        Args:
            copy: A copy with a single run.
            into: Page-aligned buffer with room for the run and a page.

        Returns:
            The part of `into` with the run. It has the same page offset as the run in the file.
        """
        reader = self._readers[copy.file]
        if isinstance(reader, int):
            return self._files.read_run(_with_file_number(copy, reader), into)
        page_offset = copy.file_offset % PAGE
        view = into[page_offset : page_offset + copy.width]
        reader.read_at(copy.file_offset, view)
        return view

    def read_runs(self, copies: Sequence[StridedCopy], into: ByteArray) -> ByteArray:
        """Read all runs of the copies one after another. Return the filled part of `into`."""
        # Neighbours of one file are read together, which keeps the pages of `Files` aligned in `into`.
        filled = 0
        for reader, group in itertools.groupby(copies, lambda copy: self._readers[copy.file]):
            if isinstance(reader, int):
                file_copies = [_with_file_number(copy, reader) for copy in group]
                filled += self._files.read_runs(file_copies, into[filled:]).size
                continue
            for copy in group:
                for offset in copy.run_offsets():
                    reader.read_at(offset, into[filled : filled + copy.run_nbytes])
                    filled += copy.run_nbytes
        return into[:filled]

    def read_at(self, number: int, offset: int, into: ByteArray) -> None:
        """Fill `into` with the bytes of a file or blob from `offset` on."""
        reader = self._readers[number]
        if isinstance(reader, int):
            self._files.read_at(reader, offset, into)
        else:
            reader.read_at(offset, into)


def _open_blob(blob: Blob, cache: ChunkCache, stack: contextlib.ExitStack) -> BlobReader:
    """Open a blob. Its reader is closed when `stack` is closed."""
    if isinstance(blob, CachedBlob):
        reader = blob.open_with_cache(cache)
    else:
        reader = blob.open()
    stack.callback(reader.close)
    return reader


def _with_file_number(copy: StridedCopy, number: int) -> StridedCopy:
    """Return the same copy in another file."""
    return StridedCopy(copy.tensor_offset, number, copy.file_offset, copy.width, copy.dims)
