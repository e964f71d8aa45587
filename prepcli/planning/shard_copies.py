"""Copies between a shard of a leaf and the chunks of the leaf in the output's files. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from prepcli.planning.boxes import Box, Range, intersect, strides
from prepcli.planning.plan import OutputLeaf, PlacedChunks
from prepcli.planning.strided_copies import StridedCopy, merge_dims
from prepcli.planning.tensors import itemsize


def shard_copies(leaf: OutputLeaf, box: Box) -> Iterator[tuple[Box, StridedCopy]]:
    """Yield the copies from a box of a leaf to its chunks, one per chunk.

    The boxes of a leaf that do not overlap are copied to bytes that do not overlap, also inside one chunk.

    Args:
        leaf: The leaf.
        box: Box of the leaf.

    Yields:
        The part of the box in one chunk, and the copy of that part, packed in C order.
    """
    for group in leaf.placed_chunks:
        for index in _chunk_indices(leaf, group, box):
            chunk_starts = [i * length for i, length in zip(index, leaf.grid.chunk_shape)]
            part = tuple(
                intersect(box_range, (start, start + length))
                for box_range, start, length in zip(box, chunk_starts, leaf.grid.chunk_shape)
            )
            yield part, _copy_to_chunk(leaf, part, chunk_starts=chunk_starts, location=group.placement.find(index))


def _chunk_indices(leaf: OutputLeaf, group: PlacedChunks, box: Box) -> Iterator[tuple[int, ...]]:
    """Yield the index of each chunk of a group that overlaps a box."""
    ranges: list[Range] = [
        intersect((first, stop), (low // length, -(-high // length)))
        for (low, high), first, stop, length in zip(box, group.first, group.stop, leaf.grid.chunk_shape)
    ]
    return itertools.product(*(range(*chunk_range) for chunk_range in ranges))


def _copy_to_chunk(
    leaf: OutputLeaf, part: Box, *, chunk_starts: Sequence[int], location: tuple[int, int]
) -> StridedCopy:
    """Return the copy of packed elements to a box inside one chunk at (file, offset)."""
    item_nbytes = itemsize(leaf.dtype)
    chunk_strides = strides(leaf.grid.chunk_shape, item_nbytes)
    counts = [stop - start for start, stop in part]
    file, offset = location
    offset += sum((low - start) * stride for (low, _), start, stride in zip(part, chunk_starts, chunk_strides))
    dims = tuple(zip(counts, strides(counts, item_nbytes), chunk_strides))
    return merge_dims(StridedCopy(0, file, offset, item_nbytes, dims))
