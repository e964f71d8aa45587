"""Units of outputs: notes that are damaged have no effect, and compressed objects are the chunks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import zstandard

from prepcli.algebra.grids import StridedChunks
from prepcli.engine.background_sync import StreamPrefix
from prepcli.engine.digest import CastCounts, StreamDigest
from prepcli.engine.object_assembler import Piece
from prepcli.execution.object_writer import ObjectCompressor
from prepcli.execution.output import UnitNote, decode_record, encode_record
from prepcli.planning.arrays import LeafBlocks, chunk_blocks
from prepcli.planning.chunk_placement import ChunkExtent
from prepcli.planning.item_storage import Compression
from prepcli.planning.plan import PlacedChunks
from prepcli.stores.byte_ranges import RemoteFile

NOTE = UnitNote(
    {7: StreamDigest("00ff", "00ff"), 9: StreamDigest("00", "ff", CastCounts(9, 8), "f0", 2)},
    np.array([1, 5], np.uint64),
    np.array([11, 55], np.uint64),
    "session",
    "host:1",
    "state of the source",
    (RemoteFile("d/1", 3, "etag:x"),),
    {2: [4, 9]},
)


@pytest.mark.parametrize("prefix", [None, StreamPrefix(8, 100, "abcd")])
def test_notes_are_decoded_as_they_were_encoded(prefix: StreamPrefix | None):
    note = replace(NOTE, prefix=prefix)
    decoded = UnitNote.decode(note.encode("run"), "run")
    assert decoded is not None
    assert (decoded.blocks.tolist(), decoded.sums.tolist()) == ([1, 5], [11, 55])
    known = {"blocks": note.blocks, "sums": note.sums}
    assert replace(decoded, **known) == replace(note, **known)


def test_notes_of_other_runs_count_as_none():
    assert UnitNote.decode(NOTE.encode("run"), "another run") is None
    assert UnitNote.decode(None, "run") is None


def test_torn_and_damaged_notes_count_as_none():
    data = NOTE.encode("run")
    for length in range(len(data)):
        assert UnitNote.decode(data[:length], "run") is None
    for position in range(0, len(data), 7):
        damaged = bytearray(data)
        damaged[position] ^= 1
        decoded = UnitNote.decode(bytes(damaged), "run")
        assert decoded is None or decoded.digests == NOTE.digests


@pytest.mark.parametrize("key", ["digests", "objects", "checksums", "lengths"])
@pytest.mark.parametrize("value", [None, 3, "x", [["x"]], {"x": 1}])
def test_notes_of_another_form_count_as_none(key: str, value: object):
    content = decode_record(NOTE.encode("run"))
    assert UnitNote.decode(encode_record({**content, key: value}), "run") is None


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b'{"a": 1}', json.dumps({"a": 1, "checksum": "x"}).encode()]
)
def test_damaged_records_are_refused(data: bytes):
    with pytest.raises(ValueError, match="not a file that prep wrote"):
        decode_record(data)


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
