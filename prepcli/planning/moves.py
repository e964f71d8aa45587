"""The index algebra: which bytes of a leaf's chunks are which bytes of a tensor, for any box of either. Pure.

Both sides are plain memory: a tensor in C order, a leaf in chunks. A `Copy` is a rectangle with a step on each side;
read left to right it saves, right to left it exports. Nothing here knows a file format or touches a value.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from prepcli.planning.boxes import Box, Range, cut_merged, overlap, strides
from prepcli.planning.grids import DimCut, Grid, Lattice, Places, atom_boxes, cut_dim
from trainer.models.axis_map import AxisMap

NONE: Mapping[str, int] = {}


@dataclass(frozen=True, slots=True)
class Copy:
    """`width` bytes, repeated over `dims` = (count, step in the tensor, step opposite), outermost opposite first."""

    at: int  # bytes from the start of the tensor
    file: int
    offset: int  # bytes from the start of the file on the other side
    width: int
    dims: tuple[tuple[int, int, int], ...] = ()

    @property
    def nbytes(self) -> int:
        return self.width * math.prod(n for n, _, _ in self.dims)

    @property
    def run(self) -> int:
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

    def offsets(self) -> Iterator[int]:
        """Where each run begins on the other side, in the order in which their bytes follow each other."""
        for steps in itertools.product(*(range(0, n * step, step) for n, step in self.repeats)):
            yield self.offset + sum(steps)


@dataclass(frozen=True, slots=True)
class Region:
    """What one row has of one tensor, and where that lies: `at` is the index of each stacked atom."""

    row: AxisMap
    at: tuple[tuple[str, int], ...]
    grid: Grid
    places: Places
    itemsize: int


def copies(region: Region, box: Box) -> Iterator[Copy]:
    """The copies that tie a box of the tensor to the leaf's chunks; what other rows have of the box is left out."""
    row = region.row
    cuts = [list(atom_boxes(dim.factors, _inside(span, dim.start, dim.taken))) for span, dim in zip(box, row.source)]
    stacked = {atom: (i, i + 1) for atom, i in region.at}
    for choice in itertools.product(*cuts):
        ranges: dict[str, Range] = dict(stacked)
        for part in choice:
            ranges |= part
        yield from _to_chunks(region, ranges)


def pieces(row: AxisMap, box: Box, itemsize: int = 1, leaf: Mapping[str, int] = NONE) -> Iterator[tuple[str, Copy]]:
    """What fills a box of a leaf: (tensor, copy), the other side being the box itself in C order.

    What they leave over is padding. `leaf` gives the index of the atoms that tell unscanned leaves apart.
    """
    apart = {atom: (i, i + 1) for atom, i in leaf.items()}
    corner = [low for low, _ in box]
    steps = strides([high - low for low, high in box], itemsize)
    origin = -sum(low * step for low, step in zip(corner, steps))
    true = {f.atom: f.extent for f in (*row.stacked, *(f for dim in row.source for f in dim.factors)) if f.held is None}
    for ranges in _leaf_boxes(row, box):
        clipped = apart | {a: overlap(r, (0, true[a])) for a, r in ranges.items()}
        for at in _stacked_indices(row, clipped):
            fixed = clipped | {a: (i, i + 1) for a, i in at.items()}
            cuts = [list(cut_dim(dim, math.prod(f.extent for f in dim), fixed)) for dim in row.leaf]
            for choice in itertools.product(*cuts):
                yield row.tensor_name(at), _copy(row, fixed, choice, steps, 0, origin, itemsize)


def _leaf_boxes(row: AxisMap, box: Box) -> Iterator[dict[str, Range]]:
    cuts = [list(cut_merged(span, [f.extent for f in dim])) for span, dim in zip(box, row.leaf)]
    for choice in itertools.product(*cuts):
        yield {f.atom: r for dim, part in zip(row.leaf, choice) for f, r in zip(dim, part)}


def _stacked_indices(row: AxisMap, ranges: Mapping[str, Range]) -> Iterator[dict[str, int]]:
    atoms = [f.atom for f in row.stacked]
    for index in itertools.product(*(range(*ranges[a]) for a in atoms)):
        yield dict(zip(atoms, index))


def _inside(span: Range, start: int, taken: int) -> Range:
    low, high = overlap(span, (start, start + taken))
    return low - start, high - start


def _to_chunks(region: Region, ranges: Mapping[str, Range]) -> Iterator[Copy]:
    row, grid = region.row, region.grid
    steps = strides(grid.chunk, region.itemsize)
    cuts = [list(cut_dim(dim, length, ranges)) for dim, length in zip(row.leaf, grid.chunk)]
    for choice in itertools.product(*cuts):
        if isinstance(region.places, Lattice):
            file, offset = region.places.find([cut.cell for cut in choice])
            yield _copy(row, ranges, choice, steps, file, offset, region.itemsize, region.places.strides)
        else:
            yield from _chunk_by_chunk(region, ranges, choice, steps)


def _chunk_by_chunk(
    region: Region, ranges: Mapping[str, Range], choice: Sequence[DimCut], steps: Sequence[int]
) -> Iterator[Copy]:
    """Where chunks lie anywhere: every digit that counts chunks is counted here."""
    singles = [list(_one_chunk_each(cut)) for cut in choice]
    for parts in itertools.product(*singles):
        file, offset = region.places.find([cut.cell for cut in parts])
        yield _copy(region.row, ranges, parts, steps, file, offset, region.itemsize)


def _one_chunk_each(cut: DimCut) -> Iterator[DimCut]:
    counting = [d for d in cut.digits if d.cells]
    rest = tuple(d for d in cut.digits if not d.cells)
    for index in itertools.product(*(range(d.count) for d in counting)):
        lows, cell = dict(cut.lows), cut.cell
        for i, digit in zip(index, counting):
            lows[digit.atom] += i * digit.step
            cell += i * digit.cells
        yield DimCut(tuple(lows.items()), cell, cut.inner, rest)


def _copy(
    row: AxisMap,
    ranges: Mapping[str, Range],
    choice: Sequence[DimCut],
    steps: Sequence[int],
    file: int,
    offset: int,
    itemsize: int,
    cells: Sequence[int] = (),
) -> Copy:
    lows = {atom: low for atom, (low, _) in ranges.items()} | {a: low for cut in choice for a, low in cut.lows}
    at, tensor = _in_tensor(row, lows, itemsize)
    offset += sum(cut.inner * step for cut, step in zip(choice, steps))
    dims = [
        (d.count, tensor.get(d.atom, 0) * d.step, d.cells * cell + d.inner * step)
        for cut, step, cell in zip(choice, steps, cells or (0,) * len(choice))
        for d in cut.digits
    ]
    return merge(Copy(at, file, offset, itemsize, tuple(dims)))


def _in_tensor(row: AxisMap, lows: Mapping[str, int], itemsize: int) -> tuple[int, dict[str, int]]:
    """Byte of the tensor at which the atoms' lows lie, and the step of each free atom."""
    at, found = 0, {}
    for dim, step in zip(row.source, strides(row.source_shape, itemsize)):
        at += dim.start * step
        for factor, inner in zip(dim.factors, strides([f.extent for f in dim.factors], step)):
            at += (lows[factor.atom] if factor.held is None else factor.held) * inner
            if factor.held is None:
                found[factor.atom] = inner
    return at, found


def merge(copy: Copy) -> Copy:
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
    return Copy(copy.at, copy.file, copy.offset, width, tuple(reversed(kept)))
