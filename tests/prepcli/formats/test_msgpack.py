"""Tests of reading Flax msgpack and EasyLM streams, compared with msgpack, and with malicious files."""

from __future__ import annotations

import random
import tracemalloc
from dataclasses import replace
from pathlib import Path

import msgpack
import numpy as np
import pytest

from prepcli.algebra.boxes import full_box
from prepcli.core.errors import PrepError
from prepcli.engine.fills import numpy_dtype
from prepcli.formats.model_files import FileHeader
from prepcli.formats.msgpack import (
    CHUNKED_MARKER,
    MAX_DEPTH,
    MsgpackKind,
    MsgpackNonArray,
    read_msgpack_header,
    sniff_msgpack_kind,
)
from prepcli.planning.arrays import Array, whole_array
from tests.helpers.golden_flax import FILES, FOLDER, decode_msgpack
from tests.helpers.slow_cases import slow_except
from tests.helpers.stored_arrays import read_tensor

F32 = msgpack.ExtType(1, msgpack.packb(([2, 3], "float32", bytes(24))))
PIECE = msgpack.ExtType(1, msgpack.packb(([3], "float32", bytes(12))))


def read(path: Path, data: bytes, kind: MsgpackKind = "flax") -> FileHeader:
    path.write_bytes(data)
    return read_msgpack_header(path, kind)


def refusal(path: Path, data: bytes, kind: MsgpackKind = "flax") -> str:
    with pytest.raises(PrepError) as caught:
        read(path, data, kind)
    return caught.value.why


def payload(array: Array, data: bytes) -> bytes:
    values = np.zeros(array.shape, numpy_dtype(array.dtype))
    return read_tensor(array, values, [data]).tobytes()


@pytest.mark.parametrize(("name", "kind"), FILES.items())
def test_read_msgpack_header_matches_msgpack_library(name: str, kind: MsgpackKind):
    data = (FOLDER / name).read_bytes()
    header, expected = read_msgpack_header(FOLDER / name, kind), decode_msgpack(data, kind)
    arrays = {path: value for path, value in expected.items() if isinstance(value, np.ndarray)}
    assert {a.path: (a.shape, a.dtype, payload(a, data)) for a in header.tensors} == {
        path: (value.shape, value.dtype.name, value.tobytes()) for path, value in arrays.items()
    }
    assert {
        leaf.path: leaf.value for leaf in header.others if isinstance(leaf, MsgpackNonArray)
    } == {p: v for p, v in expected.items() if p not in arrays}
    assert sniff_msgpack_kind(FOLDER / name) == kind


def test_read_msgpack_header_splits_chunked_array_into_runs():
    header = read_msgpack_header(FOLDER / "llama/pieces.msgpack", "flax")
    copies = [list(array.copies(full_box(array.shape))) for array in header.tensors]
    assert max(map(len, copies)) > 5
    assert max(copy.nbytes for array_copies in copies for copy in array_copies) <= 600


def test_read_msgpack_header_lists_non_arrays(tmp_path: Path):
    tree = {
        "a": -5,
        "b": 2**40,
        "c": None,
        "d": 1.5,
        "e": True,
        "f": "text",
        "g": [1, F32],
        "h": msgpack.ExtType(2, b"12"),
    }
    header = read(tmp_path / "x", msgpack.packb(tree) or b"")
    assert [array.path for array in header.tensors] == [("g", "1")]
    assert [str(leaf) for leaf in header.others] == [
        "a is -5", "b is 1099511627776", "c is None", "d is 1.5", "e is True", "f is 4 bytes that are not an array",
        "g.0 is 1", "h is 2 bytes that are not an array",
    ]  # fmt: skip


def test_read_msgpack_header_skips_payloads(tmp_path: Path):
    path = tmp_path / "sparse"
    nbytes = 1 << 31
    inner = bytes.fromhex("9391ce20000000a7") + b"float32" + b"\xc6" + nbytes.to_bytes(4, "big")
    header_bytes = b"\x81\xa1w\xc9" + (len(inner) + nbytes).to_bytes(4, "big") + b"\x01" + inner
    with path.open("wb") as file:
        file.write(header_bytes)
        file.truncate(len(header_bytes) + nbytes)
    tracemalloc.start()
    header = read_msgpack_header(path, "flax")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert header.tensors == (
        replace(whole_array("w", "float32", (1 << 29,), (0, len(header_bytes))), path=("w",)),
    )
    assert peak < 1 << 20


def deep(levels: int) -> bytes:
    return b"\x81\xa1a" * levels + b"\x01"


