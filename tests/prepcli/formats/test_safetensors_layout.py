"""Tests of the layout of safetensors files, with the safetensors library and prep's own reader."""

from __future__ import annotations

import json
import math
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prepcli.core.errors import PrepError
from prepcli.engine.digest import record_digest
from prepcli.formats import safetensors as safetensors_format
from prepcli.formats.safetensors import (
    DTYPE_CODES,
    LayoutEntry,
    SafetensorsLayout,
    encode_header,
    encode_index,
    lay_out_files,
    read_safetensors_folder,
    read_safetensors_header,
    split_into_shards,
)
from prepcli.planning.tensors import array_bits

fuzzed = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def entry(name: str, *shape: int, dtype: str = "float32") -> LayoutEntry:
    return name, dtype, shape, array_bits(dtype, shape) // 8


def fill(folder: Path, layout: SafetensorsLayout) -> bytes:
    """Write the file with a payload in which positions differ."""
    content = layout.header + bytes(i % 251 for i in range(layout.size - len(layout.header)))
    (folder / layout.name).write_bytes(content)
    return content


@st.composite
def entries(draw: st.DrawFn) -> list[LayoutEntry]:
    names = draw(
        st.lists(
            st.text(max_size=6).filter(lambda name: name != "__metadata__"), unique=True, max_size=6
        )
    )
    dtypes = [draw(st.sampled_from(sorted(DTYPE_CODES))) for _ in names]
    shapes = [tuple(draw(st.lists(st.integers(0, 5), max_size=3))) for _ in names]
    return [
        entry(name, *shape, 4, dtype=dtype) for name, shape, dtype in zip(names, shapes, dtypes)
    ]


leads = st.none() | st.integers(0, 10_000)


@fuzzed
@given(groups=st.lists(st.tuples(entries(), leads), max_size=3))
def test_layout_is_read_by_library_and_own_reader(
    tmp_path: Path, groups: list[tuple[list[LayoutEntry], int | None]]
) -> None:
    layouts = lay_out_files(
        [(f"{i}.safetensors", listed, lead) for i, (listed, lead) in enumerate(groups)]
    )
    for file, ((listed, _), layout) in enumerate(zip(groups, layouts, strict=True)):
        content = fill(tmp_path, layout)
        assert [(t.name, t.dtype, t.shape, t.nbytes, t.file) for t in layout.tensors] == [
            (*e, file) for e in listed
        ]
        header = read_safetensors_header(tmp_path / layout.name, file)
        assert (header.size, header.digest) == (layout.size, record_digest(layout.header))
        assert set(header.tensors) == set(layout.tensors)
        assert header.metadata == (("format", "pt"),)
        by_library = dict(safetensors.deserialize(content))
        assert len(by_library) == len(listed)
        for t in layout.tensors:
            library_tensor = by_library[t.name]
            assert (library_tensor["dtype"], tuple(library_tensor["shape"])) == (
                DTYPE_CODES[t.dtype],
                t.shape,
            )
            assert library_tensor["data"] == content[t.offset : t.offset + t.nbytes]


@fuzzed
@given(listed=entries(), lead=leads)
def test_encode_header_aligns_payload_to_page_offset(
    listed: list[LayoutEntry], lead: int | None
) -> None:
    start = len(encode_header(listed, lead))
    text = encode_header(listed, None).rstrip(b" ")
    assert start % 8 == 0
    if lead is not None and lead % 8 == 0:
        assert start % 4096 == lead % 4096
        assert start - len(text) < 4096
    else:
        assert start - len(text) < 8


def test_encode_header_aligns_payload_to_page_by_default() -> None:
    assert len(encode_header([entry("a", 2)])) == 4096


def test_encode_header_matches_library_json() -> None:
    header = encode_header([entry("b", 2, 3), entry("a", 5, dtype="bfloat16")], None)
    assert int.from_bytes(header[:8], "little") == len(header) - 8
    expected = (
        '{"__metadata__":{"format":"pt"},"b":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},'
        '"a":{"dtype":"BF16","shape":[5],"data_offsets":[24,34]}}'
    )
    assert header[8:].decode().rstrip() == expected


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"])
def test_library_reads_ml_dtypes(tmp_path: Path, dtype: str) -> None:
    values = np.array([1, 2, 4, 0.5], dtype=getattr(ml_dtypes, dtype))
    assert values.dtype.name == dtype
    (layout,) = lay_out_files([("model.safetensors", [entry("a", 4, dtype=dtype)], None)])
    ((name, tensor),) = safetensors.deserialize(layout.header + values.tobytes())
    assert (name, tensor["dtype"]) == ("a", DTYPE_CODES[dtype])
    assert np.frombuffer(tensor["data"], values.dtype).tolist() == [1, 2, 4, 0.5]


