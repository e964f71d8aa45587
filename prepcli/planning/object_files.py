"""Data files of an output in an object store: each is written at once, from its first byte to its last.

An object has no writes at an offset, so an object is assembled in memory before it is sent. A local data file of 1 GiB
becomes many objects. The layout depends on the plan alone, neither on the memory nor on the number of processes. One
process writes each data file of a training step, with the chunks of its shards in the order in which it writes them.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from prepcli.algebra.boxes import Box, Range, volume
from prepcli.algebra.grids import ChunkIndex, Chunks, ChunkTable, FilePosition
from prepcli.algebra.strided_copies import StridedCopy
from prepcli.core.errors import PrepError
from prepcli.planning.chunk_placement import (
    aligned_offset,
    move_chunks,
    replace_chunks,
    single_chunks,
)
from prepcli.planning.plan import OutputFile, OutputLeaf, PlacedChunks, Plan, Stream
from prepcli.planning.slabs import split_stream
from prepcli.planning.work_units import DisjointSets

# Size of an object. A single chunk may be larger.
OBJECT_NBYTES = 16 << 20
# A listing has 1,000 objects per request. Objects of larger outputs grow instead of their number.
MAX_DATA_OBJECTS = 50_000
# Byte ranges by file, ascending
FileSpans = Mapping[int, Sequence[tuple[int, int]]]
# Boxes of one process's shards, by leaf name.
LeafBoxes = Mapping[str, Sequence[Box]]
# Boxes of one leaf by process, by leaf name.
Holders = Mapping[str, Mapping[int, Sequence[Box]]]


@dataclass(slots=True)
class _FileSizes:
    """The files placed so far.

    Attributes:
        max_nbytes: Size of a full file.
        sizes: Size of each file.
        items: Item of each file. See `OutputLeaf.item`.
        current: Number of the file to append to, or None to begin a new one.
        item: Item of the next file.
    """

    max_nbytes: int
    sizes: list[int] = field(default_factory=list)
    items: list[str | None] = field(default_factory=list)
    current: int | None = None
    item: str | None = None

    def append(self, nbytes: int) -> tuple[int, int]:
        """Place `nbytes` bytes behind the last ones. Return their file and offset."""
        if self.current is not None:
            offset = aligned_offset(self.sizes[self.current], nbytes)
            if offset + nbytes <= self.max_nbytes:
                self.sizes[self.current] = offset + nbytes
                return self.current, offset
        self.current = len(self.sizes)
        self.sizes.append(nbytes)
        self.items.append(self.item)
        return self.current, 0

    def close(self) -> None:
        """Begin a new file with the next bytes."""
        self.current = None


def plan_object_files(plan: Plan) -> Plan:
    """Return the plan of the same output in an object store.

    The chunks of an OCDBT item are moved to data files of about OBJECT_NBYTES. Other data files are unchanged: their
    names and their contents belong to the format.
    """
    if not plan.leaves:
        return plan
    if plan.storage.has_chunk_files:
        # In a folder, chunks are compressed from large raw files. Raw chunks have files of their own already.
        return plan if plan.compression is None else _plan_chunk_files(plan)
    names: dict[Chunks, set[str]] = {}
    for stream in plan.streams:
        for write in stream.writes:
            names.setdefault(write.array.chunks, set()).add(stream.name)
    num_writers = {chunks: len(tensors) for chunks, tensors in names.items()}
    groups: list[tuple[OutputLeaf, PlacedChunks]] = []
    for leaf in plan.leaves:
        for chunks in leaf.placed_chunks:
            groups.append((leaf, chunks))

    # A chunk of several layers is complete only after the last of them, so that its object stays in
    # memory for a long time. These chunks come last, in objects of their own.
    def sort_key(group: tuple[OutputLeaf, PlacedChunks]) -> tuple[str, bool, int, int]:
        chunks = group[1].chunks
        return group[0].item or "", num_writers[chunks] > 1, chunks.file, chunks.offset

    groups.sort(key=sort_key)
    total_nbytes = sum(file.size for file in plan.files)
    files = _FileSizes(max(OBJECT_NBYTES, -(-total_nbytes // MAX_DATA_OBJECTS)))
    moved: dict[Chunks, Chunks] = {}
    boxes: dict[str, list[PlacedChunks]] = {leaf.name: [] for leaf in plan.leaves}
    was_shared = False
    for leaf, chunks in groups:
        is_shared = num_writers[chunks.chunks] > 1
        if is_shared != was_shared:
            files.close()
        was_shared = is_shared
        # The files of an item have no bytes of another one.
        if leaf.item != files.item:
            files.close()
        files.item = leaf.item
        moved[chunks.chunks], moved_boxes = _place_group(files, leaf, chunks)
        boxes[leaf.name] += moved_boxes
    moved_plan = replace_chunks(plan, moved, boxes)
    output_files: list[OutputFile] = []
    for number, (size, item) in enumerate(zip(files.sizes, files.items, strict=True)):
        folder = f"{item}/d" if item else "d"
        name = _hashed_name(f"prep data object {number}")
        output_files.append(OutputFile(f"{folder}/{name}", size))
    return replace(moved_plan, files=tuple(output_files))


def _hashed_name(text: str) -> str:
    """Return the name of a data file: OCDBT names it by 32 hexadecimal digits."""
    return hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()


def _plan_chunk_files(plan: Plan) -> Plan:
    """Return the plan with a file for each chunk."""
    files: list[OutputFile] = []
    positions: dict[str, dict[ChunkIndex, tuple[int, int]]] = {}
    for leaf in plan.leaves:
        leaf_positions = positions.setdefault(leaf.name, {})
        for chunks in leaf.placed_chunks:
            for index in chunks.indices():
                leaf_positions[index] = (len(files), 0)
                path = plan.storage.chunk_path(leaf.name, index)
                files.append(OutputFile(path, leaf.chunk_nbytes))
    return replace(move_chunks(plan, positions), files=tuple(files))


def _place_group(
    files: _FileSizes, leaf: OutputLeaf, group: PlacedChunks
) -> tuple[Chunks, tuple[PlacedChunks, ...]]:
    """Place a group of chunks: in one file if it fits, otherwise in files of its own."""
    counts = [stop - first for first, stop in zip(group.first, group.stop)]
    strides = group.chunks.strides
    # The last chunk begins (count - 1) strides after the first one, in each dim.
    last_offset = sum((count - 1) * stride for count, stride in zip(counts, strides))
    nbytes = last_offset + leaf.chunk_nbytes
    if nbytes <= files.max_nbytes:
        file, offset = files.append(nbytes)
        chunks = replace(group.chunks, file=file, offset=offset)
        return chunks, (replace(group, chunks=chunks),)
    # No other tensor shares these files, so that one process can write each tensor.
    files.close()
    positions: dict[ChunkIndex, FilePosition] = {}
    for index in group.indices():
        positions[index] = files.append(leaf.chunk_nbytes)
    files.close()
    # A single chunk needs no entry of its own in the plan.
    if math.prod(counts) == 1:
        ((file, offset),) = positions.values()
        chunks = replace(group.chunks, file=file, offset=offset)
        return chunks, (replace(group, chunks=chunks),)
    table = ChunkTable.from_positions(group.first, group.stop, positions)
    return table, single_chunks(positions, leaf.chunk_nbytes)


def streams_of_spans(
    streams: Sequence[Stream], spans: FileSpans, *, slab_nbytes: int
) -> list[Stream]:
    """Return the parts of streams with writes to byte ranges of files."""
    # New rows with the mean of the true ones need the true rows, also if these are written already.
    averaged: set[str] = set()
    parts: list[Stream | None] = []
    for number, stream in enumerate(streams):
        rows = _touching_rows(number, stream, spans, slab_nbytes)
        part: Stream | None = None
        if rows is not None:
            part = stream
            # Values of new rows count from the first row.
            if stream.shape and not stream.is_generated:
                part = replace(stream, rows=rows)
            if stream.averages_rows:
                averaged.add(stream.name)
        parts.append(part)
    needed: list[Stream] = []
    for stream, part in zip(streams, parts):
        if stream.name in averaged:
            needed.append(stream)
        elif part is not None:
            needed.append(part)
    return needed


def _touches(copy: StridedCopy, spans: FileSpans) -> bool:
    """Return whether the range from the first to the last byte of a copy has bytes of the spans."""
    last_offset = sum((count - 1) * stride for count, stride in copy.repeats)
    copy_stop = copy.file_offset + last_offset + copy.run_nbytes
    return any(
        start < copy_stop and copy.file_offset < end for start, end in spans.get(copy.file, ())
    )


def _touching_rows(number: int, stream: Stream, spans: FileSpans, slab_nbytes: int) -> Range | None:
    """Return the rows of the slabs with writes to byte ranges, or None if there are none."""
    first: int | None = None
    stop = 0
    for slab in split_stream(number, stream, max_nbytes=slab_nbytes):
        if not any(_touches(copy, spans) for copy in slab.writes):
            continue
        if first is None:
            first = slab.start // stream.row_nbytes
        stop = -(-(slab.start + slab.nbytes) // stream.row_nbytes)
    if first is None:
        return None
    return first, stop


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
    """
    # Of 4,096 processes, a few hundred hold shards of one leaf. Loops over these alone take seconds less than loops
    # over all processes for each leaf.
    holders: dict[str, dict[int, Sequence[Box]]] = {}
    for process, leaf_boxes in enumerate(boxes):
        for name, own_boxes in leaf_boxes.items():
            if own_boxes:
                holders.setdefault(name, {})[process] = own_boxes
    groups = tuple(_leaf_groups(plan, leaf_names, holders))
    leaves = {leaf.name: leaf for leaf in plan.leaves}
    order: list[OutputLeaf] = []
    for group in groups:
        order += [leaves[name] for name in group.leaves]
    positions: dict[str, dict[ChunkIndex, tuple[int, int]]] = {name: {} for name in leaves}
    files: list[OutputFile] = []
    chunks_by_process: list[Mapping[str, Sequence[tuple[ChunkIndex, int]]]] = []
    for file, indices in enumerate(_chunk_indices(order, holders, len(boxes))):
        chunks, size = _place_chunks(order, indices)
        files.append(OutputFile(f"d/{_hashed_name(f'prep data file of process {file}')}", size))
        chunks_by_process.append(chunks)
        for name, entries in chunks.items():
            for index, offset in entries:
                positions[name][index] = (file, offset)
    moved_plan = move_chunks(replace(plan, files=tuple(files)), positions)
    return ProcessFiles(moved_plan, groups, tuple(chunks_by_process))


