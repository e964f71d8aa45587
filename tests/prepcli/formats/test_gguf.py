"""Headers of GGUF files, written by the package gguf, and malicious ones."""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prepcli.core.errors import PrepError
from prepcli.formats.gguf import (
    GGML_TYPES,
    MAX_ARRAY_ITEMS,
    GgufArray,
    GgufHeader,
    read_gguf_header,
)
from tests.helpers.lazy_modules import lazy_module

gguf = lazy_module("gguf")


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def entry(key: str, type_number: int, value: bytes) -> bytes:
    return string(key) + struct.pack("<I", type_number) + value


def table_row(name: str, dims: list[int], type_number: int, offset: int) -> bytes:
    sizes = struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
    return string(name) + sizes + struct.pack("<IQ", type_number, offset)


def build(entries: list[bytes], rows: list[bytes], data: bytes = b"", version: int = 3) -> bytes:
    """Return a file, with padding to 32 bytes before its data."""
    head = b"GGUF" + struct.pack("<IQQ", version, len(rows), len(entries))
    head += b"".join(entries) + b"".join(rows)
    return head + bytes(-len(head) % 32) + data


def read(path: Path, content: bytes) -> GgufHeader:
    path.write_bytes(content)
    return read_gguf_header(path)


def refusal(path: Path, content: bytes) -> str:
    with pytest.raises(PrepError) as caught:
        read(path, content)
    return f"{caught.value.what}: {caught.value.why}"


