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
from prepcli.algebra.grids import (
    ChunkGrid,
    ExplicitPlacement,
    Placement,
    StridedPlacement,
)
from prepcli.algebra.strided_copies import ChunkedLocation, region_copies
from prepcli.planning.plan import PlacedChunks
from prepcli.planning.slabs import PAGE

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
        itemsize: Bytes per element.
        source_offset: Offset of the tensor in its source file, or 0 if it has none.
    """

    leaf_name: str
    axis_map: AxisMap
    stacked_indices: tuple[tuple[str, int], ...]
    grid: ChunkGrid
    itemsize: int
    source_offset: int = 0


@dataclass(slots=True)
class ChunkLayout:
    """The file layout of an output's chunks.

    Attributes:
        regions: Region of each placed piece, in order.
        placed_chunks: Boxes of placed chunks, by leaf name.
        file_sizes: Size of each data file in bytes.
    """

    regions: list[ChunkedLocation] = field(default_factory=list)
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
    placements: dict[tuple[str, tuple[int, ...]], StridedPlacement] = {}
    for piece in pieces:
        first, stop = chunk_group(piece)
        key = (piece.leaf_name, first)
        if key not in placements:
            placements[key] = _place_chunk_group(layout, piece, first, stop)
            group = PlacedChunks(first, stop, placements[key])
            layout.placed_chunks.setdefault(piece.leaf_name, []).append(group)
        layout.regions.append(_make_region(piece, placements[key]))
    return layout


def place_chunk_files(pieces: Iterable[LeafPiece]) -> ChunkLayout:
    """Lay out each chunk as a file of its own, in the order of the pieces.

    Args:
        pieces: The parts of output leaves, in the order in which their tensors are streamed.

    Returns:
        The layout. It has one placed box for each chunk.
    """
    layout = ChunkLayout(file_sizes=[])
    placements: dict[tuple[str, tuple[int, ...]], ExplicitPlacement] = {}
    for piece in pieces:
        first, stop = chunk_group(piece)
        key = (piece.leaf_name, first)
        if key not in placements:
            placements[key] = _place_group_in_files(layout, piece, first, stop)
        layout.regions.append(_make_region(piece, placements[key]))
    return layout


def chunk_group(piece: LeafPiece) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the box of chunks that are stored next to each other with a piece, as (first, stop) chunk indices.

    The box spans the whole chunk grid, except along dims that stack source tensors, such as `layers`. Along these dims
    it holds only the chunk of the piece.
    """
    # E.g. the leaf [layers=4, 3, 2] in chunks [1, 1, 2] has the grid [4, 3, 1]. Layer 2 takes the chunks
    # [2, 0, 0] to [3, 3, 1]: a tensor is read once, and its chunks are written next to each other.
    stacked = dict(piece.stacked_indices)
    first: list[int] = []
    stop: list[int] = []
    for dim, length, count in zip(
        piece.axis_map.leaf_dims, piece.grid.chunk_shape, piece.grid.chunk_counts
    ):
        is_stacked = dim and all(factor.atom in stacked for factor in dim)
        if not is_stacked:
            first.append(0)
            stop.append(count)
            continue
        # A dim of several stacked atoms counts like digits: (groups=2 layers=3) at 1, 2 is 1 * 3 + 2.
        index = 0
        for factor in dim:
            index = index * factor.extent + stacked[factor.atom]
        first.append(index // length)
        stop.append(index // length + 1)
    return tuple(first), tuple(stop)


def _place_chunk_group(
    layout: ChunkLayout, piece: LeafPiece, first: tuple[int, ...], stop: tuple[int, ...]
) -> StridedPlacement:
    """Append the chunks of a group (`chunk_group`) to the last data file, or to a new file if the last is full."""
    if layout.file_sizes[-1] >= FILE_NBYTES:
        layout.file_sizes.append(0)
    # A chunk at the edge of the leaf is stored in full size, as zarr defines it, so that all chunks of
    # the group have equal distances. e.g. 3 x 1 chunks of 8 bytes have the strides (8, 8).
    counts = [stop_index - start_index for start_index, stop_index in zip(first, stop)]
    nbytes = math.prod(piece.grid.chunk_shape) * piece.itemsize
    file = len(layout.file_sizes) - 1
    start = -(-layout.file_sizes[-1] // PAGE) * PAGE
    # Direct I/O copies whole pages between buffers and files of equal page offsets, so a tensor that
    # stays one run keeps the page offset of its source.
    offset = start + piece.source_offset % PAGE
    placement = StridedPlacement(file, offset, first, strides(counts, nbytes))
    # Two copies are enough to see that there is more than one. A large leaf has millions.
    shape = piece.axis_map.source_shape
    copies = region_copies(_make_region(piece, placement), full_box(shape))
    widths = [copy.width for copy in itertools.islice(copies, 2)]
    if widths != [math.prod(shape) * piece.itemsize]:
        if nbytes >= MIN_ALIGNED_CHUNK_NBYTES:
            nbytes = -(-nbytes // PAGE) * PAGE
        placement = StridedPlacement(file, start, first, strides(counts, nbytes))
    layout.file_sizes[-1] = placement.offset + math.prod(counts) * nbytes
    return placement


def _place_group_in_files(
    layout: ChunkLayout, piece: LeafPiece, first: tuple[int, ...], stop: tuple[int, ...]
) -> ExplicitPlacement:
    """Append one file for each chunk of a group (`chunk_group`)."""
    nbytes = math.prod(piece.grid.chunk_shape) * piece.itemsize
    # A box of one chunk has no distance between chunks, but the checksum recorder divides by it.
    chunk_strides = (nbytes,) * len(first)
    boxes = layout.placed_chunks.setdefault(piece.leaf_name, [])
    locations: dict[tuple[int, ...], tuple[int, int]] = {}
    for index in itertools.product(*map(range, first, stop)):
        file = len(layout.file_sizes)
        layout.file_sizes.append(nbytes)
        locations[index] = file, 0
        next_index = tuple(i + 1 for i in index)
        placement = StridedPlacement(file, 0, index, chunk_strides)
        boxes.append(PlacedChunks(index, next_index, placement))
    return ExplicitPlacement(locations)


def _make_region(piece: LeafPiece, placement: Placement) -> ChunkedLocation:
    return ChunkedLocation(
        piece.axis_map, piece.stacked_indices, piece.grid, placement, piece.itemsize
    )