def _leaf_groups(plan: Plan, leaf_names: Sequence[str], holders: Holders) -> Iterator[LeafGroup]:
    """Yield the smallest groups of leaves such that each stream (rows of one tensor) reads leaves of one group."""
    leaves_by_stream: list[list[int]] = []
    for stream in plan.streams:
        # A step reads leaf n as file n.
        leaves_by_stream.append(sorted({location.array.file for location in stream.reads}))
    # Leaves of one stream join one group.
    sets = DisjointSets[int]()
    for first, *others in leaves_by_stream:
        for other in others:
            sets.join(other, first)
    streams: dict[int, list[int]] = {}
    for number, (first, *_) in enumerate(leaves_by_stream):
        streams.setdefault(sets.root(first), []).append(number)
    names_by_group: dict[int, list[str]] = {}
    for number, name in enumerate(leaf_names):
        names_by_group.setdefault(sets.root(number), []).append(name)
    sizes = {leaf.name: math.prod(leaf.grid.shape) for leaf in plan.leaves}
    for group, numbers in streams.items():
        names = tuple(names_by_group[group])
        # Processes with all elements of the leaves so far
        owners: set[int] | None = None
        for name in names:
            leaf_owners: set[int] = set()
            for process, boxes in holders.get(name, {}).items():
                # Boxes of one process do not overlap, so that volumes that add up to the leaf cover it.
                if sum(map(volume, boxes)) == sizes[name]:
                    leaf_owners.add(process)
            owners = leaf_owners if owners is None else owners & leaf_owners
        yield LeafGroup(names, tuple(numbers), min(owners or (), default=None))


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
                for index in leaf.grid.overlapping(box):
                    owner = owners.setdefault(index, process)
                    if owner != process:
                        what = "the step cannot be saved to a bucket"
                        why = f"processes {owner} and {process} hold parts of chunk {index}"
                        hint = "save it to a shared folder"
                        raise PrepError(what, f"{why} of {leaf.name}", hint)
        for index, process in owners.items():
            chunks[process].setdefault(leaf.name, []).append(index)
    return chunks


def _place_chunks(
    leaves: Sequence[OutputLeaf], indices: Mapping[str, Sequence[ChunkIndex]]
) -> tuple[dict[str, list[tuple[ChunkIndex, int]]], int]:
    """Assign each chunk an offset in its process's file. Return the offsets and the file's size."""
    chunks: dict[str, list[tuple[ChunkIndex, int]]] = {}
    size = 0
    for leaf in leaves:
        if leaf.name not in indices:
            continue
        chunks[leaf.name] = []
        for index in indices[leaf.name]:
            offset = aligned_offset(size, leaf.chunk_nbytes)
            chunks[leaf.name].append((index, offset))
            size = offset + leaf.chunk_nbytes
    return chunks, size
