"""Copies between a shard of a leaf and the chunks of the leaf in the output's files."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from prepcli.algebra.boxes import Box, Range, intersect, strides
from prepcli.algebra.strided_copies import StridedCopy, merge_dims
from prepcli.planning.plan import OutputLeaf, PlacedChunks
from prepcli.planning.tensors import itemsize


def shard_copies(leaf: OutputLeaf, box: Box) -> Iterator[tuple[Box, StridedCopy]]:
    """Yield the copies from a box of a leaf to its chunks, one per chunk.

    Disjoint boxes of a leaf are copied to disjoint byte ranges, also within one chunk.

    Args:
        leaf: The leaf.
        box: Box of the leaf.

    Yields:
        The part of the box in one chunk, and the copy of that part, packed in C order.
    """
    for group in leaf.placed_chunks:
        for index in _chunk_indices(leaf, group, box):
            chunk_starts: list[int] = []
            part: list[Range] = []
            for i, length, box_range in zip(index, leaf.grid.chunk_shape, box):
                start = i * length
                chunk_starts.append(start)
                part.append(intersect(box_range, (start, start + length)))
            location = group.chunks.find(index)
            copy = _copy_to_chunk(leaf, part, chunk_starts=chunk_starts, location=location)
            yield tuple(part), copy


def _chunk_indices(leaf: OutputLeaf, group: PlacedChunks, box: Box) -> Iterator[tuple[int, ...]]:
    """Yield the index of each chunk of a group that overlaps a box."""
    # E.g. rows 3 to 9 in chunks of 4 touch the chunks 0 to 3: 3 // 4 is 0, 9 / 4 rounded up is 3.
    ranges: list[range] = []
    for (low, high), first, stop, length in zip(
        box, group.first, group.stop, leaf.grid.chunk_shape
    ):
        ranges.append(range(*intersect((first, stop), (low // length, -(-high // length)))))
    return itertools.product(*ranges)


def _copy_to_chunk(
    leaf: OutputLeaf,
    part: Sequence[Range],
    *,
    chunk_starts: Sequence[int],
    location: tuple[int, int],
) -> StridedCopy:
    """Return the copy of packed elements to a box inside one chunk at (file, offset)."""
    # The packed part has the strides of its own shape. The chunk has the strides of the chunk's shape. e.g. a
    # part [2, 2] in a float32 chunk [2, 4] is packed with (8, 4) and stored with (16, 4).
    item_nbytes = itemsize(leaf.dtype)
    chunk_strides = strides(leaf.grid.chunk_shape, item_nbytes)
    counts = [stop - start for start, stop in part]
    file, offset = location
    for (low, _), start, stride in zip(part, chunk_starts, chunk_strides):
        offset += (low - start) * stride
    dims = tuple(zip(counts, strides(counts, item_nbytes), chunk_strides))
    return merge_dims(StridedCopy(0, file, offset, item_nbytes, dims))