INVALID_FLAX_FILES = {
    "nothing": (b"", "it is cut short: it ends at byte 0"),
    "no code of msgpack": (b"\x81\xa1a\xc1", "is 0xc1, which msgpack does not define"),
    "more than one value": (b"\x80\x80", "1 byte follows its end at byte 1"),
    "a number as a key": (b"\x81\x01\x01", "a key before byte 2 is not text"),
    "a key that is no text": (b"\x81\xa1\xff\x01", "is not UTF-8"),
    "a long key": (b"\x81\xda\xff\xff", "has 65,535 bytes, the limit is 1,024"),
    "a key twice": (b"\x82\xa1a\x01\xa1a\x01", "it has `a` twice"),
    "a huge map": (b"\xdf\xff\xff\xff\xff\xa1a\x01", "it is cut short"),
    "a huge array": (b"\xdd\xff\xff\xff\xff", "it is cut short"),
    "nested too deeply": (deep(MAX_DEPTH + 1), f"nested more than {MAX_DEPTH} deep"),
    "deep arrays": (b"\x91" * 100_000, f"nested more than {MAX_DEPTH} deep"),
    "too many entries": (
        b"\xdd\x00\x10\x00\x00" + b"\x01" * (1 << 20),
        "more than 131,072 entries",
    ),
    "bytes beyond the end": (b"\x81\xa1a\xc6\xff\xff\xff\xff", "4,294,967,295 bytes are missing"),
    "an extension beyond the end": (b"\x81\xa1a\xc9\xff\xff\xff\xff\x05", "are missing"),
    "no array in an array": (b"\x81\xa1a\xc7\x01\x01\x01", "`a` is not an array of Flax"),
    "a shape that is a number": (
        b"\x81\xa1a\xc7\x09\x01\x93\x01\xa4bool\xc4\x00",
        "`a` has no valid shape",
    ),
    "a negative extent": (
        b"\x81\xa1a\xc7\x0a\x01\x93\x91\xff\xa4bool\xc4\x00",
        "`a` has no valid shape",
    ),
    "many dims": (b"\x81\xa1a\xc7\x09\x01\x93\xdd\xff\xff\xff\xff", "`a` has no valid shape"),
    "an unknown dtype": (
        b"\x81\xa1a\xc7\x0a\x01\x93\x91\x00\xa4int2\xc4\x00",
        "`int2`, a dtype that is not supported",
    ),
    "another size": (
        b"\x81\xa1a\xc7\x0b\x01\x93\x91\x02\xa4bool\xc4\x01\x00",
        "takes 2 bytes, its payload has another size",
    ),
    "payload beyond its array": (
        b"\x81\xa1a\xc7\x0a\x01\x93\x91\x02\xa4bool\xc4\x02\x00\x00",
        "takes 2 bytes, its payload",
    ),
}


@pytest.mark.parametrize("name", INVALID_FLAX_FILES)
def test_read_msgpack_header_rejects_invalid_flax_file(tmp_path: Path, name: str):
    data, why = INVALID_FLAX_FILES[name]
    assert why in refusal(tmp_path / "x", data)


@pytest.mark.parametrize(
    "tree",
    [
        {CHUNKED_MARKER: True},
        {CHUNKED_MARKER: True, "shape": {"0": 3}, "chunks": {}},
        {CHUNKED_MARKER: True, "shape": {"0": 3}, "chunks": {"1": PIECE}},
        {CHUNKED_MARKER: True, "shape": {"0": 4}, "chunks": {"0": PIECE}},
        {CHUNKED_MARKER: True, "shape": {"0": -3}, "chunks": {"0": PIECE}},
        {CHUNKED_MARKER: True, "shape": {"0": "3"}, "chunks": {"0": PIECE}},
        {CHUNKED_MARKER: True, "shape": {"1": 3}, "chunks": {"0": PIECE}},
        {CHUNKED_MARKER: True, "shape": {"0": 6}, "chunks": {"0": F32}},
        {CHUNKED_MARKER: True, "shape": {"0": 3}, "chunks": {"0": PIECE}, "more": 1},
        {CHUNKED_MARKER: True, "shape": {"0": 3}, "chunks": {"0": PIECE}, "more": PIECE},
        {
            CHUNKED_MARKER: True,
            "shape": {str(i): 1 for i in range(70)} | {"0": 3},
            "chunks": {"0": PIECE},
        },
    ],
)
def test_read_msgpack_header_rejects_invalid_pieces(tmp_path: Path, tree: object):
    assert "do not form an array" in refusal(tmp_path / "x", msgpack.packb({"w": tree}) or b"")


def record(key: object, value: bytes) -> bytes:
    return msgpack.packb((key, value)) or b""


