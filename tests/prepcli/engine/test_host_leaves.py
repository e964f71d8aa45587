"""Leaves in memory as the engine reads files."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prepcli.engine.files import PAGE, allocate_buffer
from prepcli.engine.host_leaves import HostLeafReader
from prepcli.planning.strided_copies import StridedCopy
from trainer.models.checkpoint_store import HostLeaf


def leaf(array: np.ndarray) -> HostLeaf:
    return HostLeaf(array.shape, array.dtype.name, lambda: array)


@given(st.integers(0, 9000), st.integers(1, 3000))
def test_a_run_comes_back_as_deep_in_a_page_as_it_lies(offset: int, width: int):
    array = np.arange(12000, dtype=np.uint8)
    into = allocate_buffer(4 * PAGE)
    found = HostLeafReader([leaf(array)]).read_run(StridedCopy(0, 0, offset, width), into)
    assert found.tobytes() == array[offset : offset + width].tobytes()
    assert (found.ctypes.data - offset) % PAGE == 0


def test_runs_follow_each_other():
    array = np.arange(4 * 5 * 6, dtype=np.int32).reshape(4, 5, 6)
    copies = [StridedCopy(0, 0, 24, 8, ((4, 48, 120), (2, 24, 24))), StridedCopy(0, 0, 0, 24)]
    found = HostLeafReader([leaf(array)]).read_runs(copies, allocate_buffer(PAGE)).view(np.int32)
    assert found.tolist() == [*array[:, 1:3, :2].reshape(-1).tolist(), *array[0, 0].tolist()]


def test_a_leaf_is_fetched_once_and_let_go_after_its_last_byte():
    class Array(np.ndarray):
        pass

    fetched: list[weakref.ref[np.ndarray]] = []

    def fetch() -> np.ndarray:
        array = np.zeros(100, np.uint8).view(Array)
        fetched.append(weakref.ref(array))
        return array

    leaves, into = (
        HostLeafReader([HostLeaf((100,), "uint8", fetch), leaf(np.zeros((), np.int32))]),
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


def test_arrays_of_any_order_and_dtype_are_taken():
    array = np.arange(6, dtype=np.float32).reshape(2, 3).T
    found = HostLeafReader([leaf(array)]).read_run(StridedCopy(0, 0, 0, 24), allocate_buffer(PAGE))
    assert found.view(np.float32).tolist() == [0, 3, 1, 4, 2, 5]
    assert HostLeafReader([leaf(np.array([True, False]))]).read_run(
        StridedCopy(0, 0, 0, 2), allocate_buffer(PAGE)
    ).tolist() == [1, 0]


@pytest.mark.parametrize("fetched", [np.zeros((2, 3), np.float32), np.zeros((3, 2), np.float16)])
def test_what_is_not_what_was_promised_is_an_error(fetched: np.ndarray):
    leaves = HostLeafReader([HostLeaf((3, 2), "float32", lambda: fetched)])
    with pytest.raises(ValueError, match=r"a leaf of \(3, 2\) float32 was fetched as"):
        leaves.read_run(StridedCopy(0, 0, 0, 24), allocate_buffer(PAGE))
