from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prepcli.core.errors import PrepError
from prepcli.formats.ocdbt import OCDBT_MANIFEST
from prepcli.formats.orbax import OrbaxNonArray
from prepcli.formats.orbax_chunks import WrittenChunk, unplaced_array
from tests.helpers.orbax_items import (
    random_array,
    read_files,
    write_data_files,
    write_item,
    write_metadata,
)

W = unplaced_array(("params", "w"), (4, 6), "float32", (2, 6))
ARRAYS = {
    W: random_array("float32", (4, 6)),
    unplaced_array(("b",), (3,), "int8", (1,)): random_array("int8", (3,)),
}
WHOLE = (WrittenChunk(0, (0, 0), 0, 0, 48), WrittenChunk(0, (1, 0), 0, 48, 48))


@given(order=st.permutations(range(5)))
def test_files_do_not_depend_on_the_order_of_chunks(tmp_path_factory, order):
    one, two = tmp_path_factory.mktemp("one"), tmp_path_factory.mktemp("two")
    write_item(one / "item", ARRAYS)
    chunks, names = write_data_files(two / "item", ARRAYS)
    write_metadata(two / "item", list(ARRAYS), [chunks[i] for i in order], names)
    assert read_files(one) == read_files(two)


def test_write_item_metadata_writes_only_metadata(tmp_path):
    (tmp_path / "d").mkdir()
    write_metadata(tmp_path, [W], WHOLE, ["d/x"])
    metadata = {"_METADATA", "_CHECKPOINT_METADATA", "commit_success.txt", OCDBT_MANIFEST}
    (node,) = read_files(tmp_path).keys() - metadata
    assert re.fullmatch("d/[0-9a-f]{32}", node)


def test_write_item_metadata_keeps_non_arrays(tmp_path):
    non_arrays = [OrbaxNonArray(("opt", 0), "None"), OrbaxNonArray(("name",), "string", "a name")]
    write_metadata(tmp_path, [W], WHOLE, ["d/x"], non_arrays)
    tree = json.loads((tmp_path / "_METADATA").read_text())["tree_metadata"]
    assert tree["('opt', '0')"] == {
        "key_metadata": [{"key": "opt", "key_type": 2}, {"key": "0", "key_type": 1}],
        "value_metadata": {"value_type": "None", "skip_deserialize": True},
    }
    assert tree["('name',)"]["value_metadata"] == {
        "value_type": "string",
        "skip_deserialize": False,
    }
    assert json.loads((tmp_path / "_strings.json").read_text()) == {"name": "a name"}


@pytest.mark.parametrize(
    ("chunks", "message"),
    [
        (WHOLE[:1], "the index of params.w misses chunk 1.0"),
        ((), "the index of params.w misses chunk 0.0"),
        ((*WHOLE, WHOLE[1]), "the index of params.w has chunk 1.0 twice"),
        ((WHOLE[0], WrittenChunk(0, (2, 0), 0, 0, 48)), "the index of params.w has chunk 2.0"),
        ((WHOLE[0], WrittenChunk(0, (-1, 0), 0, 0, 48)), "the index of params.w has chunk -1.0"),
        ((WHOLE[0], WrittenChunk(0, (1,), 0, 0, 48)), "the index of params.w has chunk 1"),
        ((WHOLE[0], WrittenChunk(0, (1, 0), 0, 0, 47)), "chunk 1.0 of params.w has the wrong size"),
    ],
)
def test_invalid_chunks_are_rejected_before_writing(tmp_path, chunks, message):
    with pytest.raises(PrepError) as caught:
        write_metadata(tmp_path, [W], chunks, ["d/x"])
    assert caught.value.what == message
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("dtype", ["float6_e2m3fn", "float6_e3m2fn", "float4_e2m1fn"])
def test_unsupported_dtype_is_rejected(tmp_path, dtype):
    with pytest.raises(PrepError, match=f"params.w is {dtype}"):
        write_metadata(tmp_path, [dataclasses.replace(W, dtype=dtype)], WHOLE, ["d/x"])


def test_single_array_is_rejected(tmp_path):
    with pytest.raises(PrepError, match="cannot write a single array"):
        write_metadata(tmp_path, [dataclasses.replace(W, path=())], WHOLE, ["d/x"])


@pytest.mark.parametrize("chunk", [(2,), (2, 0), ()])
def test_chunk_shape_mismatch_is_rejected(tmp_path, chunk):
    with pytest.raises(PrepError, match="does not match its shape"):
        write_metadata(tmp_path, [dataclasses.replace(W, chunk_shape=chunk)], WHOLE, ["d/x"])


def test_clashing_leaf_names_are_rejected(tmp_path):
    with pytest.raises(PrepError, match=r"params\.w and params\.w\.x"):
        write_metadata(tmp_path, [W], WHOLE, ["d/x"], [OrbaxNonArray(("params", "w", "x"), "None")])


def test_item_without_arrays_is_rejected(tmp_path):
    with pytest.raises(PrepError, match="no arrays"):
        write_metadata(tmp_path, [], [], [])


def test_import_needs_neither_tensorstore_nor_jax():
    code = "import sys, prepcli.formats.orbax; print(*sys.modules)"
    modules = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert not {"tensorstore", "jax", "orbax", "torch"} & set(modules)
