"""Data files of a training step of which each is written by one process. Pure.

An object in a bucket is written at once, from its first byte to its last, by one process. The data file of a process
holds the chunks of its shards in the order in which it writes them.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from prepcli.errors import PrepError
from prepcli.planning.boxes import Box, volume
from prepcli.planning.chunk_placement import MIN_ALIGNED_CHUNK_NBYTES
from prepcli.planning.grids import ExplicitPlacement, StridedPlacement
from prepcli.planning.plan import Locations, OutputFile, OutputLeaf, PlacedChunks, Plan
from prepcli.planning.slabs import PAGE
from prepcli.planning.strided_copies import Region

MAX_PROCESSES = 200  # a reader opens at most as many data files of an item

ChunkIndex = tuple[int, ...]
LeafBoxes = Mapping[str, Sequence[Box]]  # boxes of one process's shards, by leaf name


@dataclass(frozen=True, slots=True)
class LeafGroup:
    """Leaves that one process writes before it writes others: a tensor has no elements outside of its group.

    Attributes:
        leaves: Names of the leaves.
        streams: Numbers of the plan's streams.
        owner: Process whose shards cover all leaves of the group; None if there are several processes.
    """

    leaves: tuple[str, ...]
    streams: tuple[int, ...]
    owner: int | None


@dataclass(frozen=True, slots=True)
class ProcessFiles:
    """A step's plan with one data file per process.

    Attributes:
        plan: The plan. Data file n belongs to process n.
        groups: The leaves, in the order in which each process writes them.
        chunks: Of each process: the index and offset of each of its chunks, in ascending order, by leaf name.
    """

    plan: Plan
    groups: tuple[LeafGroup, ...]
    chunks: tuple[Mapping[str, Sequence[tuple[ChunkIndex, int]]], ...]


def plan_process_files(plan: Plan, leaf_names: Sequence[str], boxes: Sequence[LeafBoxes]) -> ProcessFiles:
    """Return a plan whose chunks are in the data files of the processes that hold them.

    Args:
        plan: Plan of a step; its streams read leaf n as file n.
        leaf_names: Names of the leaves, by number.
        boxes: Boxes of each process's shards. Together they cover every leaf once.

    Raises:
        PrepError: Shards of two processes are in one chunk.
    """
    groups = tuple(_leaf_groups(plan, leaf_names, boxes))
    leaves = {leaf.name: leaf for leaf in plan.leaves}
    order = [leaves[name] for group in groups for name in group.leaves]
    indices = _chunk_indices(order, boxes)
    placed = [_place(order, process_indices) for process_indices in indices]
    locations: dict[str, dict[ChunkIndex, tuple[int, int]]] = {name: {} for name in leaves}
    for file, (chunks, _) in enumerate(placed):
        for name, entries in chunks.items():
            locations[name] |= {index: (file, offset) for index, offset in entries}
    files = tuple(OutputFile(_file_path(number), size) for number, (_, size) in enumerate(placed))
    moved_plan = _move_chunks(replace(plan, files=files), locations)
    return ProcessFiles(moved_plan, groups, tuple(chunks for chunks, _ in placed))


def _leaf_groups(plan: Plan, leaf_names: Sequence[str], boxes: Sequence[LeafBoxes]) -> Iterator[LeafGroup]:
    """Yield the smallest groups of leaves such that each stream reads leaves of one group."""
    leaves_by_stream = [sorted({_leaf_number(location) for location in stream.reads}) for stream in plan.streams]
    group_of = list(range(len(leaf_names)))
    for first, *others in leaves_by_stream:
        for other in others:
            merged, kept = group_of[other], group_of[first]
            group_of = [kept if group == merged else group for group in group_of]
    streams: dict[int, list[int]] = {}
    for number, (first, *_) in enumerate(leaves_by_stream):
        streams.setdefault(group_of[first], []).append(number)
    sizes = {leaf.name: volume(tuple((0, n) for n in leaf.grid.shape)) for leaf in plan.leaves}
    for group, numbers in streams.items():
        names = tuple(name for name, leaf_group in zip(leaf_names, group_of) if leaf_group == group)
        yield LeafGroup(names, tuple(numbers), _owner({name: sizes[name] for name in names}, boxes))


def _leaf_number(location: object) -> int:
    """Return the number of the leaf read by a stream of a training step."""
    assert isinstance(location, Region)
    assert isinstance(location.placement, StridedPlacement)
    return location.placement.file


def _owner(sizes: Mapping[str, int], boxes: Sequence[LeafBoxes]) -> int | None:
    """Return the process whose boxes hold all elements of some leaves."""
    owners = (
        process
        for process, own in enumerate(boxes)
        if all(sum(map(volume, own.get(name, ()))) == size for name, size in sizes.items())
    )
    return next(owners, None)


def _chunk_indices(leaves: Sequence[OutputLeaf], boxes: Sequence[LeafBoxes]) -> list[dict[str, list[ChunkIndex]]]:
    """Return the chunks of each process by leaf, in the order of its shards."""
    chunks: list[dict[str, list[ChunkIndex]]] = [{} for _ in boxes]
    for leaf in leaves:
        owners: dict[ChunkIndex, int] = {}
        for process, own in enumerate(boxes):
            for index in itertools.chain.from_iterable(_touched(leaf, box) for box in own.get(leaf.name, ())):
                if owners.setdefault(index, process) != process:
                    why = f"processes {owners[index]} and {process} hold parts of chunk {index} of {leaf.name}"
                    raise PrepError("the step cannot be saved to a bucket", why, "save it to a shared folder")
            chunks[process][leaf.name] = []
        for index, process in owners.items():
            chunks[process][leaf.name].append(index)
    return chunks


def _touched(leaf: OutputLeaf, box: Box) -> Iterator[ChunkIndex]:
    """Yield the chunks of a leaf that overlap a box."""
    return itertools.product(
        *(range(low // length, -(-high // length)) for (low, high), length in zip(box, leaf.grid.chunk_shape))
    )


def _place(
    leaves: Sequence[OutputLeaf], indices: Mapping[str, Sequence[ChunkIndex]]
) -> tuple[dict[str, list[tuple[ChunkIndex, int]]], int]:
    """Return the offset of each chunk in the file of a process, and the size of the file."""
    chunks: dict[str, list[tuple[ChunkIndex, int]]] = {}
    size = 0
    for leaf in leaves:
        unit = PAGE if leaf.chunk_nbytes >= MIN_ALIGNED_CHUNK_NBYTES else 1
        chunks[leaf.name] = []
        for index in indices[leaf.name]:
            offset = -(-size // unit) * unit
            chunks[leaf.name].append((index, offset))
            size = offset + leaf.chunk_nbytes
    return chunks, size


def _move_chunks(plan: Plan, locations: Mapping[str, Mapping[ChunkIndex, tuple[int, int]]]) -> Plan:
    """Return the plan with other locations of its chunks."""
    placements = {
        chunks.placement: ExplicitPlacement({index: locations[leaf.name][index] for index in chunks.indices()})
        for leaf in plan.leaves
        for chunks in leaf.placed_chunks
    }

    def move(writes: Locations) -> Locations:
        return tuple(
            replace(write, placement=placements[write.placement])
            for write in writes
            if isinstance(write, Region) and isinstance(write.placement, StridedPlacement)
        )

    return replace(
        plan,
        leaves=tuple(replace(leaf, placed_chunks=_placed_chunks(leaf, locations[leaf.name])) for leaf in plan.leaves),
        streams=tuple(replace(stream, writes=move(stream.writes)) for stream in plan.streams),
    )


def _placed_chunks(leaf: OutputLeaf, chunks: Mapping[ChunkIndex, tuple[int, int]]) -> tuple[PlacedChunks, ...]:
    """Return one box for each chunk of a leaf."""
    strides = (leaf.chunk_nbytes,) * len(leaf.grid.shape)
    return tuple(
        PlacedChunks(index, tuple(i + 1 for i in index), StridedPlacement(*place, index, strides))
        for index, place in chunks.items()
    )


def _file_path(process: int) -> str:
    """Return the path of a data file. OCDBT names it by 32 hexadecimal digits."""
    name = hashlib.md5(f"prep data file of process {process}".encode(), usedforsecurity=False)
    return f"d/{name.hexdigest()}"
