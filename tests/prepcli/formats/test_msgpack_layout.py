"""Tests of the layout of Flax msgpack and EasyLM streams, compared with the bytes that Flax writes."""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prepcli.core.errors import PrepError
from prepcli.engine.fills import numpy_dtype
from prepcli.formats import msgpack_layout
from prepcli.formats.msgpack import KeyPath
from prepcli.formats.msgpack_layout import (
    MAX_PIECE_NBYTES,
    MAX_RECORD_NBYTES,
    MsgpackLayout,
    MsgpackLeaf,
    lay_out_flax,
    lay_out_stream,
    sort_paths,
)

DTYPES = ("float32", "bfloat16", "int8", "bool", "float64", "uint16", "complex64", "float8_e4m3fn")
EDGES = (0, 1, 3, 15, 16, 17, 127, 128, 255, 256, 8191, 65536)

flax_serialization = pytest.importorskip("flax.serialization")
flatten_dict = pytest.importorskip("flax.traverse_util").flatten_dict


@st.composite
def arrays(draw) -> np.ndarray:
    dtype = numpy_dtype(draw(st.sampled_from(DTYPES)))
    shape = draw(
        st.one_of(
            st.lists(st.integers(0, 5), max_size=4), st.sampled_from(EDGES).map(lambda n: [n])
        )
    )
    data = np.random.default_rng(draw(st.integers(0, 99))).bytes(math.prod(shape) * dtype.itemsize)
    return (
        np.frombuffer(data, np.uint8).view(dtype).reshape(shape) if data else np.zeros(shape, dtype)
    )


keys = st.one_of(
    st.integers(0, 30).map(str),
    st.text(min_size=1, max_size=40).filter(lambda t: len(t.encode()) < 99),
)
trees = st.recursive(
    arrays(), lambda inner: st.dictionaries(keys, inner, min_size=1, max_size=20), max_leaves=25
).filter(lambda tree: isinstance(tree, dict))


def leaves_of(values: Mapping[KeyPath, np.ndarray]) -> list[MsgpackLeaf]:
    return [MsgpackLeaf(path, value.dtype.name, value.shape) for path, value in values.items()]


def rendered(layout: MsgpackLayout, values: Mapping[KeyPath, np.ndarray]) -> bytes:
    """Return the bytes of a file, with the payloads at the runs of its layout."""
    out = bytearray(layout.size)
    for offset, data in layout.fixed_bytes:
        out[offset : offset + len(data)] = data
    for path, runs in layout.runs.items():
        data = values[path].tobytes()
        for offset, nbytes in runs:
            out[offset : offset + nbytes], data = data[:nbytes], data[nbytes:]
        assert not data
    return bytes(out)


def in_order(tree: dict) -> dict:
    """Return a tree in the key order of JAX."""
    return {
        key: in_order(value) if isinstance(value, dict) else value
        for key, value in sorted(tree.items())
    }


@given(piece=st.sampled_from([1 << 30, 1000]), tree=trees)
def test_layouts_match_flax_serialization(piece: int, tree: dict):
    values = flatten_dict(tree)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flax_serialization, "MAX_CHUNK_SIZE", piece)
        patch.setattr(msgpack_layout, "MAX_PIECE_NBYTES", piece)
        assert rendered(lay_out_flax(leaves_of(values)), values) == flax_serialization.to_bytes(
            in_order(tree)
        )
        packer = msgpack.Packer()
        records = (
            packer.pack((k, flax_serialization.to_bytes(v)))
            for k, v in flatten_dict(in_order(tree)).items()
        )
        assert rendered(lay_out_stream(leaves_of(values)), values) == b"".join(
            record or b"" for record in records
        )


def test_sort_paths_sorts_keys_as_text():
    assert sort_paths([("h", "2"), ("h", "10"), ("a",)]) == [("a",), ("h", "10"), ("h", "2")]


def test_lay_out_flax_splits_leaves_above_1_gib():
    layout = lay_out_flax(
        [MsgpackLeaf(("w",), "float32", (3, 1 << 28)), MsgpackLeaf(("x",), "int8", (1 << 30,))]
    )
    assert [nbytes for _, nbytes in layout.runs["w",]] == [MAX_PIECE_NBYTES] * 3
    assert [nbytes for _, nbytes in layout.runs["x",]] == [MAX_PIECE_NBYTES]
    assert layout.fixed_bytes[0][1].startswith(
        b"\x82\xa1w\x83\xb9__msgpack_chunked_array__\xc3\xa5shape\x82\xa10\x03"
    )


def test_lay_out_stream_rejects_records_above_4_gib():
    largest = lay_out_stream([MsgpackLeaf(("w",), "int8", (MAX_RECORD_NBYTES - 300,))])
    assert len(largest.runs["w",]) == 4
    with pytest.raises(PrepError) as caught:
        lay_out_stream([MsgpackLeaf(("a", "w"), "int8", (MAX_RECORD_NBYTES,))])
    assert caught.value.what == "a.w is too large for an EasyLM stream"


def test_lay_out_flax_rejects_sub_byte_dtypes():
    with pytest.raises(PrepError, match=r"w is float4_e2m1fn"):
        lay_out_flax([MsgpackLeaf(("w",), "float4_e2m1fn", (2,))])


@pytest.mark.parametrize("paths", [[("a",), ("a", "b")], [("a", "b"), ("a",)], [("a",), ("a",)]])
def test_lay_out_flax_rejects_clashing_paths(paths: list[KeyPath]):
    with pytest.raises(ValueError, match=r"is a leaf|occurs twice"):
        lay_out_flax([MsgpackLeaf(path, "int8", ()) for path in paths])
