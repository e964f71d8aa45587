"""Data files of a training step. One process writes each file.

An object in a bucket is written at once, from its first byte to its last, by one process. The data file of a process
holds the chunks of its shards in the order in which it writes them.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from prepcli.algebra.boxes import Box, volume
from prepcli.algebra.chunks import ChunkIndex
from prepcli.core.errors import PrepError
from prepcli.planning.chunk_moves import move_chunks
from prepcli.planning.chunk_placement import MIN_ALIGNED_CHUNK_NBYTES
from prepcli.planning.plan import OutputFile, OutputLeaf, Plan
from prepcli.planning.slabs import PAGE

# Boxes of one process's shards, by leaf name.
LeafBoxes = Mapping[str, Sequence[Box]]
# Boxes of one leaf by process, by leaf name.
Holders = Mapping[str, Mapping[int, Sequence[Box]]]


@dataclass(frozen=True, slots=True)
class LeafGroup:
    """Leaves that each process writes together, before the next group. No tensor has elements in two groups.

    Attributes:
        leaves: Names of the leaves.
        streams: Numbers of the plan's streams that read these leaves.
        owner: Process that holds all shards of the group. None if several processes hold shards of it.
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
        chunks: Of each process: the index and offset of each of its chunks, in ascending order, by leaf name. Leaves
            without a chunk of the process have no entry.
    """

    plan: Plan
    groups: tuple[LeafGroup, ...]
    chunks: tuple[Mapping[str, Sequence[tuple[ChunkIndex, int]]], ...]


def plan_process_files(
    plan: Plan, leaf_names: Sequence[str], boxes: Sequence[LeafBoxes]
) -> ProcessFiles:
    """Return a plan with each chunk in the data file of the process that holds it.

    Args:
        plan: Plan of a step. Its streams read leaf n as file n.
        leaf_names: Names of the leaves, by number.
        boxes: Boxes of each process's shards. Together they cover every leaf once.

    Raises:
        PrepError: Shards of two processes are in one chunk.
    """
    holders = _find_holders(boxes)
    groups = tuple(_leaf_groups(plan, leaf_names, holders))
    leaves = {leaf.name: leaf for leaf in plan.leaves}
    order: list[OutputLeaf] = []
    for group in groups:
        order += [leaves[name] for name in group.leaves]
    locations: dict[str, dict[ChunkIndex, tuple[int, int]]] = {name: {} for name in leaves}
    files: list[OutputFile] = []
    chunks_by_process: list[Mapping[str, Sequence[tuple[ChunkIndex, int]]]] = []
    for file, indices in enumerate(_chunk_indices(order, holders, len(boxes))):
        chunks, size = _place_chunks(order, indices)
        files.append(OutputFile(_file_path(file), size))
        chunks_by_process.append(chunks)
        for name, entries in chunks.items():
            for index, offset in entries:
                locations[name][index] = (file, offset)
    moved_plan = move_chunks(replace(plan, files=tuple(files)), locations)
    return ProcessFiles(moved_plan, groups, tuple(chunks_by_process))


def _find_holders(boxes: Sequence[LeafBoxes]) -> Holders:
    """Return the processes with shards of each leaf."""
    # Of 4,096 processes, a few hundred hold shards of one leaf. Loops over these alone take seconds
    # less than loops over all processes for each leaf.
    holders: dict[str, dict[int, Sequence[Box]]] = {}
    for process, leaf_boxes in enumerate(boxes):
        for name, own_boxes in leaf_boxes.items():
            if own_boxes:
                holders.setdefault(name, {})[process] = own_boxes
    return holders


def _leaf_groups(plan: Plan, leaf_names: Sequence[str], holders: Holders) -> Iterator[LeafGroup]:
    """Yield the smallest groups of leaves such that each stream (rows of one tensor) reads leaves of one group."""
    leaves_by_stream: list[list[int]] = []
    for stream in plan.streams:
        # A step reads leaf n as file n.
        leaves_by_stream.append(sorted({location.array.file for location in stream.reads}))
    # Leaves of one stream join one group. `group_of` has the group of each leaf, which is the number
    # of one of its leaves.
    group_of = list(range(len(leaf_names)))
    for first, *others in leaves_by_stream:
        for other in others:
            merged = group_of[other]
            kept = group_of[first]
            group_of = [kept if group == merged else group for group in group_of]
    streams: dict[int, list[int]] = {}
    for number, (first, *_) in enumerate(leaves_by_stream):
        streams.setdefault(group_of[first], []).append(number)
    sizes = {leaf.name: math.prod(leaf.grid.shape) for leaf in plan.leaves}
    for group, numbers in streams.items():
        names = tuple(name for name, leaf_group in zip(leaf_names, group_of) if leaf_group == group)
        owner = _owner_process({name: sizes[name] for name in names}, holders)
        yield LeafGroup(names, tuple(numbers), owner)


def _owner_process(sizes: Mapping[str, int], holders: Holders) -> int | None:
    """Return the process that holds all elements of the given leaves, or None if there is none."""
    candidates: set[int] | None = None
    for name, size in sizes.items():
        owners: set[int] = set()
        for process, boxes in holders.get(name, {}).items():
            # Boxes of one process do not overlap, so that volumes that add up to the leaf cover it.
            if sum(map(volume, boxes)) == size:
                owners.add(process)
        candidates = owners if candidates is None else candidates & owners
    return min(candidates or (), default=None)


def _chunk_indices(
    leaves: Sequence[OutputLeaf], holders: Holders, num_processes: int
) -> list[dict[str, list[ChunkIndex]]]:
    """Return the chunks of each process by leaf, in the order of its shards."""
    # A chunk is written at once, so that one process must hold all of its shards.
    chunks: list[dict[str, list[ChunkIndex]]] = [{} for _ in range(num_processes)]
    for leaf in leaves:
        owners: dict[ChunkIndex, int] = {}
        for process, boxes in holders.get(leaf.name, {}).items():
            for box in boxes:
                for index in _touched_chunks(leaf, box):
                    if owners.setdefault(index, process) != process:
                        raise _shared_chunk_error(leaf, index, (owners[index], process))
        for index, process in owners.items():
            chunks[process].setdefault(leaf.name, []).append(index)
    return chunks


def _shared_chunk_error(
    leaf: OutputLeaf, index: ChunkIndex, processes: tuple[int, int]
) -> PrepError:
    """Return the error for a chunk that two processes hold parts of."""
    first, second = processes
    why = f"processes {first} and {second} hold parts of chunk {index} of {leaf.name}"
    return PrepError("the step cannot be saved to a bucket", why, "save it to a shared folder")


def _touched_chunks(leaf: OutputLeaf, box: Box) -> Iterator[ChunkIndex]:
    """Yield the chunks of a leaf that overlap a box."""
    ranges: list[range] = []
    for (low, high), length in zip(box, leaf.grid.chunk_shape):
        ranges.append(range(low // length, -(-high // length)))
    return itertools.product(*ranges)


def _place_chunks(
    leaves: Sequence[OutputLeaf], indices: Mapping[str, Sequence[ChunkIndex]]
) -> tuple[dict[str, list[tuple[ChunkIndex, int]]], int]:
    """Assign each chunk an offset in its process's file. Return the offsets and the file's size."""
    chunks: dict[str, list[tuple[ChunkIndex, int]]] = {}
    size = 0
    for leaf in leaves:
        if leaf.name not in indices:
            continue
        # Large chunks start at a page, for direct I/O of readers.
        unit = PAGE if leaf.chunk_nbytes >= MIN_ALIGNED_CHUNK_NBYTES else 1
        chunks[leaf.name] = []
        for index in indices[leaf.name]:
            offset = -(-size // unit) * unit
            chunks[leaf.name].append((index, offset))
            size = offset + leaf.chunk_nbytes
    return chunks, size


def _file_path(process: int) -> str:
    """Return the path of a data file. OCDBT names it by 32 hexadecimal digits."""
    name = hashlib.md5(f"prep data file of process {process}".encode(), usedforsecurity=False)
    return f"d/{name.hexdigest()}"
