"""Boxes of index space: a half-open range per dim. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

Range = tuple[int, int]
Box = tuple[Range, ...]


def full_box(shape: Sequence[int]) -> Box:
    """The box of everything."""
    return tuple((0, extent) for extent in shape)


def volume(box: Box) -> int:
    """Elements in a box; 1 for a box without dims."""
    return math.prod(max(0, high - low) for low, high in box)


def intersect(a: Range, b: Range) -> Range:
    """What two ranges share; low >= high where that is nothing."""
    return max(a[0], b[0]), min(a[1], b[1])


def strides(shape: Sequence[int], itemsize: int = 1) -> tuple[int, ...]:
    """Steps of a C-order array, in units of `itemsize`."""
    steps, step = [], itemsize
    for extent in reversed(shape):
        steps.append(step)
        step *= extent
    return tuple(reversed(steps))


def split_merged_range(merged_range: Range, extents: Sequence[int]) -> Iterator[Box]:
    """Cut a range of a merged dim into boxes of its atoms, in order (mixed radix, outermost atom first)."""
    low, high = merged_range
    if low >= high:
        return
    if len(extents) <= 1:
        yield ((low, high),) if extents else ()
        return
    inner = math.prod(extents[1:])
    first, last = -(-low // inner), high // inner  # the whole steps of the outermost atom
    if first > last:  # inside one step
        yield from _split_within_step(last, (low, high), extents)
        return
    yield from _split_within_step(first - 1, (low, first * inner), extents)
    if first < last:
        yield ((first, last), *full_box(extents[1:]))
    yield from _split_within_step(last, (last * inner, high), extents)


def _split_within_step(step: int, merged_range: Range, extents: Sequence[int]) -> Iterator[Box]:
    start = step * math.prod(extents[1:])
    for rest in split_merged_range((merged_range[0] - start, merged_range[1] - start), extents[1:]):
        yield ((step, step + 1), *rest)