def test_tensors_keep_the_page_offset_of_their_source(tmp_path: Path) -> None:
    (source,) = lay_out_files(
        [("a.safetensors", [entry(f"layer.{i}", 64, 64) for i in range(50)], None)]
    )
    (target,) = lay_out_files(
        [("b.safetensors", [entry(f"l{i}", 64, 64) for i in range(50)], len(source.header))]
    )
    depths = [[t.offset % 4096 for t in layout.tensors] for layout in (source, target)]
    assert depths[0] == depths[1]


def test_duplicate_name_is_rejected() -> None:
    with pytest.raises(ValueError, match="twice"):
        encode_header([entry("a", 1), entry("a", 1)])


def test_name_reserved_for_metadata_is_an_error() -> None:
    with pytest.raises(
        PrepError, match="no tensor of a safetensors file has the name __metadata__"
    ):
        encode_header([entry("__metadata__", 1)])


@pytest.mark.parametrize("wrong", [("a", "float32", (2,), 7), ("a", "float4_e2m1fn", (3,), 2)])
def test_size_that_does_not_match_shape_is_rejected(wrong: LayoutEntry) -> None:
    with pytest.raises(PrepError, match="a cannot be stored as safetensors"):
        encode_header([wrong])


def test_header_above_the_size_limit_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = [entry(letter * 50_000, 1) for letter in "ab"]
    encode_header(listed)
    monkeypatch.setattr(safetensors_format, "MAX_HEADER_NBYTES", 100_000)
    with pytest.raises(PrepError, match="2 tensors are too many for one safetensors file"):
        encode_header(listed)


sizes = st.lists(st.integers(0, 20), max_size=30)


@given(sizes=sizes, limit_bytes=st.integers(1, 40))
def test_split_into_shards_is_greedy_and_ordered(sizes: list[int], limit_bytes: int) -> None:
    listed = [entry(str(i), size, dtype="uint8") for i, size in enumerate(sizes)]
    files = split_into_shards(listed, limit_bytes)
    assert [e for _, group in files for e in group] == listed
    totals = [sum(e[3] for e in group) for _, group in files]
    assert all(total <= limit_bytes or len(group) == 1 for total, (_, group) in zip(totals, files))
    firsts = [group[0][3] for _, group in files[1:]]
    assert all(total + first > limit_bytes for total, first in zip(totals, firsts))


def test_split_into_shards_numbers_the_file_names() -> None:
    listed = [entry("a", 4), entry("b", 4), entry("c", 40), entry("d", 1)]
    assert [(name, [e[0] for e in group]) for name, group in split_into_shards(listed, 32)] == [
        ("model-00001-of-00003.safetensors", ["a", "b"]),
        ("model-00002-of-00003.safetensors", ["c"]),
        ("model-00003-of-00003.safetensors", ["d"]),
    ]
    assert split_into_shards(listed, 1000) == [("model.safetensors", listed)]
    assert split_into_shards([], 1) == [("model.safetensors", [])]
    assert split_into_shards(listed, 1000, "flax_model", "msgpack")[0][0] == "flax_model.msgpack"


def test_encode_index_is_read_by_own_reader(tmp_path: Path) -> None:
    listed = [entry(f"layers.{i}.ü", 3, 5, dtype="bfloat16") for i in range(7)]
    layouts = lay_out_files([(name, group, 0) for name, group in split_into_shards(listed, 64)])
    for layout in layouts:
        fill(tmp_path, layout)
    (tmp_path / "model.safetensors.index.json").write_bytes(encode_index(layouts))
    folder = read_safetensors_folder(tmp_path)
    assert folder.tensors == tuple(t for layout in layouts for t in layout.tensors)
    index = json.loads(encode_index(layouts))
    assert index["metadata"] == {
        "total_size": sum(math.prod(shape) * 2 for _, _, shape, _ in listed)
    }
    assert index["weight_map"]["layers.2.ü"] == "model-00002-of-00004.safetensors"
