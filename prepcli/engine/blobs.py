"""What tensors are read from where that is no file as it stands: pieces joined, chunks decoded, a file far away."""

from __future__ import annotations

import bisect
import contextlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol, runtime_checkable

from prepcli.engine.chunk_cache import DEFAULT_CACHE_NBYTES, ChunkCache
from prepcli.engine.files import PAGE, ByteArray, Files
from prepcli.planning.strided_copies import StridedCopy


class BlobReader(Protocol):
    """A blob while it is read from, by one thread."""

    def read_at(self, offset: int, into: ByteArray) -> None:
        """Fill `into` from byte `offset` on. PrepError where that cannot be."""
        ...

    def close(self) -> None: ...


class Blob(Protocol):
    """Numbered bytes, as those of a file."""

    @property
    def name(self) -> str:
        """As messages call it."""
        ...

    def open(self) -> BlobReader: ...


@runtime_checkable
class CachedBlob(Blob, Protocol):
    """A blob that is decoded, within memory that it shares with others."""

    def open_with_cache(self, cache: ChunkCache) -> BlobReader: ...


@dataclass(frozen=True, slots=True)
class FileRange:
    """A run of a file."""

    path: Path
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class ConcatenatedBlob:
    """Runs of files, one after another."""

    name: str
    ranges: tuple[FileRange, ...]

    def open(self) -> BlobReader:
        return _ConcatenatedReader(self.ranges)


class _ConcatenatedReader:
    def __init__(self, parts: Sequence[FileRange]) -> None:
        self._parts = parts
        self._starts = list(itertools.accumulate((part.nbytes for part in parts), initial=0))
        paths = list(dict.fromkeys(part.path for part in parts))
        self._numbers = {path: number for number, path in enumerate(paths)}
        self._files = Files(paths)

    def read_at(self, offset: int, into: ByteArray) -> None:
        done = 0
        number = bisect.bisect_right(self._starts, offset) - 1
        while done < into.size:
            part, skipped = self._parts[number], offset + done - self._starts[number]
            count = min(part.nbytes - skipped, into.size - done)
            self._files.read_at(self._numbers[part.path], part.offset + skipped, into[done : done + count])
            done, number = done + count, number + 1

    def close(self) -> None:
        self._files.close()


def open_blobs(blobs: Sequence[Path | Blob], cache_nbytes: int = DEFAULT_CACHE_NBYTES) -> Files | FilesAndBlobs:
    """Files and blobs to read from, by their number; to be closed as a context manager. Those that are decoded take at
    most `cache_nbytes` together."""
    paths = [blob for blob in blobs if isinstance(blob, Path)]
    return Files(paths) if len(paths) == len(blobs) else FilesAndBlobs(blobs, cache_nbytes)


class FilesAndBlobs:
    """Numbered files and blobs, read in runs."""

    def __init__(self, blobs: Sequence[Path | Blob], cache_nbytes: int = DEFAULT_CACHE_NBYTES) -> None:
        self._stack, cache = contextlib.ExitStack(), ChunkCache(cache_nbytes)
        self._places: list[int | BlobReader] = []  # a number of a file, or the blob itself
        paths = [blob for blob in blobs if isinstance(blob, Path)]
        with contextlib.ExitStack() as stack:
            self._files = stack.enter_context(Files(paths))
            numbers = itertools.count()
            for blob in blobs:
                self._places.append(next(numbers) if isinstance(blob, Path) else _open_blob(blob, cache, stack))
            self._stack = stack.pop_all()

    def __enter__(self) -> FilesAndBlobs:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stack.close()

    def read_run(self, copy: StridedCopy, into: ByteArray) -> ByteArray:
        """Read a copy that is one run; it comes back as deep in a page as it lies in the file."""
        place = self._places[copy.file]
        if isinstance(place, int):
            return self._files.read_run(_with_file(copy, place), into)
        lead = copy.file_offset % PAGE
        found = into[lead : lead + copy.width]
        place.read_at(copy.file_offset, found)
        return found

    def read_runs(self, copies: Sequence[StridedCopy], into: ByteArray) -> ByteArray:
        """Read all runs of the copies one after another."""
        at = 0
        for place, group in itertools.groupby(copies, lambda copy: self._places[copy.file]):
            if isinstance(place, int):
                at += self._files.read_runs([_with_file(copy, place) for copy in group], into[at:]).size
                continue
            for copy in group:
                for offset in copy.run_offsets():
                    place.read_at(offset, into[at : at + copy.run_nbytes])
                    at += copy.run_nbytes
        return into[:at]

    def read_at(self, number: int, offset: int, into: ByteArray) -> None:
        """Fill `into` from byte `offset` of a file or blob."""
        place = self._places[number]
        if isinstance(place, int):
            self._files.read_at(place, offset, into)
        else:
            place.read_at(offset, into)


def _open_blob(blob: Blob, cache: ChunkCache, stack: contextlib.ExitStack) -> BlobReader:
    opened = blob.open_with_cache(cache) if isinstance(blob, CachedBlob) else blob.open()
    stack.callback(opened.close)
    return opened


def _with_file(copy: StridedCopy, number: int) -> StridedCopy:
    return StridedCopy(copy.tensor_offset, number, copy.file_offset, copy.width, copy.dims)
