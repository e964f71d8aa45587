"""Copies that fill a box of a leaf, for tests of the index algebra."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prepcli.algebra.axis_map import AxisMap
from prepcli.algebra.boxes import Box
from prepcli.algebra.strided_copies import NO_INDICES, StridedCopy, leaf_box_parts, part_copies


def leaf_box_copies(
    axis_map: AxisMap,
    box: Box,
    *,
    itemsize: int = 1,
    unscanned_indices: Mapping[str, int] = NO_INDICES,
) -> Iterator[tuple[str, StridedCopy]]:
    """Yield (tensor name, copy) of each copy that fills a box of a leaf."""
    for part in leaf_box_parts(axis_map, box, unscanned_indices):
        for copy in part_copies(axis_map, part, itemsize=itemsize):
            yield part.tensor_name, copy
