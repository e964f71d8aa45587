"""Orbax items, compared with Orbax itself in a separate process: written, restored, and found in folders."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prepcli.algebra.grids import StoredRange
from prepcli.core.errors import PrepError
from prepcli.formats.ocdbt import OCDBT_MANIFEST
from prepcli.formats.orbax import OrbaxItem, OrbaxNonArray, find_item, find_name_clash, read_item
from prepcli.formats.orbax_chunks import WrittenChunk, unplaced_array
from prepcli.formats.zarr import ZARR_TYPESTRS
from prepcli.planning.arrays import Array
from prepcli.stores.paths import local_copy
from tests.helpers.orbax_items import (
    metadata_of,
    random_array,
    read_files,
    write_data_files,
    write_item,
    write_metadata,
)

ORACLE = Path(__file__).parents[2] / "helpers" / "orbax_oracle.py"


@cache
def start_oracle() -> subprocess.Popen[str]:
    """Start the process that runs the commands of all tests. It ends with this process."""
    return subprocess.Popen(
        [sys.executable, ORACLE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def run_orbax(command: str, *paths: Path) -> str:
    """Run a command of orbax_oracle.py. Return the traceback of its failure, or an empty string."""
    oracle = start_oracle()
    assert oracle.stdin
    assert oracle.stdout
    oracle.stdin.write(json.dumps([command, *(str(path.absolute()) for path in paths)]) + "\n")
    oracle.stdin.flush()
    answer = oracle.stdout.readline()
    assert answer, "the oracle has ended"
    return json.loads(answer)


def expect(path: Path, arrays: dict[Array, np.ndarray]) -> Path:
    leaves = {
        meta.name: [meta.dtype, list(meta.shape), array.tobytes().hex()]
        for meta, array in arrays.items()
    }
    path.write_text(json.dumps(leaves))
    return path


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return checkpoints that Orbax wrote. See `save` in orbax_oracle.py."""
    folder = tmp_path_factory.mktemp("saved")
    assert not run_orbax("save", folder)
    return folder


def test_orbax_restores_every_dtype_and_array_shape(tmp_path):
    forms = {
        unplaced_array(("params", "zero_d"), (), "bfloat16", ()): (),
        unplaced_array(("params", "none"), (0, 4), "float32", (1, 4)): (0, 4),
        unplaced_array(("params", "layers", 0, "ragged"), (3, 7, 5), "float32", (1, 3, 2)): (
            3,
            7,
            5,
        ),
        unplaced_array(("params", "layers", 1, "larger_chunk"), (3, 5), "int16", (4, 8)): (3, 5),
        unplaced_array(("params", "many"), (12, 11), "int32", (1, 1)): (12, 11),
    } | {
        unplaced_array(("params", "dtypes", dtype), (8, 4), dtype, (2, 4)): (8, 4)
        for dtype in ZARR_TYPESTRS
    }
    arrays = {
        meta: random_array(meta.dtype, shape, n) for n, (meta, shape) in enumerate(forms.items())
    }
    write_item(tmp_path / "item", arrays, gap=37)
    (tmp_path / "item/hf").mkdir()
    (tmp_path / "item/hf/config.json").write_text("{}")
    (tmp_path / "item/prep-manifest.json").write_text("{}")
    assert not run_orbax("compare", expect(tmp_path / "expected.json", arrays), tmp_path / "item")


def test_orbax_restores_item_with_multi_node_index(tmp_path):
    layers = unplaced_array(("params", "layers", "w"), (16, 8, 4), "bfloat16", (1, 2, 2))
    arrays = {
        meta: random_array(meta.dtype, meta.shape)
        for meta in (layers, unplaced_array(("b",), (3,), "float32", (1,)))
    }
    write_item(tmp_path / "item", arrays, node_nbytes=2000)
    index = max((tmp_path / "item/d").iterdir(), key=lambda path: path.name[:2] not in ("aa", "bb"))
    assert index.read_bytes().count(bytes.fromhex("0cdb20de")) > 5
    assert not run_orbax("compare", expect(tmp_path / "expected.json", arrays), tmp_path / "item")


def test_item_saved_by_orbax_round_trips(saved, tmp_path):
    """Round-trip lists, None, empty dicts, strings and Python numbers too."""
    item = read_item(saved / "raw")
    (tmp_path / "d").mkdir()
    data, chunks = b"", []
    metas: list[Array] = []
    for array_number, array in enumerate(item.arrays):
        metas.append(metadata_of(array))
        for index, stored in array.stored_chunks():
            chunk = stored if isinstance(stored, bytes) else _range(item, stored)
            chunks.append(WrittenChunk(array_number, index, 0, len(data), len(chunk)))
            data += chunk
    (tmp_path / "d/data").write_bytes(data)
    write_metadata(tmp_path, metas, chunks, ["d/data"], item.non_arrays)
    # prep writes a Python number as an array without dims.
    tree = json.loads((tmp_path / "_METADATA").read_text())
    for array, value_type in zip(item.arrays, item.value_types, strict=True):
        if value_type == "scalar":
            leaf = tree["tree_metadata"][str(tuple(map(str, array.path)))]
            leaf["value_metadata"]["value_type"] = value_type
    (tmp_path / "_METADATA").write_text(json.dumps(tree))
    assert not run_orbax("same", saved / "raw", tmp_path)


