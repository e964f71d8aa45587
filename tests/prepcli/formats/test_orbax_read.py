"""Reading Orbax items: values of the index, and items that are invalid, malicious or not supported."""

from __future__ import annotations

import json
import math
import os
import shutil
import struct
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prepcli.algebra.grids import StoredRange
from prepcli.core.errors import GET_AGAIN_HINT, DamagedError, PrepError
from prepcli.formats import orbax_chunks
from prepcli.formats.ocdbt import OCDBT_MANIFEST, ValueLocation, read_ocdbt_index
from prepcli.formats.orbax import OrbaxItem, read_item
from prepcli.formats.orbax_chunks import unplaced_array
from prepcli.formats.zarr import ZARR_TYPESTRS
from prepcli.planning.arrays import Array
from prepcli.stores.paths import local_copy
from tests.helpers.orbax_items import (
    NOW_NS,
    chunk_bytes,
    metadata_of,
    random_array,
    write_item,
    write_ocdbt_index,
)
from tests.helpers.zarr_items import StorageForm, write_zarr_item

W = unplaced_array(("params", "w"), (4, 6), "float32", (2, 6))
ARRAYS = {
    W: random_array("float32", (4, 6)),
    unplaced_array(("params", "b"), (3,), "int8", (1,)): random_array("int8", (3,)),
}
ZARRAY = b"params.w/.zarray"


@pytest.fixture
def item(tmp_path: Path) -> Path:
    write_item(tmp_path / "item", ARRAYS)
    return tmp_path / "item"


def rewrite(item: Path, changes: dict[bytes, bytes | ValueLocation | None]) -> None:
    """Rewrite the index with some values replaced (None: removed)."""
    entries = {**dict(read_ocdbt_index(item)), **changes}
    (item / OCDBT_MANIFEST).unlink()
    write_ocdbt_index(
        item, sorted((key, value) for key, value in entries.items() if value is not None), NOW_NS
    )


def rewrite_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def changed_zarray(item: Path, **changes: Any) -> None:
    document = dict(read_ocdbt_index(item))[ZARRAY]
    assert isinstance(document, bytes)
    rewrite(item, {ZARRAY: json.dumps(json.loads(document) | changes).encode()})


def refused(item: Path) -> PrepError:
    """Return the error of an invalid item. If the item is damaged, its hint must say so."""
    with pytest.raises(PrepError) as caught:
        read_item(item)
    assert caught.value.hint == GET_AGAIN_HINT or not isinstance(caught.value, DamagedError)
    return caught.value


@st.composite
def array_metas(draw: st.DrawFn, path: tuple[str | int, ...]) -> Array:
    shape = draw(st.lists(st.integers(0, 5), max_size=3).map(tuple))
    chunk = tuple(draw(st.integers(1, 6)) for _ in shape)
    return unplaced_array(
        path,
        shape,
        draw(st.sampled_from(sorted(ZARR_TYPESTRS))),
        chunk,
    )


@st.composite
def trees(draw: st.DrawFn) -> list[Array]:
    paths = draw(
        st.lists(
            st.sampled_from([("a",), ("b", 0), ("b", 10), ("b", 2), ("é", "w"), ("b-1", "x")]),
            min_size=1,
            unique=True,
        )
    )
    return [draw(array_metas(path)) for path in paths]


@given(metas=trees(), gap=st.integers(0, 3), node_bytes=st.sampled_from([1, 300, 1 << 20]))
def test_written_item_is_read_back(tmp_path_factory, metas, gap, node_bytes):
    folder = tmp_path_factory.mktemp("read") / "item"
    arrays = {meta: random_array(meta.dtype, meta.shape) for meta in metas}
    write_item(folder, arrays, gap, node_nbytes=node_bytes)
    item = read_item(folder)
    for meta, array, value_type in zip(metas, item.arrays, item.value_types, strict=True):
        assert (array.path, array.shape, array.dtype) == (meta.path, meta.shape, meta.dtype)
        assert (array.name, array.chunk_shape) == (meta.name, meta.chunk_shape)
        assert value_type == "np.ndarray"
        table = dict(array.stored_chunks())
        assert len(table) == math.prod(meta.grid.chunk_counts)
        for index, stored in table.items():
            assert isinstance(stored, StoredRange)
            data = local_copy(item.files[stored.file]).read_bytes()[
                stored.offset : stored.offset + stored.nbytes
            ]
            assert data == chunk_bytes(arrays[meta], meta.chunk_shape, index)


