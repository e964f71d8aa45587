"""Compression of objects in memory, judged by zstandard."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import zstandard

from prepcli.algebra.grids import StridedChunks
from prepcli.engine.object_assembler import Piece
from prepcli.execution.object_writer import ObjectCompressor
from prepcli.formats.codecs import WRITTEN_CODECS, Encoder, Zstd
from prepcli.planning.arrays import LeafBlocks, chunk_blocks
from prepcli.planning.chunk_placement import ChunkExtent
from prepcli.planning.item_storage import Compression
from prepcli.planning.plan import PlacedChunks


def random_bytes(nbytes: int) -> np.ndarray:
    """Return bytes that cannot be compressed."""
    return np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8)


def decompress_chunks(data: bytes, lengths: Sequence[int]) -> list[bytes]:
    """Decompress consecutive chunks, given their compressed lengths."""
    assert sum(lengths) == len(data)
    chunks: list[bytes] = []
    start = 0
    for length in lengths:
        chunks.append(zstandard.ZstdDecompressor().decompress(data[start : start + length]))
        start += length
    return chunks


def uniform_extent(num_chunks: int, chunk_nbytes: int) -> ChunkExtent:
    """Return the extent of consecutive chunks of an object."""
    placed = PlacedChunks((0,), (num_chunks,), StridedChunks(0, 0, (0,), (chunk_nbytes,)))
    blocks = LeafBlocks(0, (num_chunks,), chunk_blocks((chunk_nbytes,), "uint8"))
    return ChunkExtent(0, 0, chunk_nbytes, placed, blocks)


@pytest.mark.parametrize("level", [1, 9])
@pytest.mark.parametrize(("num_chunks", "chunk_nbytes"), [(3, 1 << 20), (7, 300_001), (512, 1)])
def test_compressed_pieces_are_the_chunks(num_chunks: int, chunk_nbytes: int, level: int):
    """The last chunks have bytes that can be compressed, and pieces end within chunks."""
    raw = random_bytes(num_chunks * chunk_nbytes)
    raw[raw.size // 2 :] = 0
    extent = uniform_extent(num_chunks, chunk_nbytes)
    outputs: list[bytes] = []
    for piece_nbytes in (777_777, 1 << 22):
        compressor = ObjectCompressor({0: [extent]}, Compression("zstd", level), 1)
        data = b""
        for number, start in enumerate(range(0, max(1, raw.size), piece_nbytes)):
            piece = Piece(0, number, start, raw[start : start + piece_nbytes], 0)
            data += compressor.compress(piece).tobytes()
        chunks = decompress_chunks(data, compressor.lengths(0))
        assert len(chunks) == num_chunks
        assert b"".join(chunks) == raw.tobytes()
        outputs.append(data)
    assert outputs[0] == outputs[1]


class WholeChunkEncoder:
    """An encoder that returns the bytes of a chunk at its end."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []

    def compress(self, data: Any, /) -> bytes:
        self._pieces.append(bytes(data))
        return b""

    def flush(self) -> bytes:
        return zstandard.compress(b"".join(self._pieces))


class WholeChunkCodec(Zstd):
    """A codec whose maximum size has no room for bytes of earlier pieces."""

    @classmethod
    def open_encoder(cls, level: int, nbytes: int) -> Encoder:
        return WholeChunkEncoder()

    @classmethod
    def max_encoded_nbytes(cls, nbytes: int, num_chunks: int) -> int:
        return nbytes + nbytes // 256 + 64 * num_chunks


def test_encoder_may_return_a_chunk_at_its_end(monkeypatch: pytest.MonkeyPatch):
    """The last piece of a chunk has the bytes of all pieces, also if it begins another chunk."""
    monkeypatch.setitem(WRITTEN_CODECS, "zstd", WholeChunkCodec)
    raw = random_bytes(3 * 300_000)
    compressor = ObjectCompressor(
        {0: [uniform_extent(3, 300_000)]}, Compression("zstd", 1), num_threads=1
    )
    data = b""
    for number, start in enumerate(range(0, raw.size, 70_000)):
        piece = Piece(0, number, start, raw[start : start + 70_000], 0)
        data += compressor.compress(piece).tobytes()
    assert b"".join(decompress_chunks(data, compressor.lengths(0))) == raw.tobytes()
