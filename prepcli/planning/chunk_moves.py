"""Move the chunks of a plan to other data files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from prepcli.algebra.grids import ExplicitPlacement, Placement, StridedPlacement
from prepcli.algebra.strided_copies import ChunkedLocation
from prepcli.planning.item_storage import ChunkIndex
from prepcli.planning.plan import OutputLeaf, PlacedChunks, Plan, Stream

# File number and offset of each chunk
ChunkPlaces = Mapping[ChunkIndex, tuple[int, int]]


def move_chunks(plan: Plan, locations: Mapping[str, ChunkPlaces]) -> Plan:
    """Return the plan with other locations of its chunks.

    Args:
        plan: The plan. Its chunks have strided placements.
        locations: New file number and offset of every chunk, by leaf name and chunk index.
    """
    placements: dict[StridedPlacement, Placement] = {}
    boxes: dict[str, tuple[PlacedChunks, ...]] = {}
    for leaf in plan.leaves:
        places = locations[leaf.name]
        for chunks in leaf.placed_chunks:
            own_places = {index: places[index] for index in chunks.indices()}
            placements[chunks.placement] = ExplicitPlacement(own_places)
        boxes[leaf.name] = single_chunks(leaf, places)
    return replace_placements(plan, placements, boxes)


def replace_placements(
    plan: Plan,
    placements: Mapping[StridedPlacement, Placement],
    boxes: Mapping[str, Sequence[PlacedChunks]],
) -> Plan:
    """Return the plan with other placements.

    Args:
        plan: The plan. Its chunks have strided placements.
        placements: New placement of each group of chunks, by its old one.
        boxes: New boxes of placed chunks, by leaf name.
    """
    leaves: list[OutputLeaf] = []
    for leaf in plan.leaves:
        leaves.append(replace(leaf, placed_chunks=tuple(boxes[leaf.name])))
    streams: list[Stream] = []
    for stream in plan.streams:
        writes: list[ChunkedLocation] = []
        for write in stream.writes:
            if isinstance(write, ChunkedLocation) and isinstance(write.placement, StridedPlacement):
                writes.append(replace(write, placement=placements[write.placement]))
        streams.append(replace(stream, writes=tuple(writes)))
    return replace(plan, leaves=tuple(leaves), streams=tuple(streams))


def single_chunks(leaf: OutputLeaf, places: ChunkPlaces) -> tuple[PlacedChunks, ...]:
    """Return one box for each chunk of a leaf."""
    strides = (leaf.chunk_nbytes,) * len(leaf.grid.shape)
    boxes: list[PlacedChunks] = []
    for index, (file, offset) in places.items():
        stop = tuple(i + 1 for i in index)
        boxes.append(PlacedChunks(index, stop, StridedPlacement(file, offset, index, strides)))
    return tuple(boxes)
