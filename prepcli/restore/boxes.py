"""Boxes of array elements: chunks, intersections and shifts."""

from __future__ import annotations

from collections.abc import Sequence

from prepcli.formats.orbax import ArrayMeta
from prepcli.planning.boxes import Box, intersect


def chunk_box(corner: Sequence[int], meta: ArrayMeta) -> Box:
    """Return the box of the chunk whose first element is at `corner`."""
    return tuple((low, low + length) for low, length in zip(corner, meta.chunk_shape))


def shifted(box: Box, corner: Sequence[int], sign: int) -> Box:
    """Return a box moved by `sign` times `corner`."""
    return tuple((low + sign * by, high + sign * by) for (low, high), by in zip(box, corner))


def innermost_cut_axis(box: Box, chunk_shape: Sequence[int]) -> int:
    """Return the innermost axis on which a box does not span the chunk; 0 if there is none."""
    return max((axis for axis, (span, n) in enumerate(zip(box, chunk_shape)) if span != (0, n)), default=0)


def intersection(a: Box, b: Box) -> Box:
    """Return the common part of two boxes."""
    return tuple(map(intersect, a, b))
