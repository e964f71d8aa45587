"""The index algebra against whole-array NumPy: any box, either direction, any chunk grid."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prepcli.planning.boxes import full_box, split_merged_range, strides
from prepcli.planning.grids import ChunkGrid, ExplicitPlacement, StridedPlacement
from prepcli.planning.strided_copies import Region, StridedCopy, leaf_box_copies, region_copies
from tests.helpers.strategies import axis_maps, boxes, leaf_by_numpy, random_tensors
from trainer.models.axis_map import AxisMap, bind_row, parse_row

ITEM = 4


def move(copy: StridedCopy, tensor: np.ndarray, other: np.ndarray, back: bool = False) -> int:
    """Run a copy on byte arrays, element by element; `back` reads it right to left. Returns the bytes moved."""
    for index in itertools.product(*(range(n) for n, _, _ in copy.dims)):
        here = copy.tensor_offset + sum(i * step for i, (_, step, _) in zip(index, copy.dims))
        there = copy.file_offset + sum(i * step for i, (_, _, step) in zip(index, copy.dims))
        assert min(here, there) >= 0
        if back:
            tensor[here : here + copy.width] = other[there : there + copy.width]
        else:
            other[there : there + copy.width] = tensor[here : here + copy.width]
    return copy.nbytes


def as_bytes(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


@given(axis_maps(), st.data())
def test_any_box_of_a_leaf_is_what_numpy_says(row: AxisMap, data):
    tensors, box = random_tensors(row), data.draw(boxes(row.leaf_shape))
    expected = leaf_by_numpy(row, tensors)[tuple(slice(*r) for r in box)]
    out = np.zeros(expected.size * ITEM, np.uint8)
    for name, copy in leaf_box_copies(row, box, ITEM):
        move(copy, as_bytes(tensors[name]), out)
    assert np.array_equal(out, as_bytes(expected))


def in_chunks(whole_leaf: np.ndarray, grid: ChunkGrid, slot: int, where: dict) -> np.ndarray:
    out = np.zeros(max(where.values(), default=0) + slot, np.uint8)
    for index, offset in where.items():
        cell = np.zeros(grid.chunk_shape, np.int32)
        part = whole_leaf[tuple(slice(i * c, (i + 1) * c) for i, c in zip(index, grid.chunk_shape))]
        cell[tuple(slice(0, n) for n in part.shape)] = part
        out[offset : offset + cell.size * ITEM] = as_bytes(cell)
    return out


@settings(max_examples=150)
@given(axis_maps(), st.data())
def test_boxes_of_tensors_fill_any_chunk_grid_and_come_back(row: AxisMap, data):
    grid = ChunkGrid(row.leaf_shape, tuple(data.draw(st.integers(1, n)) for n in row.leaf_shape))
    slot = math.prod(grid.chunk_shape) * ITEM + data.draw(st.integers(0, 3))
    indices = list(itertools.product(*(range(n) for n in grid.chunk_counts)))
    if data.draw(st.booleans()):
        places = StridedPlacement(0, 0, (0,) * len(grid.chunk_counts), strides(grid.chunk_counts, slot))
        where = {index: places.find(index)[1] for index in indices}
    else:
        order = data.draw(st.permutations(range(len(indices))))
        where = {index: i * slot for i, index in zip(order, indices)}
        places = ExplicitPlacement({index: (0, offset) for index, offset in where.items()})
    tensors = random_tensors(row)
    expected = in_chunks(leaf_by_numpy(row, tensors), grid, slot, where)
    out, moved = np.zeros_like(expected), 0
    for name, at in row.tensors():
        region = Region(row, tuple(at.items()), grid, places, ITEM)
        cut = data.draw(st.integers(0, row.source_shape[0])) if row.source_shape else 0
        rows = [(0, cut), (cut, row.source_shape[0])] if row.source_shape else [None]
        back = np.zeros_like(as_bytes(tensors[name]))
        for span in rows:
            for copy in region_copies(region, (span, *full_box(row.source_shape[1:])) if span else ()):
                moved += move(copy, as_bytes(tensors[name]), out)
                move(copy, back, out, back=True)
        taken = back.view(np.int32).reshape(row.source_shape)
        assert np.array_equal(taken[taken != 0], tensors[name][taken != 0])
    assert np.array_equal(out, expected)
    assert moved == np.count_nonzero(leaf_by_numpy(row, tensors)) * ITEM


CASES = {  # text -> (sizes, the leaf by hand from its tensors)
    "stack": (
        "layers heads head_dim embed <- h.{layers}.q: (heads head_dim) embed",
        lambda t: np.stack([t[f"h.{i}.q"].reshape(2, 6, 4) for i in range(3)]),
    ),
    "conv1d, a third of it": (
        "layers heads head_dim embed <- h.{layers}.c: embed (qkv=1 heads head_dim)",
        lambda t: np.stack([t[f"h.{i}.c"].reshape(4, 3, 2, 6)[:, 1].transpose(1, 2, 0) for i in range(3)]),
    ),
    "fused per head": (
        "layers heads head_dim embed <- h.{layers}.qkv: (heads qkv=2 head_dim) embed",
        lambda t: np.stack([t[f"h.{i}.qkv"].reshape(2, 3, 6, 4)[:, 2] for i in range(3)]),
    ),
    "rope order": (
        "layers heads (two half) embed <- h.{layers}.q: (heads half two) embed",
        lambda t: np.stack(
            [t[f"h.{i}.q"].reshape(2, 3, 2, 4).transpose(0, 2, 1, 3).reshape(2, 6, 4) for i in range(3)]
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
    "0-d tensors": ("layers <- h.{layers}.s:", lambda t: np.stack([t[f"h.{i}.s"] for i in range(3)])),
    "0-d leaf": ("<- s:", lambda t: t["s"]),
    "unit dims": ("1 embed 1 <- n: 1 embed", lambda t: t["n"].reshape(1, 4, 1)),
}
SIZES = {"layers": 3, "heads": 2, "kv": 1, "head_dim": 6, "half": 3, "two": 2, "qkv": 3, "embed": 4, "mlp": 5}
SIZES |= {"experts": 2, "blocks": 3, "slot": 2}


@pytest.mark.parametrize("case", CASES)
def test_the_forms_that_families_need(case: str):
    text, by_hand = CASES[case]
    row = bind_row(parse_row(text), SIZES | {"local": (1, 4, 5)})
    tensors = random_tensors(row)
    out = np.zeros(math.prod(row.leaf_shape) * ITEM, np.uint8)
    for name, copy in leaf_box_copies(row, full_box(row.leaf_shape), ITEM):
        move(copy, as_bytes(tensors[name]), out)
    assert np.array_equal(out.view(np.int32).reshape(row.leaf_shape), by_hand(tensors))


def test_an_atom_in_braces_that_the_leaf_lacks_is_one_leaf_per_index():
    row = bind_row(parse_row("heads head_dim embed <- h.{layers}.q: (heads head_dim) embed"), SIZES)
    assert [f.atom for f in row.unscanned_factors] == ["layers"]
    tensors = random_tensors(row)
    for layer in range(3):
        out = np.zeros(2 * 6 * 4 * ITEM, np.uint8)
        for name, copy in leaf_box_copies(row, full_box(row.leaf_shape), ITEM, {"layers": layer}):
            move(copy, as_bytes(tensors[name]), out)
        assert np.array_equal(out, as_bytes(tensors[f"h.{layer}.q"]))


def test_a_box_that_is_padding_only_needs_nothing():
    row = bind_row(parse_row("vocab embed <- wte: vocab embed"), {"vocab": 11, "embed": 4}, {"vocab": 16})
    assert list(leaf_box_copies(row, ((11, 16), (0, 4)))) == []
    assert sum(c.nbytes for _, c in leaf_box_copies(row, ((9, 16), (0, 4)))) == 8


def test_a_chunk_grid_is_arithmetic():
    row = bind_row(
        parse_row("layers heads head_dim embed <- h.{layers}.q: (heads head_dim) embed"),
        {"layers": 40, "heads": 40, "head_dim": 128, "embed": 5120},
    )
    grid = ChunkGrid(row.leaf_shape, (1, 10, 128, 80))
    places = StridedPlacement(0, 0, (0, 0, 0, 0), strides(grid.chunk_counts, 10 * 128 * 80 * 2))
    (copy,) = region_copies(Region(row, (("layers", 7),), grid, places, 2), full_box(row.source_shape))
    assert copy.run_nbytes == 5120 * 5120 * 2  # 256 chunks, one after another
    assert copy.width == 80 * 2


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.data())
def test_cut_merged_tiles_a_range_in_order(extents: list[int], data):
    total = math.prod(extents)
    low, high = sorted((data.draw(st.integers(0, total)), data.draw(st.integers(0, total))))
    flat = np.arange(total).reshape(extents)
    found = [i for box in split_merged_range((low, high), extents) for i in flat[tuple(slice(*r) for r in box)].ravel()]
    assert found == list(range(low, high))
