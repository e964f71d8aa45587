"""Chunk grids: which chunk holds an element of a leaf, and where each chunk is stored. Pure.

Chunks are computed by arithmetic: no object per chunk is created.
"""

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
    """A regular chunk grid over an array. The last chunk along a dim may extend past the array's edge."""

    shape: tuple[int, ...]
    chunk_shape: tuple[int, ...]

    @property
    def chunk_counts(self) -> tuple[int, ...]:
        """Number of chunks along each dim."""
        return tuple(-(-extent // length) for extent, length in zip(self.shape, self.chunk_shape))


@dataclass(frozen=True, slots=True)
class StridedPlacement:
    """Chunks stored at regular offsets of one file.

    Attributes:
        file: Number of the file.
        offset: Offset of the first chunk.
        first_index: Index of the first chunk in the grid.
        strides: Bytes from one chunk to the next, along each dim of the grid.
    """

    file: int
    offset: int
    first_index: tuple[int, ...]
    strides: tuple[int, ...]

    def find(self, index: Sequence[int]) -> tuple[int, int]:
        """Return the file number and offset of a chunk."""
        return self.file, self.offset + sum(map(mul, map(sub, index, self.first_index), self.strides))


@dataclass(frozen=True, slots=True)
class ExplicitPlacement:
    """Chunks with individual offsets: chunk index to (file number, offset)."""

    chunks: Mapping[tuple[int, ...], tuple[int, int]]

    def find(self, index: Sequence[int]) -> tuple[int, int]:
        """Return the file number and offset of a chunk."""
        return self.chunks[tuple(index)]


Placement = StridedPlacement | ExplicitPlacement


@dataclass(frozen=True, slots=True)
class AxisStep:
    """A loop over an atom's indices inside a dim.

    Attributes:
        atom: Name of the atom.
        count: Number of iterations.
        atom_step: Increment of the atom's index per iteration.
        chunk_step: Increment of the chunk index per iteration.
        element_step: Increment of the element offset within the chunk per iteration.
    """

    atom: str
    count: int
    atom_step: int
    chunk_step: int
    element_step: int


@dataclass(frozen=True, slots=True)
class DimPiece:
    """A part of a leaf dim, as a nest of regular loops over the chunk grid.

    Attributes:
        atom_starts: (atom, first index) of each atom of the dim.
        chunk_index: Index of the first chunk along the dim.
        element_offset: Offset of the first element within that chunk.
        steps: The loops, outermost first.
    """

    atom_starts: tuple[tuple[str, int], ...]
    chunk_index: int
    element_offset: int
    steps: tuple[AxisStep, ...]


def split_dim(factors: Sequence[Factor], chunk_length: int, *, atom_ranges: Mapping[str, Range]) -> Iterator[DimPiece]:
    """Split a box of a leaf dim's atoms at chunk boundaries, into as few regular pieces as possible.

    Args:
        factors: The dim's atoms, outermost first.
        chunk_length: Length of a chunk along the dim.
        atom_ranges: Range of each atom. Atoms of other dims are ignored.

    Yields:
        Pieces that cover the box, each element once.
    """
    if not factors:
        yield DimPiece((), 0, 0, ())
        return
    extents = [f.extent for f in factors]
    ranges = [atom_ranges[f.atom] for f in factors]
    if any(start >= stop for start, stop in ranges):
        return
    split_atom = find_split_atom(extents, chunk_length)
    if split_atom is None:
        yield from _pieces_by_chunk(factors, chunk_length, ranges)
        return
    inner_extent = math.prod(extents[split_atom + 1 :])
    chunk_steps = strides([*extents[:split_atom], -(-extents[split_atom] * inner_extent // chunk_length)])
    element_steps = strides(extents[split_atom:])
    for split_range in _split_at_multiples(ranges[split_atom], chunk_length // inner_extent):
        yield _aligned_piece(
            factors,
            [*ranges[:split_atom], split_range, *ranges[split_atom + 1 :]],
            split_atom=split_atom,
            steps_per_chunk=chunk_length // inner_extent,
            chunk_steps=chunk_steps,
            element_steps=element_steps,
        )


def find_split_atom(extents: Sequence[int], chunk_length: int) -> int | None:
    """Return the position of the atom that chunk boundaries split.

    Args:
        extents: Extents of a dim's atoms, outermost first.
        chunk_length: Length of a chunk along the dim.

    Returns:
        The position of the only split atom. None if chunk boundaries fall at
        different indices of the inner atoms.
    """
    if chunk_length >= math.prod(extents):
        chunk_length = math.prod(extents)
    inner_extent = 1
    for number in reversed(range(len(extents))):
        if chunk_length % inner_extent == 0 and chunk_length // inner_extent <= extents[number]:
            is_even = extents[number] % (chunk_length // inner_extent) == 0
            return number if is_even or math.prod(extents[:number]) == 1 else None
        inner_extent *= extents[number]
    return None


def _split_at_multiples(split_range: Range, step: int) -> Iterator[Range]:
    """Split a range at its first and its last multiple of `step`."""
    start, stop = split_range
    edges = sorted({start, min(stop, -(-start // step) * step), max(start, stop // step * step), stop})
    yield from itertools.pairwise(edges)


def _aligned_piece(
    factors: Sequence[Factor],
    ranges: Sequence[Range],
    *,
    split_atom: int,
    steps_per_chunk: int,
    chunk_steps: Sequence[int],
    element_steps: Sequence[int],
) -> DimPiece:
    """Return the piece of a dim whose chunk boundaries split one atom evenly."""
    steps, chunk_index, element_offset = [], 0, 0
    for number, (factor, (start, stop)) in enumerate(zip(factors, ranges)):
        if number < split_atom:
            steps.append(AxisStep(factor.atom, stop - start, 1, chunk_steps[number], 0))
            chunk_index += start * chunk_steps[number]
        elif number > split_atom:
            steps.append(AxisStep(factor.atom, stop - start, 1, 0, element_steps[number - split_atom]))
            element_offset += start * element_steps[number - split_atom]
        else:
            chunk_index, element_offset = (
                chunk_index + start // steps_per_chunk,
                element_offset + start % steps_per_chunk * element_steps[0],
            )
            if stop - start > steps_per_chunk:  # whole chunks
                steps.append(AxisStep(factor.atom, (stop - start) // steps_per_chunk, steps_per_chunk, 1, 0))
            steps.append(AxisStep(factor.atom, min(stop - start, steps_per_chunk), 1, 0, element_steps[0]))
    return DimPiece(
        tuple((f.atom, start) for f, (start, _) in zip(factors, ranges)), chunk_index, element_offset, tuple(steps)
    )


def _pieces_by_chunk(factors: Sequence[Factor], chunk_length: int, ranges: Sequence[Range]) -> Iterator[DimPiece]:
    """Yield one piece per chunk and run of the innermost atom, for chunk boundaries that fall unevenly."""
    extents = [f.extent for f in factors]
    atom_strides = strides(extents)
    inner_factor = factors[-1]
    for index in itertools.product(*(range(start, row_stop) for start, row_stop in ranges[:-1])):
        row_start = sum(i * stride for i, stride in zip(index, atom_strides))
        start, row_stop = row_start + ranges[-1][0], row_start + ranges[-1][1]
        while start < row_stop:
            stop = min(row_stop, (start // chunk_length + 1) * chunk_length)
            atom_starts = tuple((f.atom, i) for f, i in zip(factors, (*index, start - row_start)))
            yield DimPiece(
                atom_starts,
                start // chunk_length,
                start % chunk_length,
                (AxisStep(inner_factor.atom, stop - start, 1, 0, 1),),
            )
            start = stop


def free_atom_ranges(factors: Sequence[Factor], merged_range: Range) -> Iterator[dict[str, Range]]:
    """Split a range of a merged dim into boxes over its free atoms.

    Args:
        factors: The dim's atoms, outermost first.
        merged_range: Half-open range of the merged dim.

    Yields:
        Ranges of the free atoms, by atom. Elements with another index of a fixed atom are excluded.
    """
    for box in split_merged_range(merged_range, [f.extent for f in factors]):
        fixed_ranges = [(f.fixed, atom_range) for f, atom_range in zip(factors, box) if f.fixed is not None]
        if all(start <= index < stop for index, (start, stop) in fixed_ranges):
            yield {f.atom: atom_range for f, atom_range in zip(factors, box) if f.fixed is None}
