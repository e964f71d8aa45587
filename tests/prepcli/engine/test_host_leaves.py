"""Host leaves: arrays in memory are read through the engine's reader interface."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prepcli.algebra.strided_copies import StridedCopy
from prepcli.engine.blobs import HostLeaf, HostLeafReader
from prepcli.engine.files import PAGE
from prepcli.stores.buffers import allocate_buffer


def leaf(array: np.ndarray) -> HostLeaf:
    return HostLeaf.whole(array.shape, array.dtype.name, fetch=lambda: array)


@given(st.integers(0, 9000), st.integers(1, 3000))
def test_read_run_keeps_page_offset(offset: int, width: int):
    array = np.arange(12000, dtype=np.uint8)
    into = allocate_buffer(4 * PAGE)
    data_read = HostLeafReader([leaf(array)]).read_run(StridedCopy(0, 0, offset, width), into)
    assert data_read.tobytes() == array[offset : offset + width].tobytes()
    assert (data_read.ctypes.data - offset) % PAGE == 0


def test_read_runs_packs_runs():
    array = np.arange(4 * 5 * 6, dtype=np.int32).reshape(4, 5, 6)
    copies = [StridedCopy(0, 0, 24, 8, ((4, 48, 120), (2, 24, 24))), StridedCopy(0, 0, 0, 24)]
    data_read = (
        HostLeafReader([leaf(array)]).read_runs(copies, allocate_buffer(PAGE)).view(np.int32)
    )
    assert data_read.tolist() == [*array[:, 1:3, :2].reshape(-1).tolist(), *array[0, 0].tolist()]


def test_leaf_is_fetched_once_and_released_at_its_end():
    class Array(np.ndarray):
        pass

    fetched: list[weakref.ref[np.ndarray]] = []

    def fetch() -> np.ndarray:
        array = np.zeros(100, np.uint8).view(Array)
        fetched.append(weakref.ref(array))
        return array

    leaves, into = (
        HostLeafReader(
            [HostLeaf.whole((100,), "uint8", fetch=fetch), leaf(np.zeros((), np.int32))]
        ),
        allocate_buffer(PAGE),
    )
    assert fetched == []
    leaves.read_run(StridedCopy(0, 0, 0, 60), into)
    leaves.read_run(StridedCopy(0, 1, 0, 4), into)
    gc.collect()
    assert len(fetched) == 1
    leaves.read_run(StridedCopy(60, 0, 60, 40), into)
    gc.collect()
    assert len(fetched) == 1
    assert fetched[0]() is None


def test_read_run_accepts_any_memory_order_and_dtype():
    array = np.arange(6, dtype=np.float32).reshape(2, 3).T
    data_read = HostLeafReader([leaf(array)]).read_run(
        StridedCopy(0, 0, 0, 24), allocate_buffer(PAGE)
    )
    assert data_read.view(np.float32).tolist() == [0, 3, 1, 4, 2, 5]
    assert HostLeafReader([leaf(np.array([True, False]))]).read_run(
        StridedCopy(0, 0, 0, 2), allocate_buffer(PAGE)
    ).tolist() == [1, 0]


@pytest.mark.parametrize("fetched", [np.zeros((2, 3), np.float32), np.zeros((3, 2), np.float16)])
def test_read_run_rejects_other_shape_or_dtype(fetched: np.ndarray):
    leaves = HostLeafReader([HostLeaf.whole((3, 2), "float32", fetch=lambda: fetched)])
    with pytest.raises(ValueError, match=r"a leaf of \(3, 2\) float32 was fetched as"):
        leaves.read_run(StridedCopy(0, 0, 0, 24), allocate_buffer(PAGE))
