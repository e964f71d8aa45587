"""Compress the chunks of objects in memory, piece by piece.

The length of a compressed chunk is known only afterwards. The notes of the units record the lengths, and the last
process computes the places of all chunks from them. The bytes depend only on the raw chunk and the compression, not on
the sizes of pieces.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from prepcli.engine.object_assembler import Piece
from prepcli.formats.codecs import Encoder, codec_of
from prepcli.formats.orbax_chunks import WrittenChunk
from prepcli.planning.chunk_placement import ChunkExtent
from prepcli.planning.item_storage import Compression
from prepcli.stores.buffers import ByteArray, allocate_buffer

# An encoder gets so many bytes at a time.
SLICE_NBYTES = 1 << 20
MAX_THREADS = 8
# Encoders may use this part of the memory.
CONTEXT_SHARE = 16

# [chunks, 3]: file, offset, bytes. An object per chunk would need too much memory.
_ChunkTable = npt.NDArray[np.int64]


@dataclass(slots=True)
class _ObjectState:
    """The chunks of an object, and its progress.

    Attributes:
        chunks: Offset and size of each raw chunk, ascending.
        lengths: Compressed lengths of the first chunks.
        stream: Compressor of the current chunk, if its first bytes are compressed.
        length: Compressed bytes of the current chunk so far.
    """

    chunks: Sequence[tuple[int, int]]
    lengths: list[int] = field(default_factory=list[int])
    stream: Encoder | None = None
    length: int = 0


class _Buffer:
    """Compressed bytes of a piece.

    It takes no memory for unused bytes, and returns its memory at once. Freed bytearrays of several threads stayed in
    the process: up to 40 MiB at a limit of 128 MiB.
    """

    def __init__(self, max_nbytes: int) -> None:
        self._memory = allocate_buffer(max_nbytes)
        self._nbytes = 0

    @property
    def content(self) -> ByteArray:
        """The bytes so far."""
        return self._memory[: self._nbytes]

    def append(self, data: bytes) -> None:
        """Append bytes."""
        stop = self._nbytes + len(data)
        self._memory[self._nbytes : stop] = np.frombuffer(data, np.uint8)
        self._nbytes = stop


class ObjectCompressor:
    """Compresses pieces of objects in several threads. The pieces of one object come in order, one at a time."""

    def __init__(
        self,
        extents: Mapping[int, Sequence[ChunkExtent]],
        compression: Compression,
        num_threads: int,
    ) -> None:
        """Begin with no piece.

        Args:
            extents: Extents of each object, by file number, sorted by offset.
            compression: Codec and level.
            num_threads: Number of concurrent compressions.
        """
        self._codec = codec_of(compression)
        self._level = compression.level
        self._extents = extents
        self._states: dict[int, _ObjectState] = {}
        self._slots = threading.Semaphore(num_threads)

    def compress(self, piece: Piece) -> ByteArray:
        """Return the compressed bytes of a piece. They may be empty before the last piece of an object."""
        state = self._state(piece.file)
        num_chunks = len(state.chunks) - len(state.lengths)
        compressed = _Buffer(self._codec.max_encoded_nbytes(piece.data.size, num_chunks))
        with self._slots:
            while len(state.lengths) < len(state.chunks):
                offset, nbytes = state.chunks[len(state.lengths)]
                first = max(offset, piece.start)
                stop = min(offset + nbytes, piece.start + piece.data.size)
                if first >= stop:
                    # The chunk begins in a later piece.
                    break
                self._compress_run(
                    state, piece.data[first - piece.start : stop - piece.start], compressed
                )
                if stop < offset + nbytes:
                    # The next piece continues the chunk.
                    break
                self._end_chunk(state, compressed)
        return compressed.content

    def lengths(self, file: int) -> list[int]:
        """Return the compressed lengths of the chunks of a complete object, in the order of their offsets."""
        return self._state(file).lengths

    def _state(self, file: int) -> _ObjectState:
        if file not in self._states:
            self._states[file] = _ObjectState(sorted(_chunk_ranges(self._extents.get(file, ()))))
        return self._states[file]

    def _compress_run(self, state: _ObjectState, run: ByteArray, compressed: _Buffer) -> None:
        if state.stream is None:
            _, nbytes = state.chunks[len(state.lengths)]
            state.stream = self._codec.open_encoder(self._level, nbytes)
        for start in range(0, run.size, SLICE_NBYTES):
            data = state.stream.compress(run[start : start + SLICE_NBYTES].data)
            compressed.append(data)
            state.length += len(data)

    def _end_chunk(self, state: _ObjectState, compressed: _Buffer) -> None:
        assert state.stream is not None
        data = state.stream.flush()
        compressed.append(data)
        state.lengths.append(state.length + len(data))
        state.stream = None
        state.length = 0


def _chunk_ranges(extents: Sequence[ChunkExtent]) -> Iterator[tuple[int, int]]:
    """Yield the offset and the size of each chunk."""
    for extent in extents:
        for position in range(extent.chunk_count):
            offset = extent.offset + position * extent.stride_nbytes
            yield offset, extent.blocks.per_chunk.chunk_nbytes


def compression_threads(encoder_nbytes: int, memory_nbytes: int) -> int:
    """Return the number of threads for the compression within a memory limit."""
    return max(1, min(MAX_THREADS, memory_nbytes // CONTEXT_SHARE // encoder_nbytes))


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


def locate_chunks(
    chunks: Iterable[WrittenChunk],
    lengths: Mapping[int, Sequence[int]],
    paths: Sequence[str],
    chunk_paths: Sequence[str] | None = None,
) -> CompressedChunks:
    """Return the locations of chunks, compressed file by file without gaps.

    Args:
        chunks: The raw chunks.
        lengths: Compressed lengths of the chunks in each raw file, in the order of their offsets, by file number.
        paths: Path of the compressed chunks of each raw file, relative to the item.
        chunk_paths: Path of each chunk in a file of its own, in the order of `chunks`, instead of `paths`.
    """
    # `table` has one row [file, offset, bytes] per raw chunk. `places[order]` puts lengths in the order of the raw
    # files back in the order of `chunks`: order [2, 0, 1] means that the first compressed chunk is chunk 2.
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
    if chunk_paths is None:
        return CompressedChunks(places, tuple(paths), tuple(sizes))
    places[order, 0] = np.arange(row)
    places[:, 1] = 0
    names = [chunk_paths[number] for number in map(int, order)]
    return CompressedChunks(places, tuple(names), tuple(map(int, places[order, 2])))


def _chunk_table(chunks: Iterable[WrittenChunk]) -> _ChunkTable:
    rows = ((chunk.file, chunk.offset, chunk.nbytes) for chunk in chunks)
    return np.fromiter(itertools.chain.from_iterable(rows), np.int64).reshape(-1, 3)


def _storage_order(table: _ChunkTable) -> npt.NDArray[np.intp]:
    """Return the row numbers in the order of file and offset."""
    return np.lexsort((table[:, 1], table[:, 0]))
