"""Bytes from one order into another, against NumPy's own transpose: any width, any depth in a buffer, both ways."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from prepcli.engine.permute import LINE, gather, scatter
from prepcli.planning.boxes import strides
from prepcli.planning.moves import Copy, merge
from prepcli.planning.slabs import Slab

ROWS = LINE // 4
SHAPES = st.lists(st.sampled_from([1, 2, 3, ROWS - 1, ROWS, ROWS + 1, 2 * ROWS + 5]), max_size=4).filter(
    lambda shape: math.prod(shape) <= 20_000
)
WIDTHS = st.sampled_from([1, 2, 3, 4, 6, 8, 16])


def in_order(shape: list[int], order: list[int], width: int, at: int) -> Copy:
    """All elements of an array that begins at byte `at` of a tensor, in the order of its transpose."""
    here, there = strides(shape, width), strides([shape[axis] for axis in order], width)
    return merge(Copy(at, 0, 0, width, tuple((shape[a], here[a], step) for a, step in zip(order, there))))


def placed(data: np.ndarray, lead: int) -> np.ndarray:
    """The bytes, `lead` bytes deep in a buffer."""
    buffer = np.zeros(lead + data.size, np.uint8)
    buffer[lead:] = data
    return buffer[lead:]


@settings(deadline=None)
@given(SHAPES, WIDTHS, st.integers(0, 9), st.data())
def test_any_order_there_and_back(shape: list[int], width: int, lead: int, data):
    order = data.draw(st.permutations(range(len(shape))))
    start = data.draw(st.sampled_from([0, 24, 1000]))
    values = np.random.default_rng(0).integers(0, 256, [*shape, width], np.uint8)
    tensor = placed(values.reshape(-1), lead)
    moved = values.transpose([*order, len(shape)]).reshape(-1)
    copy = in_order(shape, order, width, start)
    slab = Slab(0, start, tensor.size, (copy,), (copy,))
    out = gather(slab, tensor, placed(np.zeros_like(moved), lead))
    assert np.array_equal(out, moved)
    back = scatter(slab, placed(moved, lead), np.zeros_like(tensor))
    assert np.array_equal(back, tensor)


@settings(deadline=None)
@given(st.integers(1, 30), st.integers(1, 30), st.data())
def test_several_copies_follow_one_another(rows: int, columns: int, data):
    cut = data.draw(st.integers(0, rows))
    values = np.random.default_rng(1).integers(0, 2**31, (rows, columns), np.int32)
    tensor = values.reshape(-1).view(np.uint8)
    parts = [(0, cut), (cut, rows)]
    copies = tuple(in_order([high - low, columns], [1, 0], 4, low * columns * 4) for low, high in parts if low < high)
    slab = Slab(0, 0, tensor.size, copies, copies)
    expected = np.concatenate([values[low:high].T.reshape(-1) for low, high in parts])
    out = gather(slab, tensor, np.zeros(tensor.size + 40, np.uint8))
    assert np.array_equal(out.view(np.int32), expected)
    assert np.array_equal(scatter(slab, out, np.zeros_like(tensor)), tensor)


def test_nothing_beside_the_runs_is_touched():
    copy = Copy(8, 0, 0, 4, ((3, 16, 4),))  # one of four columns
    tensor = np.full(48, 7, np.uint8)
    scatter(Slab(0, 0, 48, (copy,), ()), np.arange(12, dtype=np.uint8), tensor)
    assert tensor.reshape(3, 4, 4)[:, 2].reshape(-1).tolist() == list(range(12))
    assert (np.delete(tensor.reshape(3, 4, 4), 2, axis=1) == 7).all()
