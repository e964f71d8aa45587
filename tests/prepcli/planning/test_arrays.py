"""Copies of arrays in one chunk, in chunks and in parts, against NumPy, and the checksum blocks of chunks."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prepcli.algebra.axis_map import AxisMap
from prepcli.algebra.boxes import Box, full_box, strides
from prepcli.algebra.grids import ArrayPart, ArrayParts, ChunkTable, StridedChunks, run_parts
from prepcli.planning import arrays as stored_arrays
from prepcli.planning.arrays import (
    Array,
    Location,
    assign_block_numbers,
    chunk_blocks,
    parted_array,
    whole_array,
)
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


@settings(deadline=None)
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


@settings(deadline=None, max_examples=60)
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
