"""Arrays: their copies against NumPy. Names in a training state, and the table of other libraries."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prepcli.algebra.axis_map import AxisMap
from prepcli.algebra.boxes import Box, full_box, strides
from prepcli.algebra.grids import ArrayPart, ArrayParts, ChunkTable, StridedChunks, run_parts
from prepcli.core.errors import DamagedError
from prepcli.formats.manifest import encode_manifest, parse_manifest
from prepcli.models.registry import FAMILIES
from prepcli.planning import arrays as stored_arrays
from prepcli.planning.arrays import (
    Array,
    Location,
    assign_block_numbers,
    chunk_blocks,
    identity_axis_map,
    parted_array,
    whole_array,
)
from prepcli.planning.libraries import (
    HF_LAYOUT,
    LIBRARIES,
    LIBRARIES_BY_LAYOUT,
    MAXTEXT,
    TUNIX,
    AdamNumbers,
    AdamSettings,
    Layout,
    LayoutScale,
    find_library,
    recorded_scale,
)
from prepcli.planning.tensors import PARAMS, find_slots, qualify, split_name
from tests.helpers.stored_arrays import read_tensor
from tests.helpers.strategies import axis_maps, leaf_by_numpy, random_tensors

ITEM = 4


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    box: list[tuple[int, int]] = []
    for extent in shape:
        start = draw(st.integers(0, extent - 1))
        box.append((start, draw(st.integers(start + 1, extent))))
    return tuple(box)


@st.composite
def arrays(draw: st.DrawFn, values: np.ndarray) -> tuple[Array, list[bytes]]:
    """Draw how an array is stored: as a view, in runs of a file, or in two boxes with own orders of dims."""
    shape = values.shape
    kind = draw(st.sampled_from(["view", "runs", "boxes"]))
    if kind == "view" or not shape:
        order = tuple(draw(st.permutations(range(len(shape)))))
        stored = values.transpose(order).copy("C")
        view = stored.transpose(tuple(order.index(dim) for dim in range(len(shape))))
        array = whole_array("w", "int32", shape, (0, 3), view.strides)
        return array, [b"abc" + stored.tobytes()]
    if kind == "runs":
        data = values.tobytes()
        cuts = draw(st.sets(st.integers(1, max(1, values.size - 1)), max_size=4))
        edges = sorted({0, *cuts, values.size} & {*range(values.size + 1)})
        content = b""
        runs: list[tuple[int, int]] = []
        for start, stop in itertools.pairwise(edges):
            content += b"gap"
            runs.append((len(content), (stop - start) * ITEM))
            content += data[start * ITEM : stop * ITEM]
        return parted_array("w", "int32", shape, run_parts(shape, ITEM, runs, file=1)), [
            b"",
            content,
        ]
    axis = draw(st.integers(0, len(shape) - 1))
    cut = draw(st.integers(0, shape[axis]))
    parts: list[ArrayPart] = []
    files: list[bytes] = []
    for start, stop in ((0, cut), (cut, shape[axis])):
        if start == stop:
            continue
        box = (*full_box(shape[:axis]), (start, stop), *full_box(shape[axis + 1 :]))
        part = values[tuple(slice(*span) for span in box)]
        stored = np.asfortranarray(part)
        parts.append(ArrayPart(box, len(files), 5, stored.strides))
        files.append(b"12345" + stored.tobytes("A"))
    return parted_array("w", "int32", shape, ArrayParts(tuple(parts))), files


@given(st.lists(st.integers(1, 5), max_size=3).map(tuple), st.data())
def test_copies_of_a_box_have_its_elements(shape: tuple[int, ...], data: st.DataObject):
    values = np.arange(1, math.prod(shape) + 1, dtype=np.int32).reshape(shape)
    array, files = data.draw(arrays(values))
    box = data.draw(boxes(shape))
    expected = values[tuple(slice(*span) for span in box)]
    assert np.array_equal(read_tensor(array, values, files, box), expected)
    moved = array.moved(2)
    assert np.array_equal(read_tensor(moved, values, [b"", b"", *files], box), expected)
    order = tuple(data.draw(st.permutations(range(len(shape)))))
    turned = values.transpose(order)
    assert np.array_equal(read_tensor(array.permuted(order), turned, files), turned)
    assert np.array_equal(read_tensor(array.mapped(), values, files, box), expected)


@given(row=axis_maps(padding=False), data=st.data())
def test_tensors_are_parts_of_an_array(row: AxisMap, data: st.DataObject):
    tensors = random_tensors(row)
    leaf = leaf_by_numpy(row, tensors)
    array, files = data.draw(arrays(leaf))
    for name, indices in row.tensors():
        values = tensors[name]
        tensor: Location = array.part(row, tuple(indices.items()))
        stored = read_tensor(tensor, values, files)
        # A tensor may have elements of other leaves too.
        assert np.array_equal(stored[stored != 0], values[stored != 0])
        assert np.count_nonzero(stored) * sum(1 for _ in row.tensors()) == np.count_nonzero(leaf)


def test_cut_keeps_the_first_indices():
    values = np.arange(12, dtype=np.int32).reshape(3, 4)
    array = whole_array("w", "int32", (3, 4), (0, 0))
    for axis, length in ((0, 2), (1, 3)):
        part = values.take(range(length), axis)
        view = array.cut(axis, length)
        assert view is not None
        assert np.array_equal(read_tensor(view, part, [values.tobytes()]), part)
    rows = array.cut(0, 2)
    assert rows is not None
    assert rows.is_contiguous
    assert array.mapped().cut(0, 2) is None
    chunks = StridedChunks(0, 0, (0, 0), (16, 16))
    assert replace(array, chunk_shape=(1, 4), chunks=chunks).cut(0, 2) is None


@pytest.mark.parametrize(
    ("places", "expected"),
    [
        ([(1, 8), (1, 20)], StridedChunks(1, 8, (1, 0), (24, 12))),
        ([(1, 20), (1, 8)], None),  # readers expect ascending offsets
        ([(1, 8), (2, 20)], None),
        ([(1, 8), (1, 20), (1, 33)], None),
    ],
)
def test_regular_chunks_of_a_table_are_strided(
    places: list[tuple[int, int]], expected: StridedChunks | None
):
    stop = (3, len(places))
    all_places = {(row, i): (row, 100 * i) for row in range(3) for i in range(len(places))}
    all_places |= {(1, i): place for i, place in enumerate(places)}
    table = ChunkTable.from_positions((0, 0), stop, all_places)
    chunks = table.within((1, 0), (2, len(places)))
    if expected is None:
        assert isinstance(chunks, ChunkTable)
    else:
        assert chunks == expected
    assert [chunks.find((1, i)) for i in range(len(places))] == places
    moved = table.moved(3)
    assert moved.find((2, 1)) == (5, 100)


def test_array_position_is_the_first_place_in_the_files():
    table = ChunkTable.from_positions((0,), (3,), {(0,): (1, 8), (1,): (0, 70), (2,): (0, 50)})
    array = Array("w", "int32", (6,), (2,), table)
    assert array.position == (0, 50)
    assert (array.file, array.offset) == (0, 50)
    assert not array.is_contiguous


def test_byte_range_ends_after_the_last_element():
    # The transpose [3, 2] of a matrix [2, 3]: its last element is at 2 * 4 + 1 * 12 = 20.
    view = whole_array("w", "float32", (3, 2), (0, 100), (4, 12))
    assert view.byte_range == (100, 124)
    assert whole_array("w", "float32", (3, 0), (0, 100)).byte_range == (100, 100)
    assert view.element_strides == (4, 12)
    assert whole_array("w", "float32", (3, 2), (0, 0)).element_strides == strides((3, 2), 4)


CHUNKS = st.lists(st.integers(1, 9), max_size=4).map(tuple)


@given(
    chunk=CHUNKS,
    dtype=st.sampled_from(["int8", "float16", "float64"]),
    block_nbytes=st.integers(8, 200),
)
def test_blocks_tile_a_chunk(chunk: tuple[int, ...], dtype: str, block_nbytes: int):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stored_arrays, "BLOCK_NBYTES", block_nbytes)
        chunk_split = chunk_blocks(chunk, dtype)
        blocks = list(chunk_split.overlapping(0, chunk_split.chunk_nbytes))
    assert [block.number for block in blocks] == list(range(chunk_split.block_count))
    assert (blocks[0].start, blocks[-1].stop) == (0, chunk_split.chunk_nbytes)
    assert all(a.stop == b.start for a, b in itertools.pairwise(blocks))
    assert all(block.stop - block.start <= max(block_nbytes, 8) for block in blocks)


@given(chunk=CHUNKS, block_nbytes=st.integers(8, 200), data=st.data())
def test_overlapping_returns_overlapping_blocks(
    chunk: tuple[int, ...], block_nbytes: int, data: st.DataObject
):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stored_arrays, "BLOCK_NBYTES", block_nbytes)
        chunk_split = chunk_blocks(chunk, "float32")
    low = data.draw(st.integers(0, chunk_split.chunk_nbytes - 1))
    high = data.draw(st.integers(low + 1, chunk_split.chunk_nbytes))
    everything = list(chunk_split.overlapping(0, chunk_split.chunk_nbytes))
    assert list(chunk_split.overlapping(low, high)) == [
        b for b in everything if b.start < high and b.stop > low
    ]


def test_block_numbers_continue_from_leaf_to_leaf():
    shapes = [
        ("a", (5, 4), (2, 4), "float32"),
        ("b", (), (), "int32"),
        ("c", (0, 3), (1, 3), "float32"),
    ]
    blocks = assign_block_numbers([*shapes, ("d", (1 << 20,), (1 << 19,), "float32")])
    assert [(leaf.first_number, leaf.stop_number) for leaf in blocks.values()] == [
        (0, 3),
        (3, 4),
        (4, 4),
        (4, 8),
    ]
    d = blocks["d"]
    assert [d.first_in_chunk((index,)) for index in range(math.prod(d.chunk_counts))] == [4, 6]


SHAPES = {"embed.tokens": (8, 4), "encoder.embed.tokens": (8, 4), "norm.scale": (4,)}


def leaves(*roots: str) -> dict[str, tuple[int, ...]]:
    return {f"{root}.{path}": shape for root in roots for path, shape in SHAPES.items()}


@pytest.mark.parametrize("slot", [PARAMS, "opt_state.adam.mu", ""])
def test_split_name_reverses_qualify(slot: str):
    assert split_name(qualify(slot, "h.0.attn.q.weight")) == (slot, "h.0.attn.q.weight")


def test_qualify_keeps_parameter_names():
    assert qualify(PARAMS, "wte.weight") == "wte.weight"


def test_find_slots_requires_every_parameter():
    state = leaves("params", "opt_state.adam.nu", "opt_state.adam.mu", "opt_state") | {
        "opt_state.adam.count": ()
    }
    assert find_slots(state, SHAPES) == ("opt_state", "opt_state.adam.mu", "opt_state.adam.nu")


@pytest.mark.parametrize(
    "damage",
    [
        lambda state: state.pop("opt_state.mu.norm.scale"),
        lambda state: state.update({"opt_state.mu.norm.scale": (1,)}),
    ],
)
def test_find_slots_ignores_incomplete_subtrees(damage):
    state = leaves("params", "opt_state.mu", "opt_state.nu")
    damage(state)
    assert find_slots(state, SHAPES) == ("opt_state.nu",)


def test_find_slots_searches_the_optimizer_state_only():
    assert find_slots(leaves("params", "ema"), SHAPES) == ()
    assert find_slots({"opt_state.x": (3,)}, {}) == ()


@given(st.lists(st.integers(1, 4), max_size=4).map(tuple))
def test_identity_axis_map_copies_the_whole_leaf(shape: tuple[int, ...]):
    axis_map = identity_axis_map("opt_state.count", shape)
    assert (axis_map.leaf_shape, axis_map.source_shape) == (shape, shape)
    assert list(axis_map.tensors()) == [("opt_state.count", {})]
    leaf = whole_array("opt_state.count", "float32", shape, (0, 0))
    (copy,) = leaf.part(axis_map).copies(full_box(shape))
    nbytes = 4
    for extent in shape:
        nbytes *= extent
    assert (copy.tensor_offset, copy.file_offset, copy.width, copy.dims) == (0, 0, nbytes, ())


SETTINGS = AdamSettings(lr=0.5, peak_lr=1.0, b1=0.9, b2=0.99, eps=1e-8, weight_decay=0.1)
NUMBERS = AdamNumbers(step=5, num_updates=4, settings=SETTINGS)


def test_layouts_of_the_table_are_those_of_the_option():
    assert {*LIBRARIES_BY_LAYOUT} == {*get_args(Layout)}


def test_each_layout_has_rows_in_a_family():
    in_families = {layout for family in FAMILIES.values() for layout in family.layouts}
    assert {*LIBRARIES_BY_LAYOUT} == {HF_LAYOUT, *in_families}


def test_layout_has_the_formats_of_its_entries():
    assert [entry.file_format for entry in LIBRARIES_BY_LAYOUT[HF_LAYOUT]] == ["safetensors", "dcp"]
    assert find_library(HF_LAYOUT).file_format == "safetensors"
    assert find_library(HF_LAYOUT, "dcp").title == "torch distributed checkpoint"


def test_items_of_one_name_have_one_place():
    places = {library.item.item: library.item for library in LIBRARIES if library.item}
    assert len(places) == len([library for library in LIBRARIES if library.item])


def test_bound_constants_are_the_numbers_of_the_state():
    assert TUNIX.state is not None
    assert TUNIX.state.optax is not None
    constants = TUNIX.state.optax.bind(NUMBERS).constants
    assert constants["step"] == ("uint32", 4)
    assert constants["opt_state.hyperparams.learning_rate"] == ("float32", 0.5)
    assert constants["opt_state.hyperparams.eps_root"] == ("float32", 0.0)


def test_folder_of_two_items_is_the_step():
    assert TUNIX.item is not None
    assert MAXTEXT.item is not None
    assert TUNIX.item.folder(7, has_state=True) == "7"
    assert TUNIX.item.folder(0) == "0/model_params"
    assert MAXTEXT.item.folder(7, has_state=True) == "7/items"


def test_record_has_the_settings_of_the_optimizer():
    record = NUMBERS.record(["random state"])
    assert (record["step"], record["updates"]) == (5, 4)
    assert record["optimizer"]["peak_lr"] == 1.0


MANIFEST = {
    "kind": "hf", "request": "", "plan": "", "config": {}, "tensors": {}, "prefixed": True, "tied": False
}  # fmt: skip
RECORD = {"sqrt": 64, "significant": "", "lost": 0, "digests": [[0, 8, "d"]]}


def is_scale_record(record: Mapping[str, object]) -> bool:
    """Return whether a manifest with the record is valid."""
    data = encode_manifest({**MANIFEST, "scales": {"w": record}})
    try:
        parse_manifest(Path("prep-manifest.json"), data)
    except DamagedError:
        return False
    return True


@pytest.mark.parametrize(
    "scale",
    [
        LayoutScale(64),
        LayoutScale(2560, power=-1, root_dtype="bfloat16"),
        LayoutScale(1, offset=1),
    ],
)
def test_recorded_scale_returns(scale: LayoutScale):
    assert is_scale_record({**RECORD, **scale.fields()})
    assert recorded_scale(scale.fields()) == scale


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("sqrt", 0),
        ("sqrt", 8.0),
        ("power", "1"),
        ("root", "float8"),
        ("offset", None),
        ("significant", "int8"),
        # Negative counts would cancel those of other tensors.
        ("lost", -1),
    ],
)
def test_record_with_an_invalid_value_is_refused(key: str, value: object):
    assert is_scale_record(RECORD)
    assert not is_scale_record(RECORD | {key: value})


@pytest.mark.parametrize("key", ["sqrt", "significant", "lost", "digests"])
def test_record_without_a_key_is_refused(key: str):
    assert not is_scale_record({name: RECORD[name] for name in RECORD.keys() - {key}})