def test_read_item_returns_inline_chunk_of_the_index(item):
    chunk = chunk_bytes(ARRAYS[W], W.chunk_shape, (1, 0))
    rewrite(item, {b"params.w/1.0": chunk})
    assert read_item(item).arrays[0].stored_chunk((1, 0)) == chunk


def test_read_item_accepts_zarray_in_a_data_file(item):
    document = dict(read_ocdbt_index(item))[ZARRAY]
    assert isinstance(document, bytes)
    (item / "d/document").write_bytes(b"..." + document)
    rewrite(item, {ZARRAY: ValueLocation("d/document", 3, len(document))})
    assert list(map(metadata_of, read_item(item).arrays)) == [*ARRAYS]


def test_read_item_accepts_a_relative_path(item, monkeypatch):
    monkeypatch.chdir(item / "d")
    assert list(map(metadata_of, read_item(Path("../../item")).arrays)) == [*ARRAYS]


def test_read_item_returns_names_missing_from_metadata(item):
    rewrite(item, {b"left.over/0": b"x"})
    assert read_item(item).unlisted_names == ("left.over",)


@pytest.mark.parametrize("name", ["item.orbax-checkpoint-tmp", "5.orbax-checkpoint-tmp-1700/state"])
def test_unfinished_checkpoint_is_rejected(item, tmp_path, name):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    shutil.copytree(item, tmp_path / name)
    assert "did not finish" in refused(tmp_path / name).what


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("_METADATA", "item is not an Orbax checkpoint"),
        (OCDBT_MANIFEST, "item has no manifest.ocdbt"),
        ("d/" + "a" * 32, "a" * 32 + " does not exist"),
        ("d/" + "b" * 32, "b" * 32 + " does not exist"),
    ],
)
def test_read_item_rejects_a_missing_file(item, name, message):
    (item / name).unlink()
    assert refused(item).what.endswith(message)


def test_read_item_rejects_a_missing_folder(tmp_path):
    assert refused(tmp_path / "nothing").what == f"cannot read {tmp_path / 'nothing'}"


def test_truncated_data_file_error_has_both_sizes(item):
    file = item / "d" / ("a" * 32)
    size = file.stat().st_size
    file.write_bytes(file.read_bytes()[:-1])
    error = refused(item)
    assert error.what == f"{file} is cut short"
    assert error.why == f"a chunk of `params.b` ends at byte {size}, the file at {size - 1}"


def test_folder_as_data_file_is_rejected(item):
    (item / "d" / ("a" * 32)).unlink()
    (item / "d" / ("a" * 32)).mkdir()
    assert refused(item).what.endswith("is not a file")


