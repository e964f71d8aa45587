"""Chunks of an output compressed, one after another, once all of them lie raw in its staging folder.

How long a chunk becomes is only known when it is compressed, so its place cannot be planned; what is written depends on
the raw bytes and the level alone. A chunk is compressed in pieces: it may be of any size. A line of the journal holds
the lengths of chunks that are durable, and the digest of their bytes, which a later run reads back before it goes on.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from prepcli.console.progress import Progress
from prepcli.engine.background_sync import SYNC_INTERVAL_S
from prepcli.engine.files import io_error
from prepcli.engine.journal import seal_line, unseal_line
from prepcli.engine.no_follow import open_no_follow, read_no_follow
from prepcli.errors import PrepError, usage_error
from prepcli.formats.orbax_write import WrittenChunk
from prepcli.planning.chunk_placement import FILE_NBYTES

PIECE_NBYTES = 1 << 20
MARK_NBYTES = 256 << 20  # of raw bytes that are not durable yet
METHOD, DEFAULT_LEVEL, MAX_LEVEL = "zstd", 1, 19  # the level that Orbax takes; those above ask for much memory


_ChunkTable = npt.NDArray[np.int64]  # a row a chunk: file, offset, bytes. Of objects there would be too many


class _ByteRange(NamedTuple):
    file: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True, eq=False)
class CompressedChunks:
    """Where the chunks lie now, in the order in which they were given, their files relative to the item, and the size
    of each."""

    places: _ChunkTable
    files: tuple[str, ...]
    sizes: tuple[int, ...]

    def relocate(self, raw: Iterable[WrittenChunk]) -> Iterator[WrittenChunk]:
        """The chunks that were given, where they lie now."""
        for chunk, row in zip(raw, self.places, strict=True):
            file, offset, nbytes = map(int, row)
            yield replace(chunk, file=file, offset=offset, nbytes=nbytes)


def parse_compress(text: str | None) -> int | None:
    """The level that `zstd` or `zstd:LEVEL` names; usage PrepError for anything else."""
    if text is None:
        return None
    method, colon, level = text.partition(":")
    number = int(level) if level.isdecimal() and len(level) < 3 else DEFAULT_LEVEL if not colon else 0
    if method != METHOD or not 1 <= number <= MAX_LEVEL:
        raise usage_error(f"`--compress {text}` is not understood", f"it takes zstd, or zstd:1 to zstd:{MAX_LEVEL}")
    return number


def compress_chunks(
    chunks: Iterable[WrittenChunk],
    raw_files: Sequence[Path],
    folder: Path,
    journal: Path,
    level: int,
    progress: Progress,
) -> CompressedChunks:
    """Compress raw chunks into data files of the item in `folder`, in the order in which they lie; run again it goes on
    from what is durable. PrepError where the system does not let it."""
    given = _chunk_table(chunks)
    order = _storage_order(given)
    (folder / "d").mkdir(parents=True, exist_ok=True)
    task = _Compressor(given[order], raw_files, folder, journal, level)
    total, done = int(given[:, 2].sum()), int(task.chunks[: len(task.lengths), 2].sum())
    progress.begin("compress", total, done)
    try:
        task.run(progress)
    finally:
        progress.end()
        task.close()
    places = np.empty_like(given)
    places[order] = _chunk_places(task.lengths)
    sizes = np.bincount(places[:, 0], places[:, 2]).astype(np.int64).tolist()
    return CompressedChunks(places, tuple(_data_file_name(number) for number in range(len(sizes))), tuple(sizes))


def nbytes_to_compress(chunks: Iterable[WrittenChunk], journal: Path) -> int:
    """Bytes of the raw chunks that are still to be compressed. PrepError where the journal cannot be read."""
    given = _chunk_table(chunks)
    return int(given[_storage_order(given)][sum(len(mark.lengths) for mark in _read_marks(journal)) :, 2].sum())


def _chunk_table(chunks: Iterable[WrittenChunk]) -> _ChunkTable:
    flat = itertools.chain.from_iterable((chunk.file, chunk.offset, chunk.nbytes) for chunk in chunks)
    return np.fromiter(flat, np.int64).reshape(-1, 3)


def _storage_order(table: _ChunkTable) -> npt.NDArray[np.intp]:
    """The rows in the order in which the chunks lie."""
    return np.lexsort((table[:, 1], table[:, 0]))


class _Compressor:
    def __init__(self, chunks: _ChunkTable, raw: Sequence[Path], folder: Path, journal: Path, level: int) -> None:
        self.chunks, self.raw_files, self.folder, self.journal, self.level = chunks, raw, folder, journal, level
        self.lengths = _durable_lengths(journal, folder, len(chunks))
        self.digest = xxhash.xxh3_128()  # of what was compressed since the last mark
        self.out_fd = -1  # the descriptor of the data file that is being written
        self.source = (-1, -1)  # number and descriptor of the raw file that is being read

    def run(self, progress: Progress) -> None:
        """Compress what is left."""
        marked, unmarked, since_s = len(self.lengths), 0, time.monotonic()
        last = _ByteRange(*map(int, _chunk_places(self.lengths)[-1])) if marked else _ByteRange(0, 0, 0)
        file, offset = last.file, last.offset + last.nbytes
        self._open(file, offset)
        for row in self.chunks[marked:]:
            chunk = _ByteRange(*map(int, row))
            if offset >= FILE_NBYTES:
                marked, unmarked = self._mark(marked), 0
                file, offset = file + 1, 0
                self._open(file, offset)
            self.lengths.append(self._compress(chunk, progress))
            offset += self.lengths[-1]
            unmarked += chunk.nbytes
            if unmarked >= MARK_NBYTES or time.monotonic() - since_s >= SYNC_INTERVAL_S:
                marked, unmarked, since_s = self._mark(marked), 0, time.monotonic()
        self._mark(marked)

    def _open(self, file: int, nbytes: int) -> None:
        """Go on with a data file after so many bytes."""
        path = self.folder / _data_file_name(file)
        try:
            before, self.out_fd = self.out_fd, open_no_follow(path, os.O_WRONLY | os.O_CREAT)
            if before >= 0:
                os.close(before)
            os.ftruncate(self.out_fd, nbytes)
            os.lseek(self.out_fd, nbytes, os.SEEK_SET)
        except OSError as error:
            raise io_error(path, error) from error

    def _compress(self, chunk: _ByteRange, progress: Progress) -> int:
        import zstandard  # late: most outputs are raw

        stream = zstandard.ZstdCompressor(level=self.level).compressobj(size=chunk.nbytes)
        length = 0
        for piece in self._pieces(chunk):
            length += self._write(stream.compress(piece))
            progress.advance(len(piece))
        return length + self._write(stream.flush())

    def _pieces(self, chunk: _ByteRange) -> Iterator[bytes]:
        path = self.raw_files[chunk.file]
        try:
            if self.source[0] != chunk.file:
                self._close_raw_file()
                self.source = chunk.file, open_no_follow(path, os.O_RDONLY)
            for start in range(0, chunk.nbytes, PIECE_NBYTES):
                count = min(PIECE_NBYTES, chunk.nbytes - start)
                piece = os.pread(self.source[1], count, chunk.offset + start)
                if len(piece) < count:
                    raise PrepError(f"{path.name} is cut short", f"{count - len(piece):,} bytes are missing")
                yield piece
            os.posix_fadvise(self.source[1], chunk.offset, chunk.nbytes, os.POSIX_FADV_DONTNEED)
        except OSError as error:
            raise io_error(path, error) from error

    def _write(self, data: bytes) -> int:
        view = memoryview(data)
        self.digest.update(data)
        try:
            while view:
                view = view[os.write(self.out_fd, view) :]
        except OSError as error:
            raise io_error(self.folder, error) from error
        return len(data)

    def _mark(self, marked: int) -> int:
        """What was compressed since becomes durable, and then known to be so; how many chunks are."""
        try:
            os.fdatasync(self.out_fd)
            fd = open_no_follow(self.journal, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            try:
                entry = {"lengths": self.lengths[marked:], "digest": self.digest.hexdigest()}
                os.write(fd, seal_line(json.dumps(entry).encode()))
                os.fdatasync(fd)
            finally:
                os.close(fd)
        except OSError as error:
            raise io_error(self.journal, error) from error
        self.digest.reset()
        return len(self.lengths)

    def _close_raw_file(self) -> None:
        if self.source[1] >= 0:
            os.close(self.source[1])
            self.source = (-1, -1)

    def close(self) -> None:
        """Close all files."""
        self._close_raw_file()
        if self.out_fd >= 0:
            os.close(self.out_fd)
            self.out_fd = -1


def _chunk_places(lengths: Sequence[int]) -> _ChunkTable:
    """Where each chunk lies: a file is closed once it is long enough."""
    found, file, offset = np.empty((len(lengths), 3), np.int64), 0, 0
    for at, nbytes in enumerate(lengths):
        if offset >= FILE_NBYTES:
            file, offset = file + 1, 0
        found[at] = file, offset, nbytes
        offset += nbytes
    return found


def _durable_lengths(journal: Path, folder: Path, most: int) -> list[int]:
    """The lengths that a journal promises and that the data files hold; the journal is cut off after them."""
    marks = _read_marks(journal)
    lengths = [length for mark in marks for length in mark.lengths]
    places, count, nbytes = _chunk_places(lengths), 0, 0
    try:
        for mark in marks:
            stop = count + len(mark.lengths)
            if stop > most or _read_digest(folder, places[count:stop]) != mark.digest:
                break
            count, nbytes = stop, nbytes + mark.nbytes
        if journal.exists():
            os.truncate(journal, nbytes)
    except OSError as error:
        raise io_error(journal, error) from error
    return lengths[:count]


def _read_digest(folder: Path, places: _ChunkTable) -> str:
    """The digest of compressed chunks as the data files hold them, which may be fewer bytes than there should be."""
    state = xxhash.xxh3_128()
    for file, offset, nbytes in places.tolist():
        path = folder / _data_file_name(file)
        if not path.exists():
            break
        fd = open_no_follow(path, os.O_RDONLY)
        try:
            for start in range(0, nbytes, PIECE_NBYTES):
                state.update(os.pread(fd, min(PIECE_NBYTES, nbytes - start), offset + start))
        finally:
            os.close(fd)
    return state.hexdigest()


class _Mark(NamedTuple):
    """A line of the journal: chunks that became durable together, the digest of their bytes, and the line's length."""

    lengths: list[int]
    digest: str
    nbytes: int


def _read_marks(journal: Path) -> list[_Mark]:
    """The whole lines of a journal up to one that is not. PrepError where it cannot be read."""
    try:
        lines = read_no_follow(journal).split(b"\n")[:-1]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise io_error(journal, error) from error
    marks = list[_Mark]()
    for line in lines:
        if (mark := _parse_mark(line)) is None:
            break
        marks.append(mark)
    return marks


def _parse_mark(line: bytes) -> _Mark | None:
    content = unseal_line(line)
    match json.loads(content) if content else None:
        case {"lengths": list(lengths), "digest": str(digest)}:
            return _Mark(lengths, digest, len(line) + 1)
    return None


def _data_file_name(number: int) -> str:
    """A data file as OCDBT names them."""
    return f"d/{hashlib.md5(f'prep packed file {number}'.encode(), usedforsecurity=False).hexdigest()}"
