"""Boxes of index space: one half-open range (start, stop) per dim. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from types import EllipsisType

Range = tuple[int, int]
Box = tuple[Range, ...]


def full_box(shape: Sequence[int]) -> Box:
    """Return the box that covers an array, e.g. [2, 3] -> ((0, 2), (0, 3))."""
    return tuple((0, extent) for extent in shape)


def volume(box: Box) -> int:
    """Return the number of elements in a box. A box without dims has 1 element."""
    return math.prod(max(0, stop - start) for start, stop in box)


def intersect(a: Range, b: Range) -> Range:
    """Return the intersection of two ranges. It is empty if its start is not below its stop."""
    return max(a[0], b[0]), min(a[1], b[1])


def intersection(a: Box, b: Box) -> Box:
    """Return the common part of two boxes. Ranges without common indices become empty: (start, start)."""
    box: list[Range] = []
    for range_a, range_b in zip(a, b):
        start, stop = intersect(range_a, range_b)
        box.append((start, max(start, stop)))
    return tuple(box)


def slices(box: Box, within: Box) -> tuple[slice | EllipsisType, ...]:
    """Return the index of a box in the array of a larger box, e.g. (5, 7) within (4, 8) -> 1:3.

    The ellipsis makes the index of a 0-d array return a view.
    """
    index: list[slice | EllipsisType] = []
    for (start, stop), (origin, _) in zip(box, within):
        index.append(slice(start - origin, stop - origin))
    return (*index, ...)


def strides(shape: Sequence[int], itemsize: int = 1) -> tuple[int, ...]:
    """Return the strides of a C-order array, outermost dim first, e.g. [2, 3] with itemsize 4 -> (12, 4).

    Args:
        shape: Shape of the array.
        itemsize: Stride of the innermost dim: bytes per element, or 1 to count elements.
    """
    reversed_strides: list[int] = []
    stride = itemsize
    for extent in reversed(shape):
        reversed_strides.append(stride)
        stride *= extent
    return tuple(reversed(reversed_strides))


def split_merged_range(merged_range: Range, extents: Sequence[int]) -> Iterator[Box]:
    """Split a range of a merged dim into boxes over its named axes (atoms).

    An index of the merged dim is a mixed-radix number. Its digits are the atoms' indices, outermost first.

    Yields:
        Boxes with one range per atom. In C order, one after another, they cover the range.
    """
    # Of extents [4, 3], the range 2..11 of 12 elements is a head, whole steps of the outer atom, and
    # a tail:
    #
    #   outer step   0            1      2      3
    #   elements     .  .  2   |  3 4 5  6 7 8  |  9 10  .
    #   box          (0, 2:3)     (1:3, 0:3)       (3, 0:2)
    start, stop = merged_range
    steps = strides(extents)
    while start < stop:
        fixed: list[Range] = []
        rest = start
        for axis, step in enumerate(steps):
            first, rest = divmod(rest, step)
            # The range begins at a step of this atom, and contains at least one of its steps.
            if not rest and start + step <= stop:
                count = (stop - start) // step
                if axis:
                    count = min(count, extents[axis] - first)
                yield (*fixed, (first, first + count), *full_box(extents[axis + 1 :]))
                start += count * step
                break
            fixed.append((first, first + 1))
        else:
            # Without atoms, the only element is the index [].
            yield ()
            return
