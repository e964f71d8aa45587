"""Chunks of output leaves in data files: assign them file offsets, move them, and find them.

The layout depends on the tensors and their offsets in the source, on the mesh, the rules and the storage, not on the
run.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter, mul, sub

from prepcli.algebra.axis_map import AxisMap
from prepcli.algebra.boxes import Box, Range, full_box, intersect, intersection, strides
from prepcli.algebra.grids import (
    ArrayPart,
    ChunkGrid,
    ChunkIndex,
    Chunks,
    ChunkTable,
    FilePosition,
    StridedChunks,
)
from prepcli.algebra.strided_copies import StridedCopy, box_copy
from prepcli.planning.arrays import (
    Array,
    LeafBlocks,
    Location,
    MappedArray,
    assign_block_numbers,
    chunk_group,
)
from prepcli.planning.plan import OutputLeaf, PlacedChunks, Plan, Stream
from prepcli.planning.slabs import PAGE
from prepcli.planning.tensors import array_bits, itemsize

# Size from which a data file is full. The next chunk begins a new file.
FILE_NBYTES = 1 << 30
# Smaller chunks are not page-aligned: the padding would cost more than it saves.
MIN_ALIGNED_CHUNK_NBYTES = 16 * PAGE
# Position of each chunk: file number and offset
ChunkPositions = Mapping[ChunkIndex, FilePosition]


@dataclass(frozen=True, slots=True)
class LeafPiece:
    """The part of a leaf that comes from one source tensor.

    Attributes:
        leaf_name: Dotted name of the leaf.
        axis_map: Maps the tensor's elements to the leaf's.
        stacked_indices: Name and index of each stacked axis in the tensor's name, e.g. (("layers", 3),).
        grid: Chunk grid of the leaf.
        dtype: Dtype of the leaf.
        source_offset: Offset of the tensor in its source file, or 0 if it has none.
    """

    leaf_name: str
    axis_map: AxisMap
    stacked_indices: tuple[tuple[str, int], ...]
    grid: ChunkGrid
    dtype: str
    source_offset: int = 0

    @property
    def chunk_nbytes(self) -> int:
        """Size of a chunk in bytes."""
        return math.prod(self.grid.chunk_shape) * itemsize(self.dtype)

    @property
    def chunk_group(self) -> tuple[ChunkIndex, ChunkIndex]:
        """First and stop index of the chunks stored next to each other for the piece."""
        return chunk_group(self.axis_map, self.stacked_indices, self.grid)

    def location(self, chunks: Chunks) -> MappedArray:
        """Return where the piece is stored, given the chunks of its group."""
        shape = self.grid.shape
        leaf = Array(self.leaf_name, self.dtype, shape, self.grid.chunk_shape, chunks)
        return MappedArray(self.axis_map, self.stacked_indices, leaf)


@dataclass(slots=True)
class ChunkLayout:
    """The file layout of an output's chunks.

    Attributes:
        locations: Location of each placed piece, in order.
        placed_chunks: Boxes of placed chunks, by leaf name.
        file_sizes: Size of each data file in bytes.
    """

    locations: list[MappedArray] = field(default_factory=list)
    placed_chunks: dict[str, list[PlacedChunks]] = field(default_factory=dict)
    file_sizes: list[int] = field(default_factory=list)


def place_chunks(pieces: Iterable[LeafPiece]) -> ChunkLayout:
    """Lay out chunks in data files, in the order of the pieces.

    A tensor copied in one contiguous run keeps its source's page offset, so that whole pages are copied with
    direct I/O. Other groups of chunks, and all large chunks, start at a page boundary.

    Args:
        pieces: The parts of output leaves, in the order in which their tensors are streamed.

    Returns:
        The layout. Chunks never overlap.
    """
    # Pieces of one chunk share its group, e.g. layers 0 and 1 of a leaf in chunks of two layers. The first
    # of them places the group.
    layout = ChunkLayout(file_sizes=[0])
    groups: dict[tuple[str, ChunkIndex], StridedChunks] = {}
    for piece in pieces:
        first, stop = piece.chunk_group
        key = (piece.leaf_name, first)
        if key not in groups:
            groups[key] = _place_chunk_group(layout, piece, first, stop)
            group = PlacedChunks(first, stop, groups[key])
            layout.placed_chunks.setdefault(piece.leaf_name, []).append(group)
        layout.locations.append(piece.location(groups[key]))
    return layout


def place_chunk_files(pieces: Iterable[LeafPiece]) -> ChunkLayout:
    """Lay out each chunk as a file of its own, in the order of the pieces.

    Args:
        pieces: The parts of output leaves, in the order in which their tensors are streamed.

    Returns:
        The layout. It has one placed box for each chunk.
    """
    layout = ChunkLayout()
    groups: dict[tuple[str, ChunkIndex], ChunkTable] = {}
    for piece in pieces:
        first, stop = piece.chunk_group
        key = (piece.leaf_name, first)
        if key not in groups:
            positions: dict[ChunkIndex, FilePosition] = {}
            for index in itertools.product(*map(range, first, stop)):
                positions[index] = len(layout.file_sizes), 0
                layout.file_sizes.append(piece.chunk_nbytes)
            boxes = layout.placed_chunks.setdefault(piece.leaf_name, [])
            boxes += single_chunks(positions, piece.chunk_nbytes)
            groups[key] = ChunkTable.from_positions(first, stop, positions)
        layout.locations.append(piece.location(groups[key]))
    return layout


def _place_chunk_group(
    layout: ChunkLayout, piece: LeafPiece, first: ChunkIndex, stop: ChunkIndex
) -> StridedChunks:
    """Append the chunks of a group (`chunk_group`) to the last data file, or to a new file if the last is full."""
    if layout.file_sizes[-1] >= FILE_NBYTES:
        layout.file_sizes.append(0)
    # A chunk at the edge of the leaf is stored in full size, as zarr defines it, so that all chunks of
    # the group have equal distances. e.g. 3 x 1 chunks of 8 bytes have the strides (8, 8).
    counts = [stop_index - start_index for start_index, stop_index in zip(first, stop)]
    nbytes = piece.chunk_nbytes
    file = len(layout.file_sizes) - 1
    start = -(-layout.file_sizes[-1] // PAGE) * PAGE
    # Direct I/O copies whole pages between buffers and files of equal page offsets, so a tensor that
    # stays one run keeps the page offset of its source.
    offset = start + piece.source_offset % PAGE
    chunks = StridedChunks(file, offset, first, strides(counts, nbytes))
    # Two copies are enough to see that there is more than one. A large leaf has millions.
    shape = piece.axis_map.source_shape
    copies = piece.location(chunks).copies(full_box(shape))
    widths = [copy.width for copy in itertools.islice(copies, 2)]
    if widths != [array_bits(piece.dtype, shape) // 8]:
        nbytes = aligned_offset(nbytes, nbytes)
        chunks = StridedChunks(file, start, first, strides(counts, nbytes))
    layout.file_sizes[-1] = chunks.offset + math.prod(counts) * nbytes
    return chunks


def aligned_offset(end: int, nbytes: int) -> int:
    """Return the first offset from `end` on for `nbytes` bytes. Large chunks start at a page, for direct I/O."""
    unit = PAGE if nbytes >= MIN_ALIGNED_CHUNK_NBYTES else 1
    return -(-end // unit) * unit


@dataclass(frozen=True, slots=True)
class ChunkExtent:
    """Consecutive chunks of a leaf in a file.

    Attributes:
        file: Number of the file.
        offset: Offset of the first chunk.
        stride_nbytes: Bytes from one chunk to the next.
        placed_chunks: The box of the chunks in the leaf's grid.
        blocks: Checksum blocks of the leaf.
    """

    file: int
    offset: int
    stride_nbytes: int
    placed_chunks: PlacedChunks
    blocks: LeafBlocks

    @property
    def chunk_count(self) -> int:
        """Number of chunks."""
        return math.prod(self._chunk_counts)

    @property
    def _chunk_counts(self) -> list[int]:
        return list(map(sub, self.placed_chunks.stop, self.placed_chunks.first))

    def first_block(self, position: int) -> int:
        """Return the number of the first checksum block of the extent's chunk `position`."""
        # E.g. chunks [2, 0] to [4, 3] have the strides (3, 1): position 4 is chunk [2 + 1, 0 + 1].
        index = []
        for first, stride in zip(self.placed_chunks.first, strides(self._chunk_counts)):
            index.append(first + position // stride)
            position %= stride
        return self.blocks.first_in_chunk(index)


def chunk_extents(leaves: Sequence[OutputLeaf]) -> list[ChunkExtent]:
    """Return the extents of output leaves, one per box of placed chunks, sorted by file and offset."""
    blocks = assign_block_numbers(
        (leaf.name, leaf.grid.shape, leaf.grid.chunk_shape, leaf.dtype) for leaf in leaves
    )
    extents: list[ChunkExtent] = []
    for leaf in leaves:
        for box in leaf.placed_chunks:
            chunks = box.chunks
            stride_nbytes = chunks.strides[-1] if chunks.strides else leaf.chunk_nbytes
            extents.append(
                ChunkExtent(chunks.file, chunks.offset, stride_nbytes, box, blocks[leaf.name])
            )
    return sorted(extents, key=attrgetter("file", "offset"))


def count_blocks(extents: Sequence[ChunkExtent]) -> int:
    """Return the number of checksum blocks in all extents of an output."""
    return max((extent.blocks.stop_number for extent in extents), default=0)


def move_chunks(plan: Plan, positions: Mapping[str, ChunkPositions]) -> Plan:
    """Return the plan with other positions of its chunks.

    Args:
        plan: The plan. Its chunks are strided.
        positions: New position of every chunk, by leaf name and chunk index.
    """
    moved: dict[Chunks, Chunks] = {}
    boxes: dict[str, tuple[PlacedChunks, ...]] = {}
    for leaf in plan.leaves:
        in_leaf = positions[leaf.name]
        for chunks in leaf.placed_chunks:
            moved[chunks.chunks] = ChunkTable.from_positions(chunks.first, chunks.stop, in_leaf)
        boxes[leaf.name] = single_chunks(in_leaf, leaf.chunk_nbytes)
    return replace_chunks(plan, moved, boxes)


def replace_chunks(
    plan: Plan,
    moved: Mapping[Chunks, Chunks],
    boxes: Mapping[str, Sequence[PlacedChunks]],
) -> Plan:
    """Return the plan with its groups of chunks at other positions.

    Args:
        plan: The plan. Its chunks are strided.
        moved: The chunks of each group at their new positions, by the chunks at their old ones.
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


def single_chunks(positions: ChunkPositions, chunk_nbytes: int) -> tuple[PlacedChunks, ...]:
    """Return one box for each chunk of a leaf."""
    boxes: list[PlacedChunks] = []
    for index, (file, offset) in positions.items():
        # A box of one chunk has no distance between chunks, but the checksum recorder divides by it.
        strides = (chunk_nbytes,) * len(index)
        stop = tuple(i + 1 for i in index)
        boxes.append(PlacedChunks(index, stop, StridedChunks(file, offset, index, strides)))
    return tuple(boxes)


def shard_copies(leaf: OutputLeaf, box: Box) -> Iterator[tuple[Box, StridedCopy]]:
    """Yield the copies from a box of a leaf to its chunks, one per chunk.

    Disjoint boxes of a leaf are copied to disjoint byte ranges, also within one chunk.

    Yields:
        The part of the box in one chunk, and the copy of that part, packed in C order.
    """
    # The packed part has the strides of its own shape, the chunk those of the chunk's shape. e.g. a part [2, 2] in a
    # float32 chunk [2, 4] is packed with (8, 4) and stored with (16, 4).
    item_nbytes = itemsize(leaf.dtype)
    chunk_strides = strides(leaf.grid.chunk_shape, item_nbytes)
    for group in leaf.placed_chunks:
        # The box of the elements in the group's chunks.
        in_group: list[Range] = []
        for first, stop, length, box_range in zip(
            group.first, group.stop, leaf.grid.chunk_shape, box
        ):
            in_group.append(intersect((first * length, stop * length), box_range))
        for index in leaf.grid.overlapping(tuple(in_group)):
            starts = map(mul, index, leaf.grid.chunk_shape)
            chunk = tuple((i, i + length) for i, length in zip(starts, leaf.grid.chunk_shape))
            part = intersection(box, chunk)
            stored = ArrayPart(chunk, *group.chunks.find(index), chunk_strides)
            yield part, box_copy(part, part, stored, item_nbytes)