@pytest.mark.parametrize("path", ["../data", "/dev/zero", "d/../../data"])
def test_chunk_outside_the_folder_is_rejected(item, path):
    (item.parent / "data").write_bytes(bytes(1000))
    rewrite(item, {b"params.w/1.0": ValueLocation(path, 0, 48)})
    error = refused(item)
    assert path in error.what
    assert error.why == f"it is not inside {item}"


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        (b"params.w/1.0", None, "chunk 1.0 of `params.w` is missing"),
        (b"params.w/0.0", None, "chunk 0.0 of `params.w` is missing"),
        (b"params.w/2.0", b"x", "the index of `params.w` has chunk `2.0`"),
        (b"params.w/00.0", b"x", "the index of `params.w` has chunk `00.0`"),
        (b"params.w/1.0", bytes(47), "chunk 1.0 of `params.w` has the wrong size"),
        (
            b"params.w/1.0",
            ValueLocation("d/" + "a" * 32, 0, 47),
            "chunk 1.0 of `params.w` has the wrong size",
        ),
        (ZARRAY, b"{", "the .zarray of `params.w` is broken"),
        (ZARRAY, b"[]", "the .zarray of `params.w` is broken"),
        (ZARRAY, ValueLocation("d/" + "a" * 32, 1 << 62, 9), "the .zarray of `params.w` is broken"),
        (ZARRAY, ValueLocation("d/" + "a" * 32, 0, 1 << 62), "the .zarray of `params.w` is broken"),
    ],
)
def test_index_that_does_not_match_the_tree_is_rejected(item, key, value, message):
    rewrite(item, {key: value})
    assert refused(item).what == message


def test_read_item_rejects_an_array_missing_from_index(item):
    rewrite(item, {ZARRAY: None})
    assert refused(item).what == f"`params.w` is not in the index of {item}"


def test_overlapping_chunks_are_rejected(item):
    places = [
        place for place in dict(read_ocdbt_index(item)).values() if isinstance(place, ValueLocation)
    ]
    place = next(place for place in places if place.nbytes == 48)
    rewrite(item, {b"params.b/0": ValueLocation(place.path, place.offset + 47, 1)})
    error = refused(item)
    assert error.what == "chunks of `params.w` and `params.b` overlap"
    assert f"both use byte {place.offset + 47} of" in error.why


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"compressor": {"id": "blosc"}}, "`params.w` is stored compressed with `blosc`"),
        ({"compressor": 1}, "`params.w` is stored compressed with `1`"),
        ({"filters": [{"id": "delta"}]}, "`params.w` is stored with filters"),
        ({"order": "F"}, "`params.w` is stored in order `F`"),
        ({"dtype": ">f4"}, "`params.w` is stored big endian"),
        ({"dtype": "int2"}, "`params.w` is `int2`"),
        ({"dtype": [["x", "<f4"]]}, "`params.w` is `[['x', '<f4']]`"),
        ({"dimension_separator": "/"}, "`params.w` has chunks that are named with `/`"),
        ({"shape": [4, -6]}, "the .zarray of `params.w` is broken"),
        ({"shape": [4]}, "the .zarray of `params.w` is broken"),
        ({"shape": [4, True]}, "the .zarray of `params.w` is broken"),
        ({"chunks": [2, 0]}, "the .zarray of `params.w` is broken"),
        ({"shape": [10**18, 6]}, "chunk 2.0 of `params.w` is missing"),
    ],
)
def test_unsupported_zarray_is_rejected(item, changes, message):
    changed_zarray(item, **changes)
    assert refused(item).what == message


def test_huge_grid_without_chunks_is_rejected(item):
    changed_zarray(item, shape=[0, 10**18])
    assert refused(item).why == f"its grid is (0, {10**18 // 6 + 1})"
    # Its outer rows must not be enumerated.
    changed_zarray(item, shape=[10**18, 0])
    assert refused(item).why == f"its grid is ({10**18 // 2}, 0)"


def tree_of_one(keys: list[dict[str, Any]]) -> str:
    return json.dumps(
        {
            "tree_metadata": {
                "x": {"key_metadata": keys, "value_metadata": {"value_type": "np.ndarray"}}
            }
        }
    )


@pytest.mark.parametrize(
    "metadata",
    [
        *("", "{", "[]", "{}", "\0", '{"a":' * 100_000),
        *('{"tree_metadata": 1}', '{"tree_metadata": {"x": {}}}'),
        tree_of_one([]),
        tree_of_one([{"key": "-1", "key_type": 1}]),
        tree_of_one([{"key": "x", "key_type": 3}]),
        tree_of_one([{"key": 1, "key_type": 2}]),
    ],
)
def test_read_item_rejects_invalid_metadata(item, metadata):
    (item / "_METADATA").write_text(metadata)
    assert refused(item).what == f"{item / '_METADATA'} is broken"


