"""Compress the chunks of objects in memory, piece by piece.

The length of a compressed chunk is known only afterwards. The notes of the units record the lengths, and the last
process computes the places of all chunks from them. The bytes depend only on the raw chunk and the level, not on the
sizes of pieces.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from prepcli.engine.files import ByteArray, allocate_buffer
from prepcli.engine.object_assembler import Piece
from prepcli.planning.chunk_extents import ChunkExtent

# zstd gets so many bytes at a time.
SLICE_NBYTES = 1 << 20
MAX_THREADS = 8
# Contexts of zstd may use this part of the memory.
CONTEXT_SHARE = 16


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
    stream: Any = None
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
        self, extents: Mapping[int, Sequence[ChunkExtent]], level: int, num_threads: int
    ) -> None:
        """Begin with no piece.

        Args:
            extents: Extents of each object, by file number, sorted by offset.
            level: Compression level of zstd.
            num_threads: Number of concurrent compressions.
        """
        self._level = level
        self._states: dict[int, _ObjectState] = {}
        for file, file_extents in extents.items():
            self._states[file] = _ObjectState(sorted(_chunk_ranges(file_extents)))
        self._slots = threading.Semaphore(num_threads)

    def compress(self, piece: Piece) -> ByteArray:
        """Return the compressed bytes of a piece. They may be empty before the last piece of an object."""
        state = self._states[piece.file]
        num_chunks = len(state.chunks) - len(state.lengths)
        compressed = _Buffer(_max_compressed_nbytes(piece.data.size, num_chunks))
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
        return self._states[file].lengths

    def _compress_run(self, state: _ObjectState, run: ByteArray, compressed: _Buffer) -> None:
        # Imported late: most outputs are not compressed.
        import zstandard

        if state.stream is None:
            _, nbytes = state.chunks[len(state.lengths)]
            # A compressor has one context, so that each open chunk needs its own.
            compressor = zstandard.ZstdCompressor(level=self._level)
            state.stream = compressor.compressobj(size=nbytes)
        for start in range(0, run.size, SLICE_NBYTES):
            data = state.stream.compress(run[start : start + SLICE_NBYTES].data)
            compressed.append(data)
            state.length += len(data)

    def _end_chunk(self, state: _ObjectState, compressed: _Buffer) -> None:
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


def _max_compressed_nbytes(nbytes: int, num_chunks: int) -> int:
    """Return the size of a buffer for a compressed piece, also if its bytes cannot be compressed."""
    # zstd adds 3 bytes to a block of at least 1 KiB, at most 18 to a chunk, and keeps up to a block of 128 KiB of the
    # piece before. 1 MiB has room for that block.
    return nbytes + nbytes // 256 + 64 * num_chunks + (1 << 20)


def compression_threads(level: int, memory_nbytes: int) -> int:
    """Return the number of threads for the compression within a memory limit."""
    num_contexts = memory_nbytes // CONTEXT_SHARE // context_nbytes(level)
    return max(1, min(MAX_THREADS, num_contexts))


def context_nbytes(level: int) -> int:
    """Return the memory of a compressor, e.g. 1.1 MB for level 1 and 94 MB for level 19."""
    import zstandard

    parameters = zstandard.ZstdCompressionParameters.from_level(level)
    # A stream also keeps a window of earlier input: 86.8 MiB were measured for level 19, and 14.4 MiB for level 9.
    return parameters.estimated_compression_context_size() + (1 << parameters.window_log)
