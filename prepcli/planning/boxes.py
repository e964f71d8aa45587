"""Boxes of index space: one half-open range (start, stop) per dim. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from types import EllipsisType

Range = tuple[int, int]
Box = tuple[Range, ...]


def full_box(shape: Sequence[int]) -> Box:
    """Return the box that covers an array of this shape."""
    return tuple((0, extent) for extent in shape)


def volume(box: Box) -> int:
    """Return the number of elements in a box; 1 for a box without dims."""
    return math.prod(max(0, stop - start) for start, stop in box)


def intersect(a: Range, b: Range) -> Range:
    """Return the intersection of two ranges. It is empty if its start is not below its stop."""
    return max(a[0], b[0]), min(a[1], b[1])


def slices(box: Box, within: Box) -> tuple[slice | EllipsisType, ...]:
    """Return the index of a box in the array of a larger box; the ellipsis makes a 0-d index return a view."""
    return (*(slice(low - start, high - start) for (low, high), (start, _) in zip(box, within)), ...)


def strides(shape: Sequence[int], itemsize: int = 1) -> tuple[int, ...]:
    """Return the strides of a C-order array, outermost dim first.

    Args:
        shape: Shape of the array.
        itemsize: Stride of the innermost dim: bytes per element, or 1 to count elements.

    Returns:
        One stride per dim.
    """
    reversed_strides, stride = [], itemsize
    for extent in reversed(shape):
        reversed_strides.append(stride)
        stride *= extent
    return tuple(reversed(reversed_strides))


def split_merged_range(merged_range: Range, extents: Sequence[int]) -> Iterator[Box]:
    """Split a range of a merged dim into boxes over the dim's atoms.

    An index of the merged dim is a mixed-radix number whose digits are the atoms' indices, outermost first.

    Args:
        merged_range: Half-open range of the merged dim.
        extents: Extents of the atoms, outermost first.

    Yields:
        Boxes with one range per atom. In C order, one after another, they cover the range.
    """
    start, stop = merged_range
    if start >= stop:
        return
    if len(extents) <= 1:
        yield ((start, stop),) if extents else ()
        return
    inner_extent = math.prod(extents[1:])
    first_step, last_step = -(-start // inner_extent), stop // inner_extent  # whole steps of the outermost atom
    if first_step > last_step:  # the range lies inside one step
        yield from _split_within_step(last_step, (start, stop), extents)
        return
    yield from _split_within_step(first_step - 1, (start, first_step * inner_extent), extents)
    if first_step < last_step:
        yield ((first_step, last_step), *full_box(extents[1:]))
    yield from _split_within_step(last_step, (last_step * inner_extent, stop), extents)


def _split_within_step(step: int, merged_range: Range, extents: Sequence[int]) -> Iterator[Box]:
    """Split a range inside one step of the outermost atom."""
    start = step * math.prod(extents[1:])
    for inner_box in split_merged_range((merged_range[0] - start, merged_range[1] - start), extents[1:]):
        yield ((step, step + 1), *inner_box)