VALUE = msgpack.packb(F32) or b""
INVALID_STREAMS = {
    "no record": (b"\x93\x01", "byte 0 does not start a record"),
    "a key that is no list": (record("a", VALUE), "byte 0 does not start a record"),
    "a value that is no bytes": (msgpack.packb((["a"], 1)), "the record `a` has no bytes"),
    "a record twice": (record(["a"], VALUE) * 2, "it has `a` twice"),
    "a cut record": (record(["a"], VALUE)[:-1], "it is cut short: the record `a`"),
    "bytes after the value": (record(["a"], VALUE + b"\x01"), "its value at"),
    "garbage at the end": (record(["a"], VALUE) + b"\x00" * 9, "does not start a record"),
    "a value that reaches into the next": (
        record(["a"], VALUE[:-1]) + record(["b"], VALUE),
        "its value at",
    ),
    "a long path": (b"\x92\xdd\x00\x00\x01\x00", "does not start a record"),
}


@pytest.mark.parametrize("name", INVALID_STREAMS)
def test_read_msgpack_header_rejects_invalid_stream(tmp_path: Path, name: str):
    data, why = INVALID_STREAMS[name]
    assert why in refusal(tmp_path / "x", data or b"", "easylm")


def test_stream_path_numbers_become_text(tmp_path: Path):
    assert read(tmp_path / "x", record(["h", 3], VALUE), "easylm").tensors[0].path == ("h", "3")


def test_empty_stream_has_no_arrays(tmp_path: Path):
    assert read(tmp_path / "x", b"", "easylm").tensors == ()


@pytest.mark.parametrize(
    "data", [b"", b"\x80\x02}q", b"GGUF", b"PK\x03\x04", b"{}", b"\x92", b"\x92\x01", b"\x90"]
)
def test_sniff_msgpack_kind_rejects_other_files(tmp_path: Path, data: bytes):
    path = tmp_path / "x"
    path.write_bytes(data)
    assert sniff_msgpack_kind(path) is None


def test_read_msgpack_header_rejects_missing_file_and_folder(tmp_path: Path):
    assert sniff_msgpack_kind(tmp_path) is None
    assert sniff_msgpack_kind(tmp_path / "gone") is None
    with pytest.raises(PrepError, match="cannot read"):
        read_msgpack_header(tmp_path / "gone", "flax")
    with pytest.raises(PrepError, match="is not a file"):
        read_msgpack_header(tmp_path, "flax")


# Any bytes


def mutated(data: bytes, other_data: bytes, rng: random.Random) -> bytes:
    """Cut, insert, splice with another file, enlarge counts, delete, or flip bits."""
    position = (
        rng.randrange(min(len(data), 4000)) if rng.random() < 0.8 else rng.randrange(len(data))
    )
    kind = rng.randrange(6)
    if kind == 0:
        return data[:position]
    if kind == 1:
        return data[:position] + rng.randbytes(rng.randrange(1, 9)) + data[position:]
    if kind == 2:
        return data[:position] + other_data[rng.randrange(len(other_data)) :]
    if kind == 3:
        return (
            data[:position]
            + bytes([rng.choice(b"\xc4\xc6\xc7\xc9\xd9\xdb\xdc\xdd\xde\xdf")])
            + b"\xff" * 4
            + data[position + 5 :]
        )
    if kind == 4:
        return data[:position] + data[position + rng.randrange(1, 40) :]
    return data[:position] + bytes([data[position] ^ 1 << rng.randrange(8)]) + data[position + 1 :]


def fuzzed_file(seed: int) -> tuple[bytes, MsgpackKind]:
    rng = random.Random(seed)
    if seed % 10 == 0:
        prefix = rng.choice([b"", b"\x81\xa1a", b"\x92\x91\xa1a\xc4\x40", b"\x81\xa1a\xc7\x40\x01"])
        return prefix + rng.randbytes(rng.randrange(200)), rng.choice(["flax", "easylm"])
    name, other_name = rng.sample(sorted(FILES), 2)
    data = (FOLDER / name).read_bytes()
    for _ in range(rng.randrange(1, 4)):
        data = mutated(data or b"\x80", (FOLDER / other_name).read_bytes(), rng)
    return data, FILES[name]


def check_fuzzed(path: Path, seed: int) -> bool:
    """Return whether an input is read. Otherwise it must raise PrepError."""
    data, kind = fuzzed_file(seed)
    path.write_bytes(data)
    try:
        header = read_msgpack_header(path, kind)
    except PrepError:
        return False
    for array in header.tensors:
        for copy in array.copies(full_box(array.shape)):
            assert 0 <= copy.file_offset <= copy.file_offset + copy.nbytes <= len(data)
    return True


@pytest.mark.parametrize("part", slow_except(range(8), (0,)))
def test_read_msgpack_header_reads_or_rejects_fuzzed_files(tmp_path: Path, part: int):
    read_well = sum(
        check_fuzzed(tmp_path / "x", seed) for seed in range(part * 250, part * 250 + 250)
    )
    assert 0 < read_well < 250
