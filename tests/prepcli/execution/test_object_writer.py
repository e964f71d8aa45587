"""Compression of objects in memory, judged by zstandard."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import zstandard

from prepcli.algebra.grids import StridedChunks
from prepcli.engine.object_assembler import Piece
from prepcli.execution.object_writer import ObjectCompressor
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


@pytest.mark.parametrize("level", [1, 9])
@pytest.mark.parametrize(("num_chunks", "chunk_nbytes"), [(3, 1 << 20), (7, 300_001), (512, 1)])
def test_compressed_pieces_are_the_chunks(num_chunks: int, chunk_nbytes: int, level: int):
    """The last chunks have bytes that can be compressed, and pieces end within chunks."""
    raw = random_bytes(num_chunks * chunk_nbytes)
    raw[raw.size // 2 :] = 0
    placed = PlacedChunks((0,), (num_chunks,), StridedChunks(0, 0, (0,), (chunk_nbytes,)))
    blocks = LeafBlocks(0, (num_chunks,), chunk_blocks((chunk_nbytes,), "uint8"))
    extent = ChunkExtent(0, 0, chunk_nbytes, placed, blocks)
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
