"""Move the chunks of a plan to other data files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from prepcli.algebra.chunks import ChunkIndex, Chunks, ChunkTable, FilePosition, StridedChunks
from prepcli.planning.arrays import Location
from prepcli.planning.plan import OutputLeaf, PlacedChunks, Plan, Stream

# File number and offset of each chunk
ChunkPlaces = Mapping[ChunkIndex, FilePosition]


def move_chunks(plan: Plan, locations: Mapping[str, ChunkPlaces]) -> Plan:
    """Return the plan with other locations of its chunks.

    Args:
        plan: The plan. Its chunks are strided.
        locations: New file number and offset of every chunk, by leaf name and chunk index.
    """
    moved: dict[Chunks, Chunks] = {}
    boxes: dict[str, tuple[PlacedChunks, ...]] = {}
    for leaf in plan.leaves:
        places = locations[leaf.name]
        for chunks in leaf.placed_chunks:
            moved[chunks.chunks] = ChunkTable.from_places(chunks.first, chunks.stop, places)
        boxes[leaf.name] = single_chunks(leaf, places)
    return replace_chunks(plan, moved, boxes)


def replace_chunks(
    plan: Plan,
    moved: Mapping[Chunks, Chunks],
    boxes: Mapping[str, Sequence[PlacedChunks]],
) -> Plan:
    """Return the plan with other locations of its groups of chunks.

    Args:
        plan: The plan. Its chunks are strided.
        moved: The chunks of each group at their new places, by the chunks at their old ones.
        boxes: New boxes of placed chunks, by leaf name.
    """
    leaves: list[OutputLeaf] = []
    for leaf in plan.leaves:
        leaves.append(replace(leaf, placed_chunks=tuple(boxes[leaf.name])))
    streams: list[Stream] = []
    for stream in plan.streams:
        writes: list[Location] = []
        for write in stream.writes:
            array = replace(write.array, chunks=moved[write.array.chunks])
            writes.append(write.with_array(array))
        streams.append(replace(stream, writes=tuple(writes)))
    return replace(plan, leaves=tuple(leaves), streams=tuple(streams))


def single_chunks(leaf: OutputLeaf, places: ChunkPlaces) -> tuple[PlacedChunks, ...]:
    """Return one box for each chunk of a leaf."""
    strides = (leaf.chunk_nbytes,) * len(leaf.grid.shape)
    boxes: list[PlacedChunks] = []
    for index, (file, offset) in places.items():
        stop = tuple(i + 1 for i in index)
        boxes.append(PlacedChunks(index, stop, StridedChunks(file, offset, index, strides)))
    return tuple(boxes)
