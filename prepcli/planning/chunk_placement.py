"""Assign file offsets to the chunks of output leaves.

The layout depends on the saved tensors alone, not on the run.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from prepcli.algebra.axis_map import AxisMap
from prepcli.algebra.boxes import full_box, strides
from prepcli.algebra.chunks import ChunkIndex, Chunks, ChunkTable, FilePosition, StridedChunks
from prepcli.algebra.grids import ChunkGrid
from prepcli.planning.arrays import Array, MappedArray, chunk_group
from prepcli.planning.plan import PlacedChunks
from prepcli.planning.slabs import PAGE
from prepcli.planning.tensors import array_bits, itemsize

# Size from which a data file is full. The next chunk begins a new file.
FILE_NBYTES = 1 << 30
# Smaller chunks are not page-aligned: the padding would cost more than it saves.
MIN_ALIGNED_CHUNK_NBYTES = 16 * PAGE


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
        regions: Region of each placed piece, in order.
        placed_chunks: Boxes of placed chunks, by leaf name.
        file_sizes: Size of each data file in bytes.
    """

    regions: list[MappedArray] = field(default_factory=list)
    placed_chunks: dict[str, list[PlacedChunks]] = field(default_factory=dict)
    file_sizes: list[int] = field(default_factory=lambda: [0])


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
    layout = ChunkLayout()
    groups: dict[tuple[str, ChunkIndex], StridedChunks] = {}
    for piece in pieces:
        first, stop = piece.chunk_group
        key = (piece.leaf_name, first)
        if key not in groups:
            groups[key] = _place_chunk_group(layout, piece, first, stop)
            group = PlacedChunks(first, stop, groups[key])
            layout.placed_chunks.setdefault(piece.leaf_name, []).append(group)
        layout.regions.append(piece.location(groups[key]))
    return layout


def place_chunk_files(pieces: Iterable[LeafPiece]) -> ChunkLayout:
    """Lay out each chunk as a file of its own, in the order of the pieces.

    Args:
        pieces: The parts of output leaves, in the order in which their tensors are streamed.

    Returns:
        The layout. It has one placed box for each chunk.
    """
    layout = ChunkLayout(file_sizes=[])
    groups: dict[tuple[str, ChunkIndex], ChunkTable] = {}
    for piece in pieces:
        first, stop = piece.chunk_group
        key = (piece.leaf_name, first)
        if key not in groups:
            groups[key] = _place_group_in_files(layout, piece, first, stop)
        layout.regions.append(piece.location(groups[key]))
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
        if nbytes >= MIN_ALIGNED_CHUNK_NBYTES:
            nbytes = -(-nbytes // PAGE) * PAGE
        chunks = StridedChunks(file, start, first, strides(counts, nbytes))
    layout.file_sizes[-1] = chunks.offset + math.prod(counts) * nbytes
    return chunks


def _place_group_in_files(
    layout: ChunkLayout, piece: LeafPiece, first: ChunkIndex, stop: ChunkIndex
) -> ChunkTable:
    """Append one file for each chunk of a group (`chunk_group`)."""
    nbytes = piece.chunk_nbytes
    # A box of one chunk has no distance between chunks, but the checksum recorder divides by it.
    chunk_strides = (nbytes,) * len(first)
    boxes = layout.placed_chunks.setdefault(piece.leaf_name, [])
    places: dict[ChunkIndex, FilePosition] = {}
    for index in itertools.product(*map(range, first, stop)):
        file = len(layout.file_sizes)
        layout.file_sizes.append(nbytes)
        places[index] = file, 0
        next_index = tuple(i + 1 for i in index)
        boxes.append(PlacedChunks(index, next_index, StridedChunks(file, 0, index, chunk_strides)))
    return ChunkTable.from_places(first, stop, places)