def test_leaves_with_equal_names_are_rejected(item):
    """Reject `params.a` / `b` with `params` / `a.b`: both have the same name on disk."""
    leaf = {"value_metadata": {"value_type": "np.ndarray"}}
    keys = [
        [{"key": part, "key_type": 2} for part in path]
        for path in (("params.a", "b"), ("params", "a.b"))
    ]
    rewrite_json(
        item / "_METADATA",
        tree_metadata={str(n): {"key_metadata": k, **leaf} for n, k in enumerate(keys)},
    )
    assert refused(item).why == "a leaf `params.a.b` cannot exist next to `params.a.b`"


def test_name_with_lone_surrogate_is_missing_from_index(item):
    (item / "_METADATA").write_text(tree_of_one([{"key": "\ud800", "key_type": 2}]))
    assert "is not in the index" in refused(item).what


def test_string_leaf_without_text_is_rejected(item):
    tree = json.loads((item / "_METADATA").read_text())["tree_metadata"]
    tree["x"] = {
        "key_metadata": [{"key": "x", "key_type": 2}],
        "value_metadata": {"value_type": "string"},
    }
    rewrite_json(item / "_METADATA", tree_metadata=tree)
    (item / "_strings.json").write_text('{"y": "text"}')
    error = refused(item)
    assert (error.what, error.why) == (
        f"{item / '_strings.json'} is broken",
        "it has no text for `x`",
    )


def test_missing_chunks_of_old_orbax_read_as_zeros(item):
    rewrite_json(item / "_METADATA", store_array_data_equal_to_fill_value=False)
    rewrite(item, {b"params.w/1.0": None})
    assert [index for index, _ in read_item(item).arrays[0].stored_chunks()] == [(0, 0)]


@pytest.mark.parametrize("fill", [1, -1, 1.5, "NaN", True, [0]])
def test_missing_chunks_with_nonzero_fill_are_rejected(item, fill):
    rewrite_json(item / "_METADATA", store_array_data_equal_to_fill_value=False)
    changed_zarray(item, fill_value=fill)
    rewrite(item, {b"params.w/1.0": None})
    assert refused(item).what == "chunk 1.0 of `params.w` is missing"


def test_item_with_too_many_missing_chunks_is_rejected(item):
    rewrite_json(item / "_METADATA", store_array_data_equal_to_fill_value=False)
    changed_zarray(item, shape=[10**18, 6])
    assert "chunks are not stored" in refused(item).why


MAX_READ_NBYTES = 4 << 20  # memory to read items with a few hundred bytes of metadata


def read_or_refuse(item: Path) -> OrbaxItem | None:
    """Read an item in bounded memory. Return None if it is refused."""
    tracemalloc.start()
    try:
        return read_item(item)
    except PrepError:
        return None
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < MAX_READ_NBYTES


def check_chunks_lie_in_the_item(actual: OrbaxItem, item: Path) -> None:
    """Check that every chunk is a byte range of a file of the item."""
    for array in actual.arrays:
        for _, _, stored in named_chunks(actual, array):
            if isinstance(stored, StoredRange):
                file = local_copy(actual.files[stored.file])
                assert file.resolve().is_relative_to(item.resolve())
                assert 0 <= stored.offset <= stored.offset + stored.nbytes <= file.stat().st_size


def named_chunks(item: OrbaxItem, array: Array) -> Iterator[tuple[Any, str, Any]]:
    """Yield index, file name and location of the stored chunks of an array."""
    for index, stored in array.stored_chunks():
        name = item.files[stored.file].name if isinstance(stored, StoredRange) else ""
        yield index, name, stored


