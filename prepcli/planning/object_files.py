"""Data files of an output in an object store: each is small enough to be written in one request.

An object has no writes at an offset, so an object is assembled in memory before it is sent. A local data file of 1 GiB
becomes many objects. The layout depends on the plan alone, neither on the memory nor on the number of processes.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from prepcli.algebra.chunks import ChunkIndex, Chunks, ChunkTable, FilePosition, StridedChunks
from prepcli.planning.chunk_moves import move_chunks, replace_chunks, single_chunks
from prepcli.planning.chunk_placement import MIN_ALIGNED_CHUNK_NBYTES
from prepcli.planning.plan import OutputFile, OutputLeaf, PlacedChunks, Plan
from prepcli.planning.slabs import PAGE

# Size of an object. A single chunk may be larger.
OBJECT_NBYTES = 16 << 20
# A listing has 1,000 objects per request. Objects of larger outputs grow instead of their number.
MAX_DATA_OBJECTS = 50_000


@dataclass(slots=True)
class _FileSizes:
    """The files placed so far.

    Attributes:
        sizes: Size of each file.
        items: Item of each file. See `OutputLeaf.item`.
        max_nbytes: Size of a full file.
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
        # Large chunks start at a page, for direct I/O of readers of a downloaded copy.
        unit = PAGE if nbytes >= MIN_ALIGNED_CHUNK_NBYTES else 1
        if self.current is not None:
            offset = -(-self.sizes[self.current] // unit) * unit
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

    def begin_item(self, item: str | None) -> None:
        """Begin a new file for the next bytes if they belong to another item."""
        if item != self.item:
            self.close()
        self.item = item


def plan_object_files(plan: Plan) -> Plan:
    """Return the plan of the same output in an object store.

    The chunks of an OCDBT item are moved to data files of about OBJECT_NBYTES. Other data files are unchanged: their
    names and their contents belong to the format.

    Args:
        plan: The plan of the output in a folder.
    """
    if not plan.leaves:
        return plan
    if plan.storage.has_chunk_files:
        # In a folder, chunks are compressed from large raw files. Raw chunks have files of their own already.
        return plan if plan.compression is None else _plan_chunk_files(plan)
    num_writers = _tensors_per_group(plan)
    groups: list[tuple[OutputLeaf, PlacedChunks]] = []
    for leaf in plan.leaves:
        for chunks in leaf.placed_chunks:
            groups.append((leaf, chunks))
    # A chunk of several layers is complete only after the last of them, so that its object stays in
    # memory for a long time. These chunks come last, in objects of their own.
    groups.sort(key=lambda group: _sort_key(group[0], group[1].chunks, num_writers))
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
        files.begin_item(leaf.item)
        moved[chunks.chunks], moved_boxes = _place_group(files, leaf, chunks)
        boxes[leaf.name] += moved_boxes
    moved_plan = replace_chunks(plan, moved, boxes)
    return replace(moved_plan, files=tuple(_output_files(files)))


def _plan_chunk_files(plan: Plan) -> Plan:
    """Return the plan with a file for each chunk."""
    files: list[OutputFile] = []
    places: dict[str, dict[ChunkIndex, tuple[int, int]]] = {}
    for leaf in plan.leaves:
        leaf_places = places.setdefault(leaf.name, {})
        for chunks in leaf.placed_chunks:
            for index in chunks.indices():
                leaf_places[index] = (len(files), 0)
                path = plan.storage.chunk_path(leaf.name, index)
                files.append(OutputFile(path, leaf.chunk_nbytes))
    return replace(move_chunks(plan, places), files=tuple(files))


def _tensors_per_group(plan: Plan) -> dict[Chunks, int]:
    """Return the number of tensors with elements in each group of chunks."""
    names: dict[Chunks, set[str]] = {}
    for stream in plan.streams:
        for write in stream.writes:
            names.setdefault(write.array.chunks, set()).add(stream.name)
    return {chunks: len(tensors) for chunks, tensors in names.items()}


def _sort_key(
    leaf: OutputLeaf, chunks: StridedChunks, num_writers: dict[Chunks, int]
) -> tuple[str, bool, int, int]:
    return leaf.item or "", num_writers[chunks] > 1, chunks.file, chunks.offset


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
    places: dict[ChunkIndex, FilePosition] = {}
    for index in group.indices():
        places[index] = files.append(leaf.chunk_nbytes)
    files.close()
    # A single chunk needs no entry of its own in the plan.
    if math.prod(counts) == 1:
        ((file, offset),) = places.values()
        chunks = replace(group.chunks, file=file, offset=offset)
        return chunks, (replace(group, chunks=chunks),)
    table = ChunkTable.from_places(group.first, group.stop, places)
    return table, single_chunks(leaf, places)


def _output_files(files: _FileSizes) -> Iterable[OutputFile]:
    """Yield the data files. OCDBT names a file by 32 hexadecimal digits, here a hash of its number."""
    for number, (size, item) in enumerate(zip(files.sizes, files.items, strict=True)):
        name = hashlib.md5(f"prep data object {number}".encode(), usedforsecurity=False)
        folder = f"{item}/d" if item else "d"
        yield OutputFile(f"{folder}/{name.hexdigest()}", size)
