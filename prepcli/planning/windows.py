"""Windows: boxes of a tensor that are read without the rest of the tensor. Pure.

The bytes of a window are buffered in C order of the window's own shape.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

from prepcli.planning.boxes import Box, strides, volume
from prepcli.planning.gapped_regions import GappedRegion
from prepcli.planning.plan import Contiguous, Locations, Strided
from prepcli.planning.strided_copies import StridedCopy, merge_dims, region_copies


def window_copies(
    locations: Locations, shape: Sequence[int], *, item_nbytes: int, window: Box
) -> Iterator[StridedCopy]:
    """Yield the copies between a window of a tensor and the tensor's locations.

    Args:
        locations: Where the tensor is stored.
        shape: Shape of the tensor.
        item_nbytes: Bytes per element.
        window: Box of the tensor; it need not be contiguous.

    Yields:
        Copies whose tensor offsets count the bytes of the window.
    """
    for location in locations:
        if isinstance(location, GappedRegion):
            yield from location.copies(window, window)
        elif isinstance(location, Contiguous):
            view = Strided(location.file, location.offset, strides(shape, item_nbytes))
            yield _strided_copy(view, item_nbytes, window)
        elif isinstance(location, Strided):
            yield _strided_copy(location, item_nbytes, window)
        else:
            yield from region_copies(location, window, window)


def _strided_copy(location: Strided, item_nbytes: int, window: Box) -> StridedCopy:
    counts = [stop - start for start, stop in window]
    file_offset = location.offset + sum(start * stride for (start, _), stride in zip(window, location.strides))
    dims = tuple(zip(counts, strides(counts, item_nbytes), location.strides))
    return merge_dims(StridedCopy(0, location.file, file_offset, item_nbytes, dims))


def file_strides(locations: Locations, shape: Sequence[int], item_nbytes: int) -> tuple[int, ...]:
    """Return the distance in the file between neighbours along each axis of a tensor, as its first copy has it.

    For an axis that several loops cover, it is the distance of the outermost loop.
    """
    whole = tuple((0, extent) for extent in shape)
    copies = window_copies(locations, shape, item_nbytes=item_nbytes, window=whole)
    first = next(copies, StridedCopy(0, 0, 0, item_nbytes))
    tensor_strides = strides(shape, item_nbytes)
    result = list(tensor_strides)
    for axis, tensor_stride in enumerate(tensor_strides):
        inner = [dim for dim in first.dims if tensor_stride <= dim[1] < tensor_stride * max(2, shape[axis])]
        if inner:
            result[axis] = max(file_stride for _, _, file_stride in inner)
    return tuple(result)


def merge_windows(windows: Sequence[Box], axis_strides: Sequence[int], max_gap_nbytes: int) -> list[Box]:
    """Replace windows by their union where the union adds no elements, or gaps in the file that are read anyway.

    Args:
        windows: Boxes of a tensor.
        axis_strides: Result of `file_strides`.
        max_gap_nbytes: Gaps of less than this are read.

    Returns:
        Boxes that cover the windows.
    """
    merged: list[Box] = []
    for window in windows:
        box = window
        while (other := _mergeable_box(box, merged, axis_strides, max_gap_nbytes)) is not None:
            merged.remove(other)
            box = _union(box, other)
        merged.append(box)
    return merged


def _mergeable_box(box: Box, others: Sequence[Box], axis_strides: Sequence[int], max_gap_nbytes: int) -> Box | None:
    return next((other for other in others if _is_mergeable(box, other, axis_strides, max_gap_nbytes)), None)


def _union(a: Box, b: Box) -> Box:
    return tuple((min(x[0], y[0]), max(x[1], y[1])) for x, y in zip(a, b))


def _is_mergeable(a: Box, b: Box, axis_strides: Sequence[int], max_gap_nbytes: int) -> bool:
    if volume(_union(a, b)) <= max(volume(a), volume(b)):
        return True  # one contains the other
    different = [axis for axis, (x, y) in enumerate(zip(a, b)) if x != y]
    if len(different) != 1:
        return False
    (axis,) = different
    gap = max(a[axis][0], b[axis][0]) - min(a[axis][1], b[axis][1])
    return gap <= 0 or gap * axis_strides[axis] < max_gap_nbytes


def split_window(window: Box, axis_strides: Sequence[int], max_volume: int) -> Iterator[Box]:
    """Split a window into windows of at most `max_volume` elements, in the order of their bytes in the file.

    Args:
        window: Box of a tensor.
        axis_strides: Result of `file_strides`.
        max_volume: Maximum number of elements, at least 1.

    Yields:
        Boxes that cover the window, each element once.
    """
    axes = sorted(range(len(window)), key=lambda axis: -axis_strides[axis])
    lengths = [stop - start for start, stop in window]
    remaining = max_volume
    for axis in reversed(axes):
        lengths[axis] = max(1, min(lengths[axis], remaining))
        remaining //= lengths[axis]
    ranges = [range(*window[axis], lengths[axis]) for axis in axes]
    for starts in itertools.product(*ranges):
        box = dict(zip(axes, starts))
        yield tuple((box[axis], min(box[axis] + lengths[axis], stop)) for axis, (_, stop) in enumerate(window))


def span_nbytes(copy: StridedCopy) -> int:
    """Return the number of bytes in the file from a copy's first byte to its last, gaps included."""
    return copy.width + sum((count - 1) * file_stride for count, _, file_stride in copy.dims)


def split_into_spans(copy: StridedCopy, *, max_nbytes: int, max_gap_nbytes: int) -> Iterator[StridedCopy]:
    """Split a copy into copies that are read at once: gaps in the file of less than a limit are read with it.

    Args:
        copy: The copy.
        max_nbytes: Maximum span of a copy, at least its width.
        max_gap_nbytes: Gaps of less than this are read.

    Yields:
        Copies in the order of their file offsets.
    """
    inner, number = copy.width, len(copy.dims)
    while number and copy.dims[number - 1][2] - inner < max_gap_nbytes:
        count, _, file_stride = copy.dims[number - 1]
        if (count - 1) * file_stride + inner > max_nbytes:
            break
        inner, number = (count - 1) * file_stride + inner, number - 1
    if not number:
        yield copy
        return
    count, tensor_stride, file_stride = copy.dims[number - 1]
    group = max(1, (max_nbytes - inner) // file_stride + 1) if file_stride - inner < max_gap_nbytes else 1
    for indices in itertools.product(*(range(n) for n, _, _ in copy.dims[: number - 1]), range(0, count, group)):
        steps = [(index, *dim[1:]) for index, dim in zip(indices, copy.dims)]
        grouped = (min(group, count - indices[-1]), tensor_stride, file_stride)
        yield replace(
            copy,
            tensor_offset=copy.tensor_offset + sum(index * stride for index, stride, _ in steps),
            file_offset=copy.file_offset + sum(index * stride for index, _, stride in steps),
            dims=((grouped, *copy.dims[number:]) if grouped[0] > 1 else copy.dims[number:]),
        )
