"""Windows: boxes of a tensor that are read without the rest of the tensor.

The bytes of a window are buffered in C order of the window's own shape.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

from prepcli.algebra.boxes import Box, full_box, strides, volume
from prepcli.algebra.strided_copies import StridedCopy
from prepcli.planning.arrays import Location, location_copies


def file_strides(
    locations: Sequence[Location], shape: Sequence[int], item_nbytes: int
) -> tuple[int, ...]:
    """Return the bytes in the file from one index to the next, along each axis of a tensor.

    A float32 tensor [2, 3] in C order has (12, 4). If an axis has several distances, e.g. within a chunk and between
    chunks, the largest one is returned.
    """
    copies = location_copies(locations, full_box(shape))
    first = next(copies, StridedCopy(0, 0, 0, item_nbytes))
    tensor_strides = strides(shape, item_nbytes)
    result = list(tensor_strides)
    for axis, tensor_stride in enumerate(tensor_strides):
        # A loop belongs to this axis if its steps stay inside one index of the axis before it.
        stop_stride = tensor_stride * max(2, shape[axis])
        largest_stride = 0
        for _, loop_stride, file_stride in first.dims:
            if tensor_stride <= loop_stride < stop_stride:
                largest_stride = max(largest_stride, file_stride)
        if largest_stride:
            result[axis] = largest_stride
    return tuple(result)


def merge_windows(
    windows: Sequence[Box], axis_strides: Sequence[int], min_skipped_gap_nbytes: int
) -> list[Box]:
    """Merge windows if the box around them has no other elements, or only elements in short gaps of the file.

    Windows of rows 0 to 2 and 2 to 5 become rows 0 to 5.

    Returns:
        Boxes that cover the windows.
    """
    merged: list[Box] = []
    for window in windows:
        box = window
        while (
            other := _mergeable_box(box, merged, axis_strides, min_skipped_gap_nbytes)
        ) is not None:
            merged.remove(other)
            box = _union_box(box, other)
        merged.append(box)
    return merged


def _mergeable_box(
    box: Box, others: Sequence[Box], axis_strides: Sequence[int], min_skipped_gap_nbytes: int
) -> Box | None:
    for other in others:
        if _is_mergeable(box, other, axis_strides, min_skipped_gap_nbytes):
            return other
    return None


def _union_box(a: Box, b: Box) -> Box:
    return tuple((min(x[0], y[0]), max(x[1], y[1])) for x, y in zip(a, b))


def _is_mergeable(a: Box, b: Box, axis_strides: Sequence[int], min_skipped_gap_nbytes: int) -> bool:
    if volume(_union_box(a, b)) <= max(volume(a), volume(b)):
        return True  # one contains the other
    # The union of two boxes that differ along only one axis is a box, apart from the gap between them.
    different = [axis for axis in range(len(a)) if a[axis] != b[axis]]
    if len(different) != 1:
        return False
    (axis,) = different
    gap = max(a[axis][0], b[axis][0]) - min(a[axis][1], b[axis][1])
    return gap <= 0 or gap * axis_strides[axis] < min_skipped_gap_nbytes


def split_window(window: Box, axis_strides: Sequence[int], max_volume: int) -> Iterator[Box]:
    """Split a window into windows of at most `max_volume` elements, in the order of their bytes in the file.

    Args:
        window: Box of a tensor.
        axis_strides: Result of `file_strides`.
        max_volume: Maximum number of elements, at least 1.
    """
    # The axes closest together in the file are kept whole first, so that each part has few long runs of bytes.
    # E.g. window [4, 6] in C order and 8 elements: lengths 1 and 6, as 8 // 6 leaves 1 for axis 0.
    axes = sorted(range(len(window)), key=lambda axis: -axis_strides[axis])
    lengths = [stop - start for start, stop in window]
    remaining = max_volume
    for axis in reversed(axes):
        lengths[axis] = max(1, min(lengths[axis], remaining))
        remaining //= lengths[axis]
    ranges = [range(*window[axis], lengths[axis]) for axis in axes]
    for starts in itertools.product(*ranges):
        box = list(window)
        for axis, start in zip(axes, starts):
            box[axis] = (start, min(start + lengths[axis], window[axis][1]))
        yield tuple(box)


def span_nbytes(copy: StridedCopy) -> int:
    """Return the number of bytes in the file from a copy's first byte to its last, gaps included."""
    return copy.width + sum((count - 1) * file_stride for count, _, file_stride in copy.dims)


def split_into_spans(
    copy: StridedCopy, *, max_nbytes: int, min_skipped_gap_nbytes: int
) -> Iterator[StridedCopy]:
    """Split a copy into copies with one read each. A read includes short gaps of the file.

    Args:
        copy: The copy.
        max_nbytes: Maximum span of a copy, at least its width.
        min_skipped_gap_nbytes: Shorter gaps of the file are read too.
    """
    # `inner` is the span of the loops from `number` on. They are read at once, with their gaps.
    inner = copy.width
    number = len(copy.dims)
    while number and copy.dims[number - 1][2] - inner < min_skipped_gap_nbytes:
        count, _, file_stride = copy.dims[number - 1]
        span = (count - 1) * file_stride + inner
        if span > max_nbytes:
            break
        inner = span
        number -= 1
    if not number:
        yield copy
        return
    # The next loop is too long to read at once, or has long gaps. `group` of its steps are read together.
    *outer_dims, (count, tensor_stride, file_stride) = copy.dims[:number]
    inner_dims = copy.dims[number:]
    group = 1
    if file_stride - inner < min_skipped_gap_nbytes:
        group = max(1, (max_nbytes - inner) // file_stride + 1)
    index_ranges = [range(outer_count) for outer_count, _, _ in outer_dims]
    for *outer_indices, first in itertools.product(*index_ranges, range(0, count, group)):
        tensor_offset = copy.tensor_offset + first * tensor_stride
        file_offset = copy.file_offset + first * file_stride
        for index, (_, outer_tensor_stride, outer_file_stride) in zip(outer_indices, outer_dims):
            tensor_offset += index * outer_tensor_stride
            file_offset += index * outer_file_stride
        dims = inner_dims
        num_steps = min(group, count - first)
        if num_steps > 1:
            dims = ((num_steps, tensor_stride, file_stride), *inner_dims)
        yield replace(copy, tensor_offset=tensor_offset, file_offset=file_offset, dims=dims)