def write_with_gguf(path: Path, *, alignment: int | None = None) -> dict[str, np.ndarray]:
    """Write metadata of all kinds and tensors of several types, and return the bytes of the tensors."""
    writer = gguf.GGUFWriter(path, "llama")
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    writer.add_block_count(2)
    writer.add_rope_freq_base(10000.5)
    writer.add_bool("test.flag", True)
    writer.add_int64("test.negative", -5)
    writer.add_token_list(["<s>", "é", ""])
    writer.add_token_scores([0.5, -1.0])
    arrays: dict[str, np.ndarray] = {}
    rng = np.random.default_rng(1)
    for name, type_name, shape in [
        ("token_embd.weight", "Q6_K", (7, 256)),
        ("blk.0.attn_norm.weight", "F32", (5,)),
        ("blk.0.ffn_up.weight", "Q4_0", (3, 64)),
        ("output.weight", "BF16", (3, 5)),
    ]:
        quant_type = gguf.GGMLQuantizationType[type_name]
        byte_shape = gguf.quant_shape_to_byte_shape(shape, quant_type)
        arrays[name] = rng.integers(0, 256, byte_shape, dtype=np.uint8)
        writer.add_tensor(name, arrays[name], raw_dtype=quant_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return arrays


@pytest.mark.parametrize("alignment", [None, 8, 256])
def test_header_matches_the_reader_of_the_gguf_package(tmp_path: Path, alignment: int | None):
    path = tmp_path / "model.gguf"
    arrays = write_with_gguf(path, alignment=alignment)
    header = read_gguf_header(path)
    expected = gguf.GGUFReader(path)
    for tensor, reference in zip(header.tensors, expected.tensors, strict=True):
        assert tensor.name == reference.name
        assert tensor.type.name == reference.tensor_type.name
        assert tensor.shape == tuple(reversed(reference.shape.tolist()))
        assert (tensor.offset, tensor.nbytes) == (reference.data_offset, reference.n_bytes)
        stored = path.read_bytes()[tensor.offset : tensor.offset + tensor.nbytes]
        assert stored == arrays[tensor.name].tobytes()
    for key, field in expected.fields.items():
        if not key.startswith("GGUF."):
            assert plain_value(header.metadata[key]) == field.contents(), key


def plain_value(value: Any) -> Any:
    if not isinstance(value, GgufArray):
        return value
    if value.type == 8:
        return value.strings()
    return value.numbers().tolist()


def test_ggml_types_match_the_gguf_package():
    sizes = {
        number: (GGML_TYPES[number].name, GGML_TYPES[number].values, GGML_TYPES[number].nbytes)
        for number in GGML_TYPES
    }
    expected = {
        kind.value: (kind.name, *gguf.GGML_QUANT_SIZES[kind]) for kind in gguf.GGML_QUANT_SIZES
    }
    assert sizes == expected


def test_version_2_is_read(tmp_path: Path):
    header = read(tmp_path / "a.gguf", build([entry("a", 4, bytes(4))], [], version=2))
    assert header.metadata == {"a": 0}
    assert header.tensors == ()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "does not begin with GGUF"),
        (b"GGML" + bytes(40), "does not begin with GGUF"),
        (build([], [], version=1), "it has version 1;"),
        (build([], [], version=3 << 24), "big-endian"),
        (b"GGUF\x03\0\0\0" + struct.pack("<QQ", 1 << 40, 0), "1,099,511,627,776 tensors"),
        (b"GGUF\x03\0\0\0" + struct.pack("<QQ", 0, 10**9), "1,000,000,000 metadata entries"),
        (build([struct.pack("<Q", 1 << 60)], []), "a string has"),
        (build([entry("a", 4, bytes(4))] * 2, []), "the key `a` twice"),
        (build([entry("a", 13, b"")], []), "the key `a`: unknown type 13"),
        (build([entry("a", 7, b"\2")], []), "the key `a`: a boolean is 2"),
        (build([entry("a", 8, struct.pack("<Q", 1) + b"\xff")], []), "`a`: a string is not UTF-8"),
        (build([entry("a", 9, struct.pack("<IQ", 9, 1))], []), "`a`: an array of type 9"),
        (build([entry("a", 9, struct.pack("<IQ", 0, 1 << 50))], []), "`a`: an array has"),
        (build([entry("a", 9, struct.pack("<IQ", 0, 10_000))], []), "`a`: the file ends"),
        (build([entry("a", 9, struct.pack("<IQQ", 8, 2, 1 << 50))], []), "`a`: the file ends"),
        (build([entry("general.alignment", 4, struct.pack("<I", 24))], []), "is 24, not a power"),
        (build([entry("general.alignment", 4, bytes(4))], []), "is 0, not a power"),
        (build([entry("general.alignment", 8, string("x"))], []), "is 'x', not a power"),
        (build([], [table_row("w", [1] * 5, 0, 0)]), "the tensor `w`: it has 5 dims"),
        (build([], [table_row("w", [1], 99, 0)]), "the tensor `w`: unknown type 99"),
        (build([], [table_row("w", [33], 2, 0)]), "the tensor `w`: rows of 33 values"),
        (build([], [table_row("w", [1 << 40, 1 << 40], 0, 0)]), "`w`: its shape"),
        (build([], [table_row("w", [0, 1 << 62, 1 << 62], 0, 0)]), "`w`: its shape"),
        (build([], [table_row("w", [8], 0, 32)]), "the tensor `w`: its offset is 32, not 0"),
        (build([], [table_row("w", [8], 0, 0)] * 2, bytes(32)), "the tensor `w` twice"),
        (build([], [table_row("w", [8], 0, 0)], bytes(31)), "cut short"),
        (build([], [table_row("w", [8], 0, 0)], bytes(2 << 20)), "too long"),
    ],
)
def test_broken_header_is_rejected(tmp_path: Path, content: bytes, message: str):
    assert message in refusal(tmp_path / "a.gguf", content)


def test_counts_allocate_no_memory(tmp_path: Path):
    count = struct.pack("<IQ", 12, MAX_ARRAY_ITEMS)
    content = build([entry("a", 9, count)], [])
    tracemalloc.start()
    assert "the file ends" in refusal(tmp_path / "a.gguf", content)
    _, peak_nbytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_nbytes < 4 << 20


def test_array_of_another_type_is_refused():
    with pytest.raises(ValueError, match="strings"):
        GgufArray(0, 1, b"\0").strings()
    with pytest.raises(ValueError, match="numbers"):
        GgufArray(8, 0, b"").numbers()
