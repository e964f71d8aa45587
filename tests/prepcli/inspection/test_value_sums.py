"""Alignment of the dims of two tensors with the same values, compared with NumPy."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from prepcli.inspection.value_sums import Sums, align_dims


def sums_of(array: np.ndarray) -> list[Sums]:
    """Return the sums of an array of hashes along each dim."""
    axes = range(array.ndim)
    return [
        array.sum(axis=tuple(other for other in axes if other != axis), dtype=np.uint64)
        for axis in axes
    ]


def merged(array: np.ndarray, groups: list[list[int]]) -> np.ndarray:
    """Return an array with the axes of each group merged into one dim."""
    order = [axis for group in groups for axis in group]
    shape = [math.prod(array.shape[axis] for axis in group) for group in groups]
    return array.transpose(order).reshape(shape)


@settings(max_examples=60)
@given(st.lists(st.integers(2, 5), min_size=1, max_size=4), st.data())
def test_align_dims_finds_transposes_and_merges(extents: list[int], data):
    array = np.random.default_rng(0).integers(0, 1 << 63, extents, np.uint64)
    order = data.draw(st.permutations(range(len(extents))))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(extents) - 1)))) if len(extents) > 1 else []
    groups = [list(order[start:stop]) for start, stop in zip([0, *cuts], [*cuts, len(extents)])]
    other = merged(array, groups)
    alignment = align_dims(sums_of(array), sums_of(other))
    assert alignment is not None
    # Both arrays in the order of the axes are equal.
    views: list[np.ndarray] = []
    for dims, values in ((alignment.left, array), (alignment.right, other)):
        axes = [axis for dim in dims for axis in dim]
        split = values.reshape([alignment.extents[axis] for axis in axes])
        views.append(split.transpose([axes.index(axis) for axis in range(len(axes))]))
    assert np.array_equal(views[0], views[1])


def test_align_dims_of_other_values_is_none():
    a = np.arange(24, dtype=np.uint64).reshape(4, 6)
    assert align_dims(sums_of(a), sums_of(a[::-1])) is None
    assert align_dims(sums_of(a), sums_of(a.reshape(6, 4))) is None


def test_align_dims_of_equal_values_keeps_the_order():
    ones = np.ones((4, 6), np.uint64)
    alignment = align_dims(sums_of(ones), sums_of(ones))
    assert alignment is not None
    assert alignment.left == alignment.right == ((0,), (1,))


def test_align_dims_finds_swapped_axes_within_a_dim():
    array = np.random.default_rng(0).integers(0, 1 << 63, (8, 2, 6, 5), np.uint64)
    left = array.reshape(96, 5)
    right = array.transpose(0, 2, 1, 3).reshape(96, 5)
    alignment = align_dims(sums_of(left), sums_of(right))
    assert alignment is not None
    assert alignment.extents == (8, 2, 6, 5)
    assert alignment.right == ((0, 2, 1), (3,))
