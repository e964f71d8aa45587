"""Where a leaf's chunks go in data files: a function of what is saved alone, never of the run. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from prepcli.planning.boxes import full_box, strides
from prepcli.planning.grids import ChunkGrid, StridedPlacement
from prepcli.planning.plan import PlacedChunks
from prepcli.planning.slabs import PAGE
from prepcli.planning.strided_copies import Region, region_copies
from trainer.models.axis_map import AxisMap

FILE_NBYTES = 1 << 30  # a data file is closed once it is this long
MIN_ALIGNED_CHUNK_NBYTES = (
    16 * PAGE
)  # chunks from this size on begin at a page: below, the gaps would cost more than they help


@dataclass(frozen=True, slots=True)
class LeafPiece:
    """A tensor that a leaf takes in: its row, the indices it stands for, and where its bytes are now (0: nowhere)."""

    leaf_name: str
    axis_map: AxisMap
    stacked_indices: tuple[tuple[str, int], ...]
    grid: ChunkGrid
    itemsize: int
    source_offset: int = 0


@dataclass(slots=True)
class ChunkLayout:
    """The outcome: a region a want, the placed boxes of every leaf, and the size of each data file."""

    regions: list[Region] = field(default_factory=list)
    placed_chunks: dict[str, list[PlacedChunks]] = field(default_factory=dict)
    file_sizes: list[int] = field(default_factory=lambda: [0])


def place_chunks(pieces: Iterable[LeafPiece]) -> ChunkLayout:
    """Lay chunks out in the order in which their tensors come.

    A tensor whose bytes need no other order is put as deep into a page as it lies in its source, so that whole pages
    move from file to file untouched; others begin at a page.
    """
    layout, lattices = ChunkLayout(), {}
    for want in pieces:
        first, stop = chunk_group(want)
        key = (want.leaf_name, first)
        if key not in lattices:
            lattices[key] = _place_group(layout, want, first, stop)
            layout.placed_chunks.setdefault(want.leaf_name, []).append(PlacedChunks(first, stop, lattices[key]))
        layout.regions.append(_make_region(want, lattices[key]))
    return layout


def chunk_group(piece: LeafPiece) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The chunks that are laid out together: all, but for dims of stacked atoms, which are laid out one by one."""
    at = dict(piece.stacked_indices)
    first, stop = [], []
    for dim, length, count in zip(piece.axis_map.leaf_dims, piece.grid.chunk_shape, piece.grid.chunk_counts):
        alone = dim and all(f.atom in at for f in dim)
        index = 0
        for factor in dim if alone else ():
            index = index * factor.extent + at[factor.atom]
        first.append(index // length if alone else 0)
        stop.append(index // length + 1 if alone else count)
    return tuple(first), tuple(stop)


def _place_group(
    layout: ChunkLayout, piece: LeafPiece, first: tuple[int, ...], stop: tuple[int, ...]
) -> StridedPlacement:
    if layout.file_sizes[-1] >= FILE_NBYTES:
        layout.file_sizes.append(0)
    counts = [high - low for low, high in zip(first, stop)]
    nbytes = math.prod(piece.grid.chunk_shape) * piece.itemsize
    file, start = len(layout.file_sizes) - 1, -(-layout.file_sizes[-1] // PAGE) * PAGE
    lattice = StridedPlacement(file, start + piece.source_offset % PAGE, first, strides(counts, nbytes))
    if not _is_contiguous(piece, lattice):
        nbytes = -(-nbytes // PAGE) * PAGE if nbytes >= MIN_ALIGNED_CHUNK_NBYTES else nbytes
        lattice = StridedPlacement(file, start, first, strides(counts, nbytes))
    layout.file_sizes[-1] = lattice.offset + math.prod(counts) * nbytes
    return lattice


def _is_contiguous(piece: LeafPiece, placement: StridedPlacement) -> bool:
    found = itertools.islice(region_copies(_make_region(piece, placement), full_box(piece.axis_map.source_shape)), 2)
    return [copy.width for copy in found] == [math.prod(piece.axis_map.source_shape) * piece.itemsize]


def _make_region(piece: LeafPiece, placement: StridedPlacement) -> Region:
    return Region(piece.axis_map, piece.stacked_indices, piece.grid, placement, piece.itemsize)