def locations(item: OrbaxItem) -> dict[Any, Any]:
    """Return the type and the chunks of each array by its path."""
    return {
        array.path: (
            array.shape,
            array.dtype,
            array.chunk_shape,
            [
                (index, name, stored.offset, stored.nbytes)
                for index, name, stored in named_chunks(item, array)
            ],
        )
        for array in item.arrays
    }


@pytest.mark.slow
@given(data=st.data())
def test_changed_bytes_are_rejected_or_change_no_range(tmp_path_factory, data):
    item = tmp_path_factory.mktemp("changed") / "item"
    write_item(item, ARRAYS, node_nbytes=300)
    file = data.draw(
        st.sampled_from(sorted(path for path in item.rglob("*") if path.is_file())), label="file"
    )
    old = file.read_bytes()
    start = data.draw(st.integers(0, len(old)), label="start")
    end = data.draw(st.sampled_from([start, start + 1, start + 9, len(old)]), label="end")
    before = locations(read_item(item))
    file.write_bytes(old[:start] + data.draw(st.binary(max_size=9), label="new") + old[end:])
    actual = read_or_refuse(item)
    if actual is not None:
        check_chunks_lie_in_the_item(actual, item)
        assert locations(actual).items() <= before.items(), "it reads other values"


@given(data=st.data())
def test_forged_nodes_are_rejected_or_stay_in_the_item(tmp_path_factory, data):
    """Change nodes and fix their checksums, as an attacker could."""
    item = tmp_path_factory.mktemp("forged") / "item"
    write_item(item, ARRAYS)
    file = data.draw(st.sampled_from([item / OCDBT_MANIFEST, _node_file(item)]), label="file")
    body = bytearray(file.read_bytes()[:-4])
    for _ in range(data.draw(st.integers(1, 3))):
        body[data.draw(st.integers(12, len(body) - 1), label="at")] = data.draw(
            st.integers(0, 255), label="byte"
        )
    file.write_bytes(body + struct.pack("<I", google_crc32c.value(bytes(body))))
    actual = read_or_refuse(item)
    if actual is not None:
        assert {meta.path for meta in actual.arrays} == {meta.path for meta in ARRAYS}
        check_chunks_lie_in_the_item(actual, item)


def _node_file(item: Path) -> Path:
    return next(
        path for path in sorted((item / "d").iterdir()) if path.name not in ("a" * 32, "b" * 32)
    )


META = unplaced_array(("w",), (8, 8), "float32", (2, 2))
VALUES = np.arange(64, dtype=np.float32).reshape(8, 8)


def test_chunks_of_shards_count_towards_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Count the chunks of shards: many shards may share a few bytes with an index of a million empty chunks."""
    write_zarr_item(tmp_path / "item", {META: VALUES}, StorageForm(zarr3=True, chunks_per_shard=2))
    assert len([*read_item(tmp_path / "item").arrays[0].stored_chunks()]) == 16
    monkeypatch.setattr(orbax_chunks, "MAX_VALUES", 16)
    assert "claims more than 16 chunks" in refused(tmp_path / "item").what


def test_links_to_folders_are_not_followed(tmp_path: Path):
    """Do not follow two links to their own folder, which would be 2^40 folders."""
    write_zarr_item(tmp_path / "item", {META: VALUES}, StorageForm(zarr3=True, ocdbt=False))
    for name in ("a", "b"):
        os.symlink(".", tmp_path / "item" / "w" / name)
    assert refused(tmp_path / "item").what == f"{tmp_path / 'item/w/a'} is not a file"


def test_links_to_chunk_files_are_followed(tmp_path: Path):
    write_zarr_item(tmp_path / "item", {META: VALUES}, StorageForm(ocdbt=False))
    chunk = tmp_path / "item" / "w" / "0.0"
    os.symlink(chunk.rename(tmp_path / "elsewhere"), chunk)
    assert len([*read_item(tmp_path / "item").arrays[0].stored_chunks()]) == 16
