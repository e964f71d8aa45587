"""The index algebra: which bytes of a leaf's chunks are which bytes of a tensor, for any box of either. Pure.

Both sides are plain memory: a tensor in C order, a leaf in chunks. A `Copy` is a rectangle with a step on each side;
read left to right it saves, right to left it exports. Nothing here knows a file format or touches a value.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from prepcli.planning.boxes import Box, Range, intersect, split_merged_range, strides
from prepcli.planning.grids import ChunkGrid, DimPiece, Placement, StridedPlacement, free_atom_ranges, split_dim
from trainer.models.axis_map import AxisMap

NO_INDICES: Mapping[str, int] = {}


@dataclass(frozen=True, slots=True)
class StridedCopy:
    """`width` bytes, repeated over `dims` = (count, step in the tensor, step opposite), outermost opposite first."""

    tensor_offset: int  # bytes from the start of the tensor
    file: int
    file_offset: int  # bytes from the start of the file on the other side
    width: int
    dims: tuple[tuple[int, int, int], ...] = ()

    @property
    def nbytes(self) -> int:
        return self.width * math.prod(n for n, _, _ in self.dims)

    @property
    def run_nbytes(self) -> int:
        """Bytes that lie together on the other side."""
        length = self.width
        for count, _, step in reversed(self.dims):
            if step != length:
                break
            length *= count
        return length

    @property
    def repeats(self) -> tuple[tuple[int, int], ...]:
        """(count, step) of the runs on the other side, outermost first."""
        length, kept = self.width, len(self.dims)
        while kept and self.dims[kept - 1][2] == length:
            length *= self.dims[kept - 1][0]
            kept -= 1
        return tuple((count, step) for count, _, step in self.dims[:kept])

    def run_offsets(self) -> Iterator[int]:
        """Where each run begins on the other side, in the order in which their bytes follow each other."""
        for steps in itertools.product(*(range(0, n * step, step) for n, step in self.repeats)):
            yield self.file_offset + sum(steps)


@dataclass(frozen=True, slots=True)
class Region:
    """What one row has of one tensor, and where that lies: `at` is the index of each stacked atom."""

    axis_map: AxisMap
    stacked_indices: tuple[tuple[str, int], ...]
    grid: ChunkGrid
    placement: Placement
    itemsize: int


def region_copies(region: Region, box: Box) -> Iterator[StridedCopy]:
    """The copies that tie a box of the tensor to the leaf's chunks; what other rows have of the box is left out."""
    row = region.axis_map
    cuts = [
        list(free_atom_ranges(dim.factors, _clip_range(span, dim.start, dim.selected_extent)))
        for span, dim in zip(box, row.source_dims)
    ]
    stacked = {atom: (i, i + 1) for atom, i in region.stacked_indices}
    for choice in itertools.product(*cuts):
        ranges: dict[str, Range] = dict(stacked)
        for part in choice:
            ranges |= part
        yield from _copies_to_chunks(region, ranges)


def leaf_box_copies(
    axis_map: AxisMap, box: Box, itemsize: int = 1, unscanned_indices: Mapping[str, int] = NO_INDICES
) -> Iterator[tuple[str, StridedCopy]]:
    """What fills a box of a leaf: (tensor, copy), the other side being the box itself in C order.

    What they leave over is padding. `leaf` gives the index of the atoms that tell unscanned leaves apart.
    """
    apart = {atom: (i, i + 1) for atom, i in unscanned_indices.items()}
    corner = [low for low, _ in box]
    steps = strides([high - low for low, high in box], itemsize)
    origin = -sum(low * step for low, step in zip(corner, steps))
    true = {
        f.atom: f.extent
        for f in (*axis_map.stacked_factors, *(f for dim in axis_map.source_dims for f in dim.factors))
        if f.fixed is None
    }
    for ranges in _atom_ranges_of_box(axis_map, box):
        clipped = apart | {a: intersect(r, (0, true[a])) for a, r in ranges.items()}
        for at in _iterate_stacked(axis_map, clipped):
            fixed = clipped | {a: (i, i + 1) for a, i in at.items()}
            cuts = [list(split_dim(dim, math.prod(f.extent for f in dim), fixed)) for dim in axis_map.leaf_dims]
            for choice in itertools.product(*cuts):
                yield axis_map.tensor_name(at), _make_copy(axis_map, fixed, choice, steps, 0, origin, itemsize)


def _atom_ranges_of_box(axis_map: AxisMap, box: Box) -> Iterator[dict[str, Range]]:
    cuts = [list(split_merged_range(span, [f.extent for f in dim])) for span, dim in zip(box, axis_map.leaf_dims)]
    for choice in itertools.product(*cuts):
        yield {f.atom: r for dim, part in zip(axis_map.leaf_dims, choice) for f, r in zip(dim, part)}


