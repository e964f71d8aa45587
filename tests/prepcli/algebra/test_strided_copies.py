"""Index algebra compared with whole-array NumPy: any box, either direction, any chunk grid."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prepcli.algebra.axis_map import AxisMap, bind_row
from prepcli.algebra.boxes import full_box, split_merged_range, strides
from prepcli.algebra.grids import ChunkGrid, ChunkTable, StridedChunks
from prepcli.algebra.rows import parse_row
from prepcli.algebra.strided_copies import (
    StridedCopy,
)
from prepcli.planning.arrays import Array, MappedArray
from tests.helpers.leaf_copies import leaf_box_copies
from tests.helpers.strategies import axis_maps, boxes, leaf_by_numpy, random_tensors

ITEM = 4


def move(
    copy: StridedCopy, tensor: np.ndarray, file_data: np.ndarray, is_reversed: bool = False
) -> int:
    """Run a copy on byte arrays, element by element, from tensor to file or reversed, and return the bytes copied."""
    for index in itertools.product(*(range(n) for n, _, _ in copy.dims)):
        tensor_byte = copy.tensor_offset + sum(
            i * step for i, (_, step, _) in zip(index, copy.dims)
        )
        file_byte = copy.file_offset + sum(i * step for i, (_, _, step) in zip(index, copy.dims))
        assert min(tensor_byte, file_byte) >= 0
        if is_reversed:
            tensor[tensor_byte : tensor_byte + copy.width] = file_data[
                file_byte : file_byte + copy.width
            ]
        else:
            file_data[file_byte : file_byte + copy.width] = tensor[
                tensor_byte : tensor_byte + copy.width
            ]
    return copy.nbytes


def as_bytes(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


@given(axis_maps(), st.data())
def test_leaf_box_copies_match_numpy(row: AxisMap, data):
    tensors, box = random_tensors(row), data.draw(boxes(row.leaf_shape))
    expected = leaf_by_numpy(row, tensors)[tuple(slice(*r) for r in box)]
    out = np.zeros(expected.size * ITEM, np.uint8)
    for name, copy in leaf_box_copies(row, box, itemsize=ITEM):
        move(copy, as_bytes(tensors[name]), out)
    assert np.array_equal(out, as_bytes(expected))


def in_chunks(
    whole_leaf: np.ndarray, grid: ChunkGrid, chunk_stride: int, offsets: dict
) -> np.ndarray:
    out = np.zeros(max(offsets.values(), default=0) + chunk_stride, np.uint8)
    for index, offset in offsets.items():
        chunk = np.zeros(grid.chunk_shape, np.int32)
        part = whole_leaf[tuple(slice(i * c, (i + 1) * c) for i, c in zip(index, grid.chunk_shape))]
        chunk[tuple(slice(0, n) for n in part.shape)] = part
        out[offset : offset + chunk.size * ITEM] = as_bytes(chunk)
    return out


@given(axis_maps(), st.data())
def test_copies_round_trip_on_any_chunk_grid(row: AxisMap, data):
    grid = ChunkGrid(row.leaf_shape, tuple(data.draw(st.integers(1, n)) for n in row.leaf_shape))
    chunk_stride = math.prod(grid.chunk_shape) * ITEM + data.draw(st.integers(0, 3))
    indices = list(itertools.product(*(range(n) for n in grid.chunk_counts)))
    if data.draw(st.booleans()):
        placement = StridedChunks(
            0, 0, (0,) * len(grid.chunk_counts), strides(grid.chunk_counts, chunk_stride)
        )
        offsets = {index: placement.find(index)[1] for index in indices}
    else:
        order = data.draw(st.permutations(range(len(indices))))
        offsets = {index: i * chunk_stride for i, index in zip(order, indices)}
        places = {index: (0, offset) for index, offset in offsets.items()}
        placement = ChunkTable.from_positions((0,) * len(grid.shape), grid.chunk_counts, places)
    tensors = random_tensors(row)
    expected = in_chunks(leaf_by_numpy(row, tensors), grid, chunk_stride, offsets)
    out, copied_nbytes = np.zeros_like(expected), 0
    for name, stacked in row.tensors():
        leaf = Array("leaf", "int32", grid.shape, grid.chunk_shape, placement)
        region = MappedArray(row, tuple(stacked.items()), leaf)
        middle = data.draw(st.integers(0, row.source_shape[0])) if row.source_shape else 0
        spans = [(0, middle), (middle, row.source_shape[0])] if row.source_shape else [None]
        restored = np.zeros_like(as_bytes(tensors[name]))
        for span in spans:
            for copy in region.copies((span, *full_box(row.source_shape[1:])) if span else ()):
                copied_nbytes += move(copy, as_bytes(tensors[name]), out)
                move(copy, restored, out, is_reversed=True)
        values = restored.view(np.int32).reshape(row.source_shape)
        assert np.array_equal(values[values != 0], tensors[name][values != 0])
    assert np.array_equal(out, expected)
    assert copied_nbytes == np.count_nonzero(leaf_by_numpy(row, tensors)) * ITEM


CASES = {  # name -> (row, the leaf computed from its tensors with NumPy)
    "stack": (
        "layers heads head_dim embed <- h.{layers}.q: (heads head_dim) embed",
        lambda t: np.stack([t[f"h.{i}.q"].reshape(2, 6, 4) for i in range(3)]),
    ),
    "conv1d, a third of it": (
        "layers heads head_dim embed <- h.{layers}.c: embed (qkv=1 heads head_dim)",
        lambda t: np.stack(
            [t[f"h.{i}.c"].reshape(4, 3, 2, 6)[:, 1].transpose(1, 2, 0) for i in range(3)]
        ),
    ),
    "fused per head": (
        "layers heads head_dim embed <- h.{layers}.qkv: (heads qkv=2 head_dim) embed",
        lambda t: np.stack([t[f"h.{i}.qkv"].reshape(2, 3, 6, 4)[:, 2] for i in range(3)]),
    ),
    "rope order": (
        "layers heads (two half) embed <- h.{layers}.q: (heads half two) embed",
        lambda t: np.stack(
            [
                t[f"h.{i}.q"].reshape(2, 3, 2, 4).transpose(0, 2, 1, 3).reshape(2, 6, 4)
                for i in range(3)
            ]
        ),
    ),
    "unequal parts, the middle one": (
        "layers kv head_dim embed <- h.{layers}.qkv: (heads head_dim | >kv head_dim | kv head_dim) embed",
        lambda t: np.stack([t[f"h.{i}.qkv"][12:18].reshape(1, 6, 4) for i in range(3)]),
    ),
    "two stacked atoms": (
        "layers experts mlp embed <- h.{layers}.e.{experts}.w: mlp embed",
        lambda t: np.stack([np.stack([t[f"h.{i}.e.{j}.w"] for j in range(2)]) for i in range(3)]),
    ),
    "braces that merge and hold": (
        "blocks embed <- h.{blocks slot=1}.n: embed",
        lambda t: np.stack([t[f"h.{2 * i + 1}.n"] for i in range(3)]),
    ),
    "braces that count through a list": (
        "layers embed <- h.{layers@local}.n: embed",
        lambda t: np.stack([t[f"h.{i}.n"] for i in (1, 4, 5)]),
    ),
    "0-d tensors": (
        "layers <- h.{layers}.s:",
        lambda t: np.stack([t[f"h.{i}.s"] for i in range(3)]),
    ),
    "0-d leaf": ("<- s:", lambda t: t["s"]),
    "unit dims": ("1 embed 1 <- n: 1 embed", lambda t: t["n"].reshape(1, 4, 1)),
}
SIZES = {
    "layers": 3,
    "heads": 2,
    "kv": 1,
    "head_dim": 6,
    "half": 3,
    "two": 2,
    "qkv": 3,
    "embed": 4,
    "mlp": 5,
}
SIZES |= {"experts": 2, "blocks": 3, "slot": 2}


@pytest.mark.parametrize("case", CASES)
def test_leaf_box_copies_match_forms_of_families(case: str):
    text, by_hand = CASES[case]
    row = bind_row(parse_row(text), SIZES | {"local": (1, 4, 5)})
    tensors = random_tensors(row)
    out = np.zeros(math.prod(row.leaf_shape) * ITEM, np.uint8)
    for name, copy in leaf_box_copies(row, full_box(row.leaf_shape), itemsize=ITEM):
        move(copy, as_bytes(tensors[name]), out)
    assert np.array_equal(out.view(np.int32).reshape(row.leaf_shape), by_hand(tensors))


def test_leaf_box_copies_read_one_unscanned_layer():
    row = bind_row(parse_row("heads head_dim embed <- h.{layers}.q: (heads head_dim) embed"), SIZES)
    assert [f.atom for f in row.unscanned_factors] == ["layers"]
    tensors = random_tensors(row)
    for layer in range(3):
        out = np.zeros(2 * 6 * 4 * ITEM, np.uint8)
        for name, copy in leaf_box_copies(
            row, full_box(row.leaf_shape), itemsize=ITEM, unscanned_indices={"layers": layer}
        ):
            move(copy, as_bytes(tensors[name]), out)
        assert np.array_equal(out, as_bytes(tensors[f"h.{layer}.q"]))


def test_leaf_box_copies_skip_padding():
    row = bind_row(
        parse_row("vocab embed <- wte: vocab embed"), {"vocab": 11, "embed": 4}, {"vocab": 16}
    )
    assert list(leaf_box_copies(row, ((11, 16), (0, 4)))) == []
    assert sum(c.nbytes for _, c in leaf_box_copies(row, ((9, 16), (0, 4)))) == 8


def test_copies_of_many_chunks_are_one_copy():
    row = bind_row(
        parse_row("layers heads head_dim embed <- h.{layers}.q: (heads head_dim) embed"),
        {"layers": 40, "heads": 40, "head_dim": 128, "embed": 5120},
    )
    grid = ChunkGrid(row.leaf_shape, (1, 10, 128, 80))
    places = StridedChunks(0, 0, (0, 0, 0, 0), strides(grid.chunk_counts, 10 * 128 * 80 * 2))
    leaf = Array("q", "bfloat16", grid.shape, grid.chunk_shape, places)
    (copy,) = leaf.part(row, (("layers", 7),)).copies(full_box(row.source_shape))
    assert copy.run_nbytes == 5120 * 5120 * 2  # 256 chunks, one after another
    assert copy.width == 80 * 2


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.data())
def test_split_merged_range_tiles_a_range_in_order(extents: list[int], data):
    total = math.prod(extents)
    low, high = sorted((data.draw(st.integers(0, total)), data.draw(st.integers(0, total))))
    flat = np.arange(total).reshape(extents)
    indices = [
        i
        for box in split_merged_range((low, high), extents)
        for i in flat[tuple(slice(*r) for r in box)].ravel()
    ]
    assert indices == list(range(low, high))
