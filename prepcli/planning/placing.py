"""Where a leaf's chunks go in data files: a function of what is saved alone, never of the run. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from prepcli.planning.boxes import strides, whole
from prepcli.planning.grids import Grid, Lattice
from prepcli.planning.moves import Region, copies
from prepcli.planning.plan import Placed
from prepcli.planning.slabs import PAGE
from trainer.models.axis_map import AxisMap

FILE_NBYTES = 1 << 30  # a data file is closed once it is this long
PAGED_SLOT = 16 * PAGE  # chunks from this size on begin at a page: below, the gaps would cost more than they help


@dataclass(frozen=True, slots=True)
class Want:
    """A tensor that a leaf takes in: its row, the indices it stands for, and where its bytes are now (0: nowhere)."""

    leaf: str
    row: AxisMap
    at: tuple[tuple[str, int], ...]
    grid: Grid
    itemsize: int
    source_offset: int = 0


@dataclass(slots=True)
class Layout:
    """The outcome: a region a want, the placed boxes of every leaf, and the size of each data file."""

    regions: list[Region] = field(default_factory=list)
    placed: dict[str, list[Placed]] = field(default_factory=dict)
    sizes: list[int] = field(default_factory=lambda: [0])


def place(wants: Iterable[Want]) -> Layout:
    """Lay chunks out in the order in which their tensors come.

    A tensor whose bytes need no other order is put as deep into a page as it lies in its source, so that whole pages
    move from file to file untouched; others begin at a page.
    """
    layout, lattices = Layout(), {}
    for want in wants:
        first, stop = cells_together(want)
        key = (want.leaf, first)
        if key not in lattices:
            lattices[key] = _next(layout, want, first, stop)
            layout.placed.setdefault(want.leaf, []).append(Placed(first, stop, lattices[key]))
        layout.regions.append(_region(want, lattices[key]))
    return layout


def cells_together(want: Want) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The chunks that are laid out together: all, but for dims of stacked atoms, which are laid out one by one."""
    at = dict(want.at)
    first, stop = [], []
    for dim, length, count in zip(want.row.leaf, want.grid.chunk, want.grid.counts):
        alone = dim and all(f.atom in at for f in dim)
        index = 0
        for factor in dim if alone else ():
            index = index * factor.extent + at[factor.atom]
        first.append(index // length if alone else 0)
        stop.append(index // length + 1 if alone else count)
    return tuple(first), tuple(stop)


def _next(layout: Layout, want: Want, first: tuple[int, ...], stop: tuple[int, ...]) -> Lattice:
    if layout.sizes[-1] >= FILE_NBYTES:
        layout.sizes.append(0)
    counts = [high - low for low, high in zip(first, stop)]
    nbytes = math.prod(want.grid.chunk) * want.itemsize
    file, start = len(layout.sizes) - 1, -(-layout.sizes[-1] // PAGE) * PAGE
    lattice = Lattice(file, start + want.source_offset % PAGE, first, strides(counts, nbytes))
    if not _plain(want, lattice):
        nbytes = -(-nbytes // PAGE) * PAGE if nbytes >= PAGED_SLOT else nbytes
        lattice = Lattice(file, start, first, strides(counts, nbytes))
    layout.sizes[-1] = lattice.offset + math.prod(counts) * nbytes
    return lattice


def _plain(want: Want, lattice: Lattice) -> bool:
    found = itertools.islice(copies(_region(want, lattice), whole(want.row.source_shape)), 2)
    return [copy.width for copy in found] == [math.prod(want.row.source_shape) * want.itemsize]


def _region(want: Want, lattice: Lattice) -> Region:
    return Region(want.row, want.at, want.grid, lattice, want.itemsize)
