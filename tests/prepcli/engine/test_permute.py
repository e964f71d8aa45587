"""Gather and scatter compared with NumPy's transpose: any width, any page offset, tiled, and over threads."""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prepcli.algebra.boxes import strides
from prepcli.algebra.strided_copies import StridedCopy, merge_dims
from prepcli.engine import permute
from prepcli.engine.permute import gather, scatter
from prepcli.planning.slabs import Slab

SIDE = 16  # elements of 4 bytes along a tile
SHAPES = st.lists(
    st.sampled_from([1, 2, 3, SIDE - 1, SIDE, SIDE + 1, 2 * SIDE + 5]), max_size=4
).filter(lambda shape: math.prod(shape) <= 20_000)
WIDTHS = st.sampled_from([1, 2, 3, 4, 6, 8, 16])


@pytest.fixture(autouse=True, scope="module")
def small_tiles() -> Iterator[None]:
    """Make tiles and thread parts so small that small arrays have several."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(permute, "TILE_NBYTES", 4 * SIDE**2)
        patch.setattr(permute, "MAX_COLUMN_LENGTH", SIDE)
        # Columns of 16 elements with a stride of e.g. 64 bytes share cache sets, those with one of 60 bytes do not.
        patch.setattr(permute, "L1_WAY_NBYTES", 256)
        patch.setattr(permute, "L1_WAYS", 2)
        patch.setattr(permute, "MIN_PART_NBYTES", 1000)
        patch.setattr(permute, "threads", lambda: 3)
        yield


@pytest.fixture(scope="module")
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(3) as threads:
        yield threads


def transpose_copy(
    shape: list[int], order: list[int], width: int, tensor_offset: int
) -> StridedCopy:
    """Return the copy of a whole array, at a byte offset of a tensor, in the order of its transpose."""
    tensor_strides, reordered_strides = (
        strides(shape, width),
        strides([shape[axis] for axis in order], width),
    )
    return merge_dims(
        StridedCopy(
            tensor_offset,
            0,
            0,
            width,
            tuple(
                (shape[a], tensor_strides[a], stride) for a, stride in zip(order, reordered_strides)
            ),
        )
    )


def at_page_offset(data: np.ndarray, page_offset: int) -> np.ndarray:
    """Return a copy of the bytes that starts at a page offset of its buffer."""
    buffer = np.zeros(page_offset + data.size, np.uint8)
    buffer[page_offset:] = data
    return buffer[page_offset:]


@given(SHAPES, WIDTHS, st.integers(0, 9), st.booleans(), st.data())
def test_scatter_inverts_gather_for_any_transpose(
    pool, shape: list[int], width: int, page_offset: int, is_shared: bool, data
):
    threads = pool if is_shared else None
    order = data.draw(st.permutations(range(len(shape))))
    start = data.draw(st.sampled_from([0, 24, 1000]))
    values = np.random.default_rng(0).integers(0, 256, [*shape, width], np.uint8)
    tensor = at_page_offset(values.reshape(-1), page_offset)
    transposed = values.transpose([*order, len(shape)]).reshape(-1)
    copy = transpose_copy(shape, order, width, start)
    slab = Slab(0, start, tensor.size, (copy,), (copy,))
    out = gather(
        slab, tensor, out=at_page_offset(np.zeros_like(transposed), page_offset), pool=threads
    )
    assert np.array_equal(out, transposed)
    restored = scatter(
        slab, at_page_offset(transposed, page_offset), out=np.zeros_like(tensor), pool=threads
    )
    assert np.array_equal(restored, tensor)


@given(st.integers(1, 30), st.integers(1, 30), st.data())
def test_gather_packs_several_copies(rows: int, columns: int, data):
    cut = data.draw(st.integers(0, rows))
    values = np.random.default_rng(1).integers(0, 2**31, (rows, columns), np.int32)
    tensor = values.reshape(-1).view(np.uint8)
    parts = [(0, cut), (cut, rows)]
    copies = tuple(
        transpose_copy([high - low, columns], [1, 0], 4, low * columns * 4)
        for low, high in parts
        if low < high
    )
    slab = Slab(0, 0, tensor.size, copies, copies)
    expected = np.concatenate([values[low:high].T.reshape(-1) for low, high in parts])
    out = gather(slab, tensor, out=np.zeros(tensor.size + 40, np.uint8))
    assert np.array_equal(out.view(np.int32), expected)
    assert np.array_equal(scatter(slab, out, out=np.zeros_like(tensor)), tensor)


def test_scatter_changes_only_its_runs():
    copy = StridedCopy(8, 0, 0, 4, ((3, 16, 4),))  # one of four columns
    tensor = np.full(48, 7, np.uint8)
    scatter(Slab(0, 0, 48, (copy,), ()), np.arange(12, dtype=np.uint8), out=tensor)
    assert tensor.reshape(3, 4, 4)[:, 2].reshape(-1).tolist() == list(range(12))
    assert (np.delete(tensor.reshape(3, 4, 4), 2, axis=1) == 7).all()


def test_gather_splits_long_copies_over_threads(
    pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
):
    shapes: list[tuple[int, ...]] = []
    real = permute.assign_tiled

    def assign(target: np.ndarray, source: np.ndarray) -> None:
        shapes.append(target.shape)
        real(target, source)

    monkeypatch.setattr(permute, "assign_tiled", assign)
    copy = transpose_copy([100, 20], [1, 0], 4, 0)
    tensor = np.arange(2000, dtype=np.int32).view(np.uint8)
    out = gather(
        Slab(0, 0, 8000, (copy,), (copy,)), tensor, out=np.zeros(8000, np.uint8), pool=pool
    )
    assert sorted(shapes) == [(20, 32), (20, 34), (20, 34)]
    assert np.array_equal(out.view(np.int32).reshape(20, 100), np.arange(2000).reshape(100, 20).T)


def test_gather_raises_errors_of_threads(pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(permute, "assign_tiled", lambda target, source: 1 / 0)
    copy = transpose_copy([100, 20], [1, 0], 4, 0)
    with pytest.raises(ZeroDivisionError):
        gather(
            Slab(0, 0, 8000, (copy,), (copy,)),
            np.zeros(8000, np.uint8),
            out=np.zeros(8000, np.uint8),
            pool=pool,
        )
