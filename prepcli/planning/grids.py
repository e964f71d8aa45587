"""Chunk grids: which chunk holds an element of a leaf, and where chunks lie; arithmetic, no object per chunk. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import mul, sub

from prepcli.planning.boxes import Range, cut_merged, strides
from trainer.models.axis_map import Factor


@dataclass(frozen=True, slots=True)
class Grid:
    """A leaf cut into equal chunks; the last of a dim may reach beyond the edge."""

    shape: tuple[int, ...]
    chunk: tuple[int, ...]

    @property
    def counts(self) -> tuple[int, ...]:
        """Chunks along each dim."""
        return tuple(-(-extent // length) for extent, length in zip(self.shape, self.chunk))


@dataclass(frozen=True, slots=True)
class Lattice:
    """Chunks of a box of the grid, from index `first`: a step of the index is a step of `strides` bytes."""

    file: int
    offset: int
    first: tuple[int, ...]
    strides: tuple[int, ...]

    def find(self, index: Sequence[int]) -> tuple[int, int]:
        """File number and offset of a chunk."""
        return self.file, self.offset + sum(map(mul, map(sub, index, self.first), self.strides))


@dataclass(frozen=True, slots=True)
class Scatter:
    """Chunks that lie anywhere, one by one."""

    chunks: Mapping[tuple[int, ...], tuple[int, int]]

    def find(self, index: Sequence[int]) -> tuple[int, int]:
        """File number and offset of a chunk."""
        return self.chunks[tuple(index)]


Places = Lattice | Scatter


@dataclass(frozen=True, slots=True)
class Digit:
    """`count` steps along a dim: each is `step` of the atom, `cells` chunks, and `inner` elements within a chunk."""

    atom: str
    count: int
    step: int
    cells: int
    inner: int


@dataclass(frozen=True, slots=True)
class DimCut:
    """Ranges of a dim's atoms that are regular on the chunk grid: from chunk `cell`, element `inner` in it."""

    lows: tuple[tuple[str, int], ...]  # where each atom begins
    cell: int
    inner: int
    digits: tuple[Digit, ...]


def cut_dim(factors: Sequence[Factor], chunk: int, ranges: Mapping[str, Range]) -> Iterator[DimCut]:
    """Cut a box of a leaf dim's atoms where chunks begin, into as few regular pieces as there are."""
    if not factors:
        yield DimCut((), 0, 0, ())
        return
    extents = [f.extent for f in factors]
    spans = [ranges[f.atom] for f in factors]
    if any(low >= high for low, high in spans):
        return
    at = cut_atom(extents, chunk)
    if at is None:
        yield from _cell_by_cell(factors, chunk, spans)
        return
    within = math.prod(extents[at + 1 :])
    cells = strides([*extents[:at], -(-extents[at] * within // chunk)])
    inner = strides(extents[at:])
    for span in _spans(spans[at], chunk // within):
        yield _regular(factors, [*spans[:at], span, *spans[at + 1 :]], at, chunk // within, cells, inner)


def cut_atom(extents: Sequence[int], chunk: int) -> int | None:
    """Number of the atom that chunk edges cut; None if they fall unevenly over the merged atoms."""
    if chunk >= math.prod(extents):
        chunk = math.prod(extents)
    within = 1
    for at in reversed(range(len(extents))):
        if chunk % within == 0 and chunk // within <= extents[at]:
            even = extents[at] % (chunk // within) == 0
            return at if even or math.prod(extents[:at]) == 1 else None
        within *= extents[at]
    return None


def _spans(span: Range, step: int) -> Iterator[Range]:
    """A range cut at the first and the last multiple of `step` in it."""
    low, high = span
    edges = sorted({low, min(high, -(-low // step) * step), max(low, high // step * step), high})
    yield from itertools.pairwise(edges)


def _regular(
    factors: Sequence[Factor], spans: Sequence[Range], at: int, step: int, cells: Sequence[int], inner: Sequence[int]
) -> DimCut:
    digits, cell, offset = [], 0, 0
    for i, (factor, (low, high)) in enumerate(zip(factors, spans)):
        if i < at:
            digits.append(Digit(factor.atom, high - low, 1, cells[i], 0))
            cell += low * cells[i]
        elif i > at:
            digits.append(Digit(factor.atom, high - low, 1, 0, inner[i - at]))
            offset += low * inner[i - at]
        else:
            cell, offset = cell + low // step, offset + low % step * inner[0]
            if high - low > step:  # whole chunks
                digits.append(Digit(factor.atom, (high - low) // step, step, 1, 0))
            digits.append(Digit(factor.atom, min(high - low, step), 1, 0, inner[0]))
    return DimCut(tuple((f.atom, low) for f, (low, _) in zip(factors, spans)), cell, offset, tuple(digits))


def _cell_by_cell(factors: Sequence[Factor], chunk: int, spans: Sequence[Range]) -> Iterator[DimCut]:
    """Where chunk edges fall unevenly: one piece a chunk and run of the innermost atom."""
    extents = [f.extent for f in factors]
    steps = strides(extents)
    last = factors[-1]
    for index in itertools.product(*(range(low, high) for low, high in spans[:-1])):
        start = sum(i * step for i, step in zip(index, steps))
        low, high = start + spans[-1][0], start + spans[-1][1]
        while low < high:
            stop = min(high, (low // chunk + 1) * chunk)
            lows = tuple((f.atom, i) for f, i in zip(factors, (*index, low - start)))
            yield DimCut(lows, low // chunk, low % chunk, (Digit(last.atom, stop - low, 1, 0, 1),))
            low = stop


def atom_boxes(factors: Sequence[Factor], span: Range) -> Iterator[dict[str, Range]]:
    """The boxes of free atoms that a range of a merged dim covers, as far as its held atoms are at their index."""
    for box in cut_merged(span, [f.extent for f in factors]):
        held = [(f.held, r) for f, r in zip(factors, box) if f.held is not None]
        if all(low <= index < high for index, (low, high) in held):
            yield {f.atom: r for f, r in zip(factors, box) if f.held is None}
