"""Chunk grids: which chunk holds an element of a leaf, and where chunks lie; arithmetic, no object per chunk. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import mul, sub

from prepcli.planning.boxes import Range, split_merged_range, strides
from trainer.models.axis_map import Factor


@dataclass(frozen=True, slots=True)
class ChunkGrid:
    """A leaf cut into equal chunks; the last of a dim may reach beyond the edge."""

    shape: tuple[int, ...]
    chunk_shape: tuple[int, ...]

    @property
    def chunk_counts(self) -> tuple[int, ...]:
        """Chunks along each dim."""
        return tuple(-(-extent // length) for extent, length in zip(self.shape, self.chunk_shape))


@dataclass(frozen=True, slots=True)
class StridedPlacement:
    """Chunks of a box of the grid, from index `first`: a step of the index is a step of `strides` bytes."""

    file: int
    offset: int
    first_index: tuple[int, ...]
    strides: tuple[int, ...]

    def find(self, index: Sequence[int]) -> tuple[int, int]:
        """File number and offset of a chunk."""
        return self.file, self.offset + sum(map(mul, map(sub, index, self.first_index), self.strides))


@dataclass(frozen=True, slots=True)
class ExplicitPlacement:
    """Chunks that lie anywhere, one by one."""

    chunks: Mapping[tuple[int, ...], tuple[int, int]]

    def find(self, index: Sequence[int]) -> tuple[int, int]:
        """File number and offset of a chunk."""
        return self.chunks[tuple(index)]


Placement = StridedPlacement | ExplicitPlacement


@dataclass(frozen=True, slots=True)
class AxisStep:
    """`count` steps along a dim: each is `step` of the atom, `cells` chunks, and `inner` elements within a chunk."""

    atom: str
    count: int
    atom_step: int
    chunk_step: int
    element_step: int


@dataclass(frozen=True, slots=True)
class DimPiece:
    """Ranges of a dim's atoms that are regular on the chunk grid: from chunk `cell`, element `inner` in it."""

    atom_starts: tuple[tuple[str, int], ...]  # where each atom begins
    chunk_index: int
    element_offset: int
    steps: tuple[AxisStep, ...]


def split_dim(factors: Sequence[Factor], chunk_length: int, atom_ranges: Mapping[str, Range]) -> Iterator[DimPiece]:
    """Cut a box of a leaf dim's atoms where chunks begin, into as few regular pieces as there are."""
    if not factors:
        yield DimPiece((), 0, 0, ())
        return
    extents = [f.extent for f in factors]
    spans = [atom_ranges[f.atom] for f in factors]
    if any(low >= high for low, high in spans):
        return
    at = find_split_atom(extents, chunk_length)
    if at is None:
        yield from _pieces_by_chunk(factors, chunk_length, spans)
        return
    within = math.prod(extents[at + 1 :])
    cells = strides([*extents[:at], -(-extents[at] * within // chunk_length)])
    inner = strides(extents[at:])
    for span in _split_at_multiples(spans[at], chunk_length // within):
        yield _aligned_piece(factors, [*spans[:at], span, *spans[at + 1 :]], at, chunk_length // within, cells, inner)


def find_split_atom(extents: Sequence[int], chunk_length: int) -> int | None:
    """Number of the atom that chunk edges cut; None if they fall unevenly over the merged atoms."""
    if chunk_length >= math.prod(extents):
        chunk_length = math.prod(extents)
    within = 1
    for at in reversed(range(len(extents))):
        if chunk_length % within == 0 and chunk_length // within <= extents[at]:
            even = extents[at] % (chunk_length // within) == 0
            return at if even or math.prod(extents[:at]) == 1 else None
        within *= extents[at]
    return None


def _split_at_multiples(span: Range, step: int) -> Iterator[Range]:
    """A range cut at the first and the last multiple of `step` in it."""
    low, high = span
    edges = sorted({low, min(high, -(-low // step) * step), max(low, high // step * step), high})
    yield from itertools.pairwise(edges)


def _aligned_piece(
    factors: Sequence[Factor],
    spans: Sequence[Range],
    split_atom: int,
    steps_per_chunk: int,
    chunk_steps: Sequence[int],
    element_steps: Sequence[int],
) -> DimPiece:
    digits, cell, offset = [], 0, 0
    for i, (factor, (low, high)) in enumerate(zip(factors, spans)):
        if i < split_atom:
            digits.append(AxisStep(factor.atom, high - low, 1, chunk_steps[i], 0))
            cell += low * chunk_steps[i]
        elif i > split_atom:
            digits.append(AxisStep(factor.atom, high - low, 1, 0, element_steps[i - split_atom]))
            offset += low * element_steps[i - split_atom]
        else:
            cell, offset = cell + low // steps_per_chunk, offset + low % steps_per_chunk * element_steps[0]
            if high - low > steps_per_chunk:  # whole chunks
                digits.append(AxisStep(factor.atom, (high - low) // steps_per_chunk, steps_per_chunk, 1, 0))
            digits.append(AxisStep(factor.atom, min(high - low, steps_per_chunk), 1, 0, element_steps[0]))
    return DimPiece(tuple((f.atom, low) for f, (low, _) in zip(factors, spans)), cell, offset, tuple(digits))


def _pieces_by_chunk(factors: Sequence[Factor], chunk_length: int, spans: Sequence[Range]) -> Iterator[DimPiece]:
    """Where chunk edges fall unevenly: one piece a chunk and run of the innermost atom."""
    extents = [f.extent for f in factors]
    steps = strides(extents)
    last = factors[-1]
    for index in itertools.product(*(range(low, high) for low, high in spans[:-1])):
        start = sum(i * step for i, step in zip(index, steps))
        low, high = start + spans[-1][0], start + spans[-1][1]
        while low < high:
            stop = min(high, (low // chunk_length + 1) * chunk_length)
            lows = tuple((f.atom, i) for f, i in zip(factors, (*index, low - start)))
            yield DimPiece(lows, low // chunk_length, low % chunk_length, (AxisStep(last.atom, stop - low, 1, 0, 1),))
            low = stop


def free_atom_ranges(factors: Sequence[Factor], merged_range: Range) -> Iterator[dict[str, Range]]:
    """The boxes of free atoms that a range of a merged dim covers, as far as its held atoms are at their index."""
    for box in split_merged_range(merged_range, [f.extent for f in factors]):
        held = [(f.fixed, r) for f, r in zip(factors, box) if f.fixed is not None]
        if all(low <= index < high for index, (low, high) in held):
            yield {f.atom: r for f, r in zip(factors, box) if f.fixed is None}
