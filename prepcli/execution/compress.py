"""Compression of an output's chunks, one after another, once all raw chunks are in its staging folder.

The length of a compressed chunk is unknown until it is compressed, so its location cannot be planned. The bytes depend
only on the raw bytes and the compression. A chunk is compressed in pieces, because it may be of any size. A line of the
journal holds the lengths of durable chunks and the digest of their bytes. A later run reads the bytes back before it
continues.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from prepcli.core.errors import RESUME_HINT, PrepError
from prepcli.core.formatting import count_text
from prepcli.core.observer import Progress
from prepcli.engine.background_sync import SYNC_INTERVAL_S
from prepcli.formats.codecs import codec_of
from prepcli.formats.orbax_chunks import WrittenChunk
from prepcli.planning.chunk_placement import FILE_NBYTES
from prepcli.planning.item_storage import Compression
from prepcli.stores.files import io_error
from prepcli.stores.output_files import open_no_follow, read_no_follow, sync_paths

PIECE_NBYTES = 1 << 20
# A mark is a line of the journal. One is written after this many raw bytes at the latest.
MARK_NBYTES = 256 << 20

# [chunks, 3]: file, offset, bytes. An object per chunk would need too much memory.
_ChunkTable = npt.NDArray[np.int64]


class _ByteRange(NamedTuple):
    file: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class _DataFiles:
    """Names of data files, and the size of a full file.

    Attributes:
        chunk_paths: Path of the file of each chunk, in the order of compression. None for files of many chunks.
    """

    chunk_paths: Sequence[str] | None

    @property
    def full_nbytes(self) -> int:
        """Least size of a full file. A file of one chunk is full after its first byte."""
        if self.chunk_paths is None:
            return FILE_NBYTES
        return 1

    def path(self, number: int) -> str:
        """Return the path of a data file, relative to the item."""
        if self.chunk_paths is not None:
            return self.chunk_paths[number]
        # OCDBT names a data file by 32 hexadecimal digits.
        name = hashlib.md5(f"prep packed file {number}".encode(), usedforsecurity=False)
        return f"d/{name.hexdigest()}"


@dataclass(frozen=True, slots=True, eq=False)
class CompressedChunks:
    """Locations of compressed chunks, in the order of the raw chunks.

    Attributes:
        places: [chunks, 3]: file number, offset and bytes of each chunk.
        files: Paths of the data files, relative to the item.
        sizes: Bytes of each data file.
    """

    places: _ChunkTable
    files: tuple[str, ...]
    sizes: tuple[int, ...]

    def relocate(self, raw: Iterable[WrittenChunk]) -> Iterator[WrittenChunk]:
        """Yield the raw chunks of the plan, in the same order, with their compressed locations."""
        for chunk, row in zip(raw, self.places, strict=True):
            file, offset, nbytes = map(int, row)
            yield replace(chunk, file=file, offset=offset, nbytes=nbytes)


def compress_chunks(
    chunks: Iterable[WrittenChunk],
    raw_files: Sequence[Path],
    *,
    folder: Path,
    journal: Path,
    compression: Compression,
    progress: Progress,
    chunk_paths: Sequence[str] | None = None,
) -> CompressedChunks:
    """Compress raw chunks into data files of an item, in the order of their locations.

    An interrupted run continues from its durable chunks.

    Args:
        chunks: The raw chunks.
        raw_files: Paths of the raw data files, by file number.
        folder: Folder of the item.
        journal: Path of the journal of durable chunks.
        compression: Codec and level.
        progress: Receives the number of compressed raw bytes.
        chunk_paths: Path of the file of each chunk, in the order of `chunks`. None to write chunks one after another
            into files in `d/`.

    Returns:
        The compressed locations.

    Raises:
        PrepError: The system refused to read or write.
    """
    # `table` has one row [file, offset, bytes] per raw chunk. The rows are compressed in the order of the
    # raw files, which is the fastest to read, and `places[order]` puts the results back in the order of
    # `chunks`: order [2, 0, 1] means that the first compressed chunk is chunk 2.
    table = _chunk_table(chunks)
    order = _storage_order(table)
    data_files = _DataFiles(None)
    if chunk_paths is not None:
        data_files = _DataFiles([chunk_paths[number] for number in map(int, order)])
    compressor = _Compressor(table[order], raw_files, folder, journal, compression, data_files)
    durable_chunks = compressor.chunks[: len(compressor.lengths)]
    progress.begin("compress", int(table[:, 2].sum()), int(durable_chunks[:, 2].sum()))
    try:
        compressor.run(progress)
    finally:
        progress.end()
        compressor.close()
    places = np.empty_like(table)
    places[order] = _chunk_places(compressor.lengths, data_files)
    sizes = np.bincount(places[:, 0], places[:, 2]).astype(np.int64).tolist()
    names = tuple(map(data_files.path, range(len(sizes))))
    return CompressedChunks(places, names, tuple(sizes))


def locate_chunks(
    chunks: Iterable[WrittenChunk], lengths: Mapping[int, Sequence[int]], paths: Sequence[str]
) -> CompressedChunks:
    """Return the locations of chunks, compressed file by file without gaps.

    Args:
        chunks: The raw chunks.
        lengths: Compressed lengths of the chunks in each file, in the order of their raw offsets, by file number.
        paths: Path of each file, relative to the item.
    """
    table = _chunk_table(chunks)
    order = _storage_order(table)
    places = np.empty_like(table)
    sizes: list[int] = []
    row = 0
    for file in range(len(paths)):
        offset = 0
        for nbytes in lengths.get(file, ()):
            places[order[row]] = file, offset, nbytes
            offset += nbytes
            row += 1
        sizes.append(offset)
    assert row == len(table)  # each complete unit has noted the lengths of all its chunks
    return CompressedChunks(places, tuple(paths), tuple(sizes))


def nbytes_to_compress(chunks: Iterable[WrittenChunk], journal: Path) -> int:
    """Return the number of raw bytes still to compress. Raise PrepError if the journal cannot be read."""
    table = _chunk_table(chunks)
    num_durable = sum(len(mark.lengths) for mark in _read_marks(journal))
    pending = table[_storage_order(table)][num_durable:]
    return int(pending[:, 2].sum())


def _chunk_table(chunks: Iterable[WrittenChunk]) -> _ChunkTable:
    rows = ((chunk.file, chunk.offset, chunk.nbytes) for chunk in chunks)
    return np.fromiter(itertools.chain.from_iterable(rows), np.int64).reshape(-1, 3)


def _storage_order(table: _ChunkTable) -> npt.NDArray[np.intp]:
    """Return the row numbers in the order of file and offset."""
    return np.lexsort((table[:, 1], table[:, 0]))


class _Compressor:
    """A run of the compression of chunks into data files, with its journal."""

    def __init__(
        self,
        chunks: _ChunkTable,
        raw: Sequence[Path],
        folder: Path,
        journal: Path,
        compression: Compression,
        data_files: _DataFiles,
    ) -> None:
        self.chunks = chunks
        self.raw_files = raw
        self.folder = folder
        self.journal = journal
        self.compression = compression
        self.data_files = data_files
        self.lengths = _durable_lengths(journal, folder, len(chunks), data_files)
        # The digest of the bytes compressed since the last mark.
        self.digest = xxhash.xxh3_128()
        # Full data files with chunks since the last mark. They are synced together: files of one chunk are many.
        self.full_paths: list[Path] = []
        # The descriptor of the data file being written.
        self.out_fd = -1
        # The number and the descriptor of the raw file being read.
        self.source = (-1, -1)

    def run(self, progress: Progress) -> None:
        """Compress the remaining chunks."""
        marked = len(self.lengths)
        unmarked_nbytes = 0
        since_s = time.monotonic()
        file = 0
        offset = 0
        if marked:
            last = _ByteRange(*map(int, _chunk_places(self.lengths, self.data_files)[-1]))
            file = last.file
            offset = last.offset + last.nbytes
        self._open_data_file(file, offset)
        # Chunks follow each other without gaps, so that lengths alone give all locations.
        for row in self.chunks[marked:]:
            chunk = _ByteRange(*map(int, row))
            if offset >= self.data_files.full_nbytes:
                self.full_paths.append(self.folder / self.data_files.path(file))
                file += 1
                offset = 0
                self._open_data_file(file, offset)
            self.lengths.append(self._compress_chunk(chunk, progress))
            offset += self.lengths[-1]
            unmarked_nbytes += chunk.nbytes
            is_due = time.monotonic() - since_s >= SYNC_INTERVAL_S
            if is_due or unmarked_nbytes >= MARK_NBYTES:
                marked = self._record_progress(marked)
                unmarked_nbytes = 0
                since_s = time.monotonic()
        self._record_progress(marked)

    def _open_data_file(self, file: int, nbytes: int) -> None:
        """Open a data file for appending after its first `nbytes` bytes."""
        path = self.folder / self.data_files.path(file)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            previous_fd = self.out_fd
            self.out_fd = open_no_follow(path, os.O_WRONLY | os.O_CREAT)
            if previous_fd >= 0:
                os.close(previous_fd)
            os.ftruncate(self.out_fd, nbytes)
            os.lseek(self.out_fd, nbytes, os.SEEK_SET)
        except OSError as error:
            raise io_error(path, error) from error

    def _compress_chunk(self, chunk: _ByteRange, progress: Progress) -> int:
        codec = codec_of(self.compression)
        stream = codec.open_encoder(self.compression.level, chunk.nbytes)
        length = 0
        for piece in self._chunk_pieces(chunk):
            length += self._write_to_data_file(stream.compress(piece))
            progress.advance(len(piece))
        return length + self._write_to_data_file(stream.flush())

    def _chunk_pieces(self, chunk: _ByteRange) -> Iterator[bytes]:
        path = self.raw_files[chunk.file]
        try:
            if self.source[0] != chunk.file:
                self._close_raw_file()
                self.source = chunk.file, open_no_follow(path, os.O_RDONLY)
            for start in range(0, chunk.nbytes, PIECE_NBYTES):
                count = min(PIECE_NBYTES, chunk.nbytes - start)
                piece = os.pread(self.source[1], count, chunk.offset + start)
                if len(piece) < count:
                    raise PrepError(
                        f"{path.name} is cut short",
                        f"{count_text(count - len(piece), 'byte is', 'bytes are')} missing",
                        RESUME_HINT,
                    )
                yield piece
            os.posix_fadvise(self.source[1], chunk.offset, chunk.nbytes, os.POSIX_FADV_DONTNEED)
        except OSError as error:
            raise io_error(path, error) from error

    def _write_to_data_file(self, data: bytes) -> int:
        view = memoryview(data)
        self.digest.update(data)
        try:
            while view:
                view = view[os.write(self.out_fd, view) :]
        except OSError as error:
            raise io_error(self.folder, error) from error
        return len(data)

    def _record_progress(self, marked: int) -> int:
        """Sync the data files and record the chunks since the last mark. Return the number of durable chunks."""
        # The chunks are durable before the line that lists them. A kill between the two leaves bytes
        # after the last listed chunk, which `_open_data_file` truncates.
        try:
            sync_paths(self.full_paths)
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
        self.full_paths.clear()
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


def _chunk_places(lengths: Sequence[int], data_files: _DataFiles) -> _ChunkTable:
    """Return [chunks, 3] file, offset and bytes. A new file begins once the last one is full."""
    places = np.empty((len(lengths), 3), np.int64)
    file = 0
    offset = 0
    for position, nbytes in enumerate(lengths):
        if offset >= data_files.full_nbytes:
            file += 1
            offset = 0
        places[position] = file, offset, nbytes
        offset += nbytes
    return places


def _durable_lengths(
    journal: Path, folder: Path, max_chunks: int, data_files: _DataFiles
) -> list[int]:
    """Return the lengths of the intact chunks in the data files. Truncate the journal after them."""
    # A mark is trusted only if the bytes on disk have its digest. The first one that differs ends the
    # durable part, as the chunks after it begin where its chunks end.
    marks = _read_marks(journal)
    lengths: list[int] = []
    for mark in marks:
        lengths += mark.lengths
    places = _chunk_places(lengths, data_files)
    count = 0
    nbytes = 0
    try:
        for mark in marks:
            stop = count + len(mark.lengths)
            if stop > max_chunks:
                break
            if _compute_digest(folder, places[count:stop], data_files) != mark.digest:
                break
            count = stop
            nbytes += mark.nbytes
        if journal.exists():
            os.truncate(journal, nbytes)
    except OSError as error:
        raise io_error(journal, error) from error
    return lengths[:count]


def _compute_digest(folder: Path, places: _ChunkTable, data_files: _DataFiles) -> str:
    """Return the digest of compressed chunks in the data files. Recorded bytes may be missing there."""
    state = xxhash.xxh3_128()
    for file, offset, nbytes in places.tolist():
        path = folder / data_files.path(file)
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
    """A line of the journal: lengths of chunks made durable together, their digest, and the line's length."""

    lengths: list[int]
    digest: str
    nbytes: int


def _read_marks(journal: Path) -> list[_Mark]:
    """Return the lines of a journal up to the first damaged one. Raise PrepError if it cannot be read."""
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


def seal_line(content: bytes) -> bytes:
    """Return a journal line: checksum, content and a line break. The content must not contain line breaks."""
    return xxhash.xxh3_64_hexdigest(content).encode() + b" " + content + b"\n"


def unseal_line(line: bytes) -> bytes | None:
    """Return the content of a journal line without its line break, or None if the checksum does not match."""
    checksum, _, content = line.partition(b" ")
    if checksum != xxhash.xxh3_64_hexdigest(content).encode():
        return None
    return content