def _iterate_stacked(axis_map: AxisMap, atom_ranges: Mapping[str, Range]) -> Iterator[dict[str, int]]:
    atoms = [f.atom for f in axis_map.stacked_factors]
    for index in itertools.product(*(range(*atom_ranges[a]) for a in atoms)):
        yield dict(zip(atoms, index))


def _clip_range(index_range: Range, start: int, length: int) -> Range:
    low, high = intersect(index_range, (start, start + length))
    return low - start, high - start


def _copies_to_chunks(region: Region, atom_ranges: Mapping[str, Range]) -> Iterator[StridedCopy]:
    row, grid = region.axis_map, region.grid
    steps = strides(grid.chunk_shape, region.itemsize)
    cuts = [list(split_dim(dim, length, atom_ranges)) for dim, length in zip(row.leaf_dims, grid.chunk_shape)]
    for choice in itertools.product(*cuts):
        if isinstance(region.placement, StridedPlacement):
            file, offset = region.placement.find([cut.chunk_index for cut in choice])
            yield _make_copy(row, atom_ranges, choice, steps, file, offset, region.itemsize, region.placement.strides)
        else:
            yield from _copies_by_chunk(region, atom_ranges, choice, steps)


def _copies_by_chunk(
    region: Region, atom_ranges: Mapping[str, Range], dim_pieces: Sequence[DimPiece], steps: Sequence[int]
) -> Iterator[StridedCopy]:
    """Where chunks lie anywhere: every digit that counts chunks is counted here."""
    singles = [list(_split_by_chunk(cut)) for cut in dim_pieces]
    for parts in itertools.product(*singles):
        file, offset = region.placement.find([cut.chunk_index for cut in parts])
        yield _make_copy(region.axis_map, atom_ranges, parts, steps, file, offset, region.itemsize)


def _split_by_chunk(piece: DimPiece) -> Iterator[DimPiece]:
    counting = [d for d in piece.steps if d.chunk_step]
    rest = tuple(d for d in piece.steps if not d.chunk_step)
    for index in itertools.product(*(range(d.count) for d in counting)):
        lows, cell = dict(piece.atom_starts), piece.chunk_index
        for i, digit in zip(index, counting):
            lows[digit.atom] += i * digit.atom_step
            cell += i * digit.chunk_step
        yield DimPiece(tuple(lows.items()), cell, piece.element_offset, rest)


def _make_copy(
    axis_map: AxisMap,
    atom_ranges: Mapping[str, Range],
    dim_pieces: Sequence[DimPiece],
    element_strides: Sequence[int],
    file: int,
    file_offset: int,
    itemsize: int,
    chunk_strides: Sequence[int] = (),
) -> StridedCopy:
    lows = {atom: low for atom, (low, _) in atom_ranges.items()} | {
        a: low for cut in dim_pieces for a, low in cut.atom_starts
    }
    at, tensor = _tensor_offset_and_strides(axis_map, lows, itemsize)
    file_offset += sum(cut.element_offset * step for cut, step in zip(dim_pieces, element_strides))
    dims = [
        (d.count, tensor.get(d.atom, 0) * d.atom_step, d.chunk_step * cell + d.element_step * step)
        for cut, step, cell in zip(dim_pieces, element_strides, chunk_strides or (0,) * len(dim_pieces))
        for d in cut.steps
    ]
    return merge_dims(StridedCopy(at, file, file_offset, itemsize, tuple(dims)))


def _tensor_offset_and_strides(
    axis_map: AxisMap, atom_starts: Mapping[str, int], itemsize: int
) -> tuple[int, dict[str, int]]:
    """Byte of the tensor at which the atoms' lows lie, and the step of each free atom."""
    at, found = 0, {}
    for dim, step in zip(axis_map.source_dims, strides(axis_map.source_shape, itemsize)):
        at += dim.start * step
        for factor, inner in zip(dim.factors, strides([f.extent for f in dim.factors], step)):
            at += (atom_starts[factor.atom] if factor.fixed is None else factor.fixed) * inner
            if factor.fixed is None:
                found[factor.atom] = inner
    return at, found


def merge_dims(copy: StridedCopy) -> StridedCopy:
    """The same copy with as few dims as there can be, in the order of the other side."""
    dims = sorted((d for d in copy.dims if d[0] > 1), key=lambda d: -d[2])
    width, kept = copy.width, []
    for count, here, there in reversed(dims):
        if not kept and here == there == width:
            width *= count
        elif kept and (here, there) == (kept[-1][0] * kept[-1][1], kept[-1][0] * kept[-1][2]):
            kept[-1] = (kept[-1][0] * count, kept[-1][1], kept[-1][2])
        else:
            kept.append((count, here, there))
    return StridedCopy(copy.tensor_offset, copy.file, copy.file_offset, width, tuple(reversed(kept)))
