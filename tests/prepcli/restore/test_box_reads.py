"""Windows of tensors compared with whole-array NumPy: any box, any placement, any split. Threads that read them."""

from __future__ import annotations

import itertools
import math
import threading

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from prepcli.algebra.axis_map import AxisMap
from prepcli.algebra.boxes import Box, strides, volume
from prepcli.algebra.strided_copies import StridedCopy, leaf_box_parts, part_copies, tensor_box
from prepcli.engine.budget import Budget, BufferPool
from prepcli.engine.files import PAGE
from prepcli.planning.arrays import location_copies, whole_array
from prepcli.restore.box_reads import (
    StoppedReadsError,
    file_strides,
    merge_windows,
    run_jobs,
    span_nbytes,
    split_into_spans,
    split_window,
)
from prepcli.stores.buffers import ByteArray
from tests.helpers.plans import flat
from tests.helpers.strategies import axis_maps, boxes, leaf_by_numpy, random_tensors

DTYPE = "float32"
ITEM = 4


def elements(copy: StridedCopy) -> list[tuple[int, int]]:
    """Return (tensor offset, file offset) of each byte of a copy."""
    moves = itertools.product(*(range(count) for count, _, _ in copy.dims), range(copy.width))
    strides_of = [*((tensor, file) for _, tensor, file in copy.dims), (1, 1)]
    starts = (copy.tensor_offset, copy.file_offset)

    def offset(index: tuple[int, ...], side: int) -> int:
        return starts[side] + sum(i * step[side] for i, step in zip(index, strides_of))

    return [(offset(index, 0), offset(index, 1)) for index in moves]


@st.composite
def shaped_boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """Draw a shape and boxes in it that are not empty."""
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    return shape, [draw(boxes(shape).filter(volume)) for _ in range(draw(st.integers(1, 4)))]


@given(axis_maps(), st.data())
def test_windows_of_the_parts_of_a_box_fill_it(row: AxisMap, data: st.DataObject):
    tensors, box = random_tensors(row), data.draw(boxes(row.leaf_shape))
    expected = leaf_by_numpy(row, tensors)[tuple(slice(*span) for span in box)]
    out = np.zeros(expected.size, tensors[next(iter(tensors))].dtype)
    for part in leaf_box_parts(row, box):
        window = tensor_box(row, part.atom_ranges)
        for piece in split_window(window, strides(row.source_shape), data.draw(st.integers(1, 5))):
            values = tensors[part.tensor_name][tuple(slice(*span) for span in piece)].reshape(-1)
            for copy in part_copies(row, part, window=piece):
                for tensor_offset, file_offset in elements(copy):
                    out[file_offset] = values[tensor_offset]
    np.testing.assert_array_equal(out.reshape(expected.shape), expected)


@given(shaped_boxes(), st.permutations(range(3)), st.booleans())
def test_copies_of_a_window_read_its_elements(
    drawn: tuple[tuple[int, ...], list[Box]], order: list[int], is_view: bool
):
    shape, (window, *_) = drawn
    tensor = np.arange(math.prod(shape), dtype=np.int32).reshape(shape)
    axes = [axis for axis in order if axis < len(shape)] if is_view else list(range(len(shape)))
    stored = np.ascontiguousarray(tensor.transpose(axes))
    view_strides = tuple(stored.transpose(np.argsort(axes)).strides)
    placement = (whole_array("w", DTYPE, shape, (0, 8), view_strides if is_view else None),)
    file_bytes = np.concatenate([np.zeros(8, np.uint8), stored.reshape(-1).view(np.uint8)])
    out = np.zeros(volume(window) * ITEM, np.uint8)
    for copy in location_copies(placement, window, window):
        for span in split_into_spans(copy, max_nbytes=24, min_gap_nbytes=9):
            assert span_nbytes(span) <= max(24, copy.width)
            for tensor_offset, file_offset in elements(span):
                out[tensor_offset] = file_bytes[file_offset]
    expected = tensor[tuple(slice(*span) for span in window)]
    np.testing.assert_array_equal(out.view(np.int32).reshape(expected.shape), expected)


@given(shaped_boxes(), st.integers(1, 40))
def test_merged_windows_cover_the_windows(drawn: tuple[tuple[int, ...], list[Box]], max_gap: int):
    shape, windows = drawn
    merged = merge_windows(windows, file_strides((flat("int8", shape),), shape, 1), max_gap)
    assert len(merged) <= len(windows)
    for window in windows:
        assert any(
            all(a <= low and high <= b for (low, high), (a, b) in zip(window, box))
            for box in merged
        )


@given(shaped_boxes(), st.integers(1, 20), st.permutations([1, 7, 50]))
def test_split_window_has_each_element_once(
    drawn: tuple[tuple[int, ...], list[Box]], max_volume: int, axis_strides: list[int]
):
    shape, (window, *_) = drawn
    counts = np.zeros(shape, int)
    for piece in split_window(window, axis_strides, max_volume):
        assert 0 < volume(piece) <= max_volume
        counts[tuple(slice(*span) for span in piece)] += 1
    expected = np.zeros(shape, int)
    expected[tuple(slice(*span) for span in window)] = 1
    np.testing.assert_array_equal(counts, expected)


def test_adjacent_windows_and_short_gaps_are_merged():
    axis_strides = (100, 1)
    rows: list[Box] = [((0, 2), (0, 50)), ((2, 4), (0, 50)), ((9, 10), (0, 50))]
    assert merge_windows(rows, axis_strides, 32) == [((0, 4), (0, 50)), ((9, 10), (0, 50))]
    columns: list[Box] = [((0, 4), (0, 5)), ((0, 4), (20, 30)), ((0, 4), (90, 100))]
    assert merge_windows(columns, axis_strides, 32) == [((0, 4), (0, 30)), ((0, 4), (90, 100))]
    assert file_strides((flat("int16", (3, 5)),), (3, 5), 2) == (10, 2)


def test_call_without_jobs_waits_for_no_buffer():
    buffers = BufferPool(Budget(PAGE, PAGE, 1))
    buffers.acquire(1)

    def run(job: int, buffer: ByteArray) -> None:
        raise AssertionError("there is no job")

    thread = threading.Thread(target=run_jobs, args=(iter(()), run, buffers, 2), daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()


def test_jobs_run_with_fewer_buffers_than_threads():
    numbers: list[int] = []

    def run(job: int, buffer: ByteArray) -> None:
        assert buffer.size > 0
        numbers.append(job)

    errors = run_jobs(iter(range(20)), run, BufferPool(Budget(PAGE, PAGE, 1)), 4)
    assert errors == []
    assert sorted(numbers) == list(range(20))


def test_stopped_call_drops_its_jobs_and_returns_an_error():
    numbers: list[int] = []

    def run(job: int, buffer: ByteArray) -> None:
        numbers.append(job)

    buffers = BufferPool(Budget(PAGE, PAGE, 1))
    errors = run_jobs(iter(range(20)), run, buffers, 1, is_stopped=lambda: len(numbers) == 3)
    assert numbers == [0, 1, 2]
    assert [type(error) for error in errors] == [StoppedReadsError]