def _range(item: OrbaxItem, stored: StoredRange) -> bytes:
    return local_copy(item.files[stored.file]).read_bytes()[
        stored.offset : stored.offset + stored.nbytes
    ]


def test_read_item_reads_sharded_arrays(saved):
    item = read_item(saved / "raw")
    assert [(meta.name, meta.shape, meta.dtype, meta.chunk_shape) for meta in item.arrays] == [
        ("opt.0.mu", (5, 2), "bfloat16", (5, 2)),
        ("params.big", (4, 64, 64), "float32", (4, 16, 32)),
        ("params.small", (3,), "int8", (3,)),
        ("step", (), "int64", ()),
    ]
    assert item.value_types == ("jax.Array", "jax.Array", "np.ndarray", "scalar")
    assert dict(item.arrays[3].stored_chunks()) == {(): (3).to_bytes(8, "little")}
    big = np.arange(4 * 64 * 64, dtype=np.float32).reshape(4, 64, 64)
    for (i, j, k), stored in item.arrays[1].stored_chunks():
        assert isinstance(stored, StoredRange)
        assert (
            _range(item, stored)
            == big[4 * i :, 16 * j : 16 * j + 16, 32 * k : 32 * k + 32].tobytes()
        )
    assert len([*item.arrays[1].stored_chunks()]) == 8
    assert {path.parent.parent.name for path in item.files} == {"ocdbt.process_0"}


def test_resave_hint_produces_a_readable_item(saved):
    """Check `raw again`, which the oracle wrote from the compressed item as RESAVE_HINT says."""
    raw, again = read_item(saved / "raw"), read_item(saved / "raw again")
    assert [meta.name for meta in raw.arrays] == [meta.name for meta in again.arrays]
    assert raw.non_arrays == again.non_arrays


def test_find_item_finds_items_saved_by_orbax(saved):
    assert find_item(saved / "raw") == saved / "raw"
    assert find_item(saved / "v1") == saved / "v1/state"
    assert find_item(saved / "run/9") == saved / "run/9/default"
    assert find_item(saved / "run") == saved / "run/10/default"


@pytest.mark.parametrize("item", [".", "default", "state", "items", "5", "5/params", "5/state"])
def test_find_item_searches_known_subfolders(tmp_path, item):
    (tmp_path / item).mkdir(parents=True, exist_ok=True)
    (tmp_path / item / "_METADATA").touch()
    assert find_item(tmp_path) == tmp_path / item


@pytest.mark.parametrize("other", ["model.safetensors", "prep-manifest.json"])
def test_find_item_ignores_the_parent_of_several_checkpoints(tmp_path: Path, other: str):
    for path in (tmp_path / "init" / "_METADATA", tmp_path / "tuned" / other):
        path.parent.mkdir()
        path.touch()
    assert find_item(tmp_path) is None
    assert find_item(tmp_path / "init") == tmp_path / "init"


def test_find_item_returns_last_finished_step(tmp_path):
    for step in (
        "9/state",
        "10/state",
        "11/metrics",
        "12.partial/state",
        "13.orbax-checkpoint-tmp/state",
    ):
        (tmp_path / step).mkdir(parents=True)
        if step != "11/metrics":
            (tmp_path / step / "_METADATA").touch()
    assert find_item(tmp_path) == tmp_path / "10/state"


def test_find_item_returns_none_if_ambiguous(tmp_path):
    for name in ("model", "opt_state"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "_METADATA").touch()
    assert find_item(tmp_path) is None
    shutil.rmtree(tmp_path / "opt_state")
    assert find_item(tmp_path) == tmp_path / "model"


@pytest.mark.parametrize(
    ("params", "state"), [("params", "opt_state"), ("model_params", "optimizer_state")]
)
def test_find_item_prefers_params_to_optimizer_state(tmp_path: Path, params: str, state: str):
    for name in (params, state):
        (tmp_path / name).mkdir()
        (tmp_path / name / "_METADATA").touch()
    assert find_item(tmp_path) == tmp_path / params


@pytest.mark.parametrize("path", ["nothing", "file", "empty"])
def test_find_item_returns_none_without_item(tmp_path, path):
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    assert find_item(tmp_path / path) is None


@pytest.mark.parametrize(
    ("paths", "expected"),
    [
        ([("a", "b"), ("a", "c"), ("ab",), ("a.b",)], ("a.b", "a.b")),
        ([("a", "b"), ("a", "b", "c")], ("a.b", "a.b.c")),
        ([("a", 0), ("b",), ("a", "0")], ("a.0", "a.0")),
        ([("a", 0), ("a", 1), ("b",), ("aa",), ("a.c",)], None),
    ],
)
def test_find_name_clash_returns_first_clash_or_none(paths, expected):
    assert find_name_clash(paths) == expected


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
