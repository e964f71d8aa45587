"""Chunk grids: which chunk holds an element of a leaf.

Chunks are computed by arithmetic: no object per chunk is created.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import mul

from prepcli.algebra.axis_map import SizedAxis
from prepcli.algebra.boxes import Range, split_merged_range, strides


@dataclass(frozen=True, slots=True)
class ChunkGrid:
    """A regular chunk grid over an array. The last chunk along a dim may extend past the array's edge."""

    shape: tuple[int, ...]
    chunk_shape: tuple[int, ...]

    @property
    def chunk_counts(self) -> tuple[int, ...]:
        """Number of chunks along each dim."""
        # -(-a // b) rounds up in exact integers, e.g. 7 rows in chunks of 2 are 4 chunks
        return tuple(-(-extent // length) for extent, length in zip(self.shape, self.chunk_shape))


@dataclass(frozen=True, slots=True)
class AxisStep:
    """A loop over the indices of an atom (a named axis) inside a dim.

    For example, a dim `(heads head_dim)` has the atoms `heads` and `head_dim`.

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
        atom_starts: Name and first index of each axis of the dim, e.g. (("heads", 1), ("head_dim", 0)).
        chunk_index: Index of the first chunk along the dim.
        element_offset: Offset of the first element within that chunk.
        steps: The loops, outermost first.
    """

    atom_starts: tuple[tuple[str, int], ...]
    chunk_index: int
    element_offset: int
    steps: tuple[AxisStep, ...]


def split_dim(
    factors: Sequence[SizedAxis], chunk_length: int, *, atom_ranges: Mapping[str, Range]
) -> Iterator[DimPiece]:
    """Split the part `atom_ranges` of a leaf dim at its chunk boundaries, into as few regular pieces as possible.

    Args:
        factors: The axes of the dim, outermost first.
        chunk_length: Length of a chunk along the dim.
        atom_ranges: Index range of each axis. Axes of other dims are ignored.

    Yields:
        Pieces that cover the box, each element once.
    """
    if not factors:
        yield DimPiece((), 0, 0, ())
        return
    extents = [factor.extent for factor in factors]
    ranges = [atom_ranges[factor.atom] for factor in factors]
    if any(start >= stop for start, stop in ranges):
        return
    split_atom = find_split_atom(extents, chunk_length)
    if split_atom is None:
        yield from _pieces_by_chunk(factors, chunk_length, ranges)
        return
    # Of a dim (heads=4 head_dim=6) in chunks of 12, chunk boundaries split `heads`: inner_extent is
    # 6, and a chunk has 2 steps of heads. The range heads 1..4 splits at the multiples of 2:
    #
    #   heads          1   |   2   3
    #   chunk          0   |   1   1
    #
    # Each piece is then a nest of loops with constant steps: whole chunks outside, elements inside.
    inner_extent = math.prod(extents[split_atom + 1 :])
    steps_per_chunk = chunk_length // inner_extent
    chunks_per_dim = -(-extents[split_atom] * inner_extent // chunk_length)
    chunk_steps = strides([*extents[:split_atom], chunks_per_dim])
    element_steps = strides(extents[split_atom:])
    for split_range in _split_at_multiples(ranges[split_atom], steps_per_chunk):
        yield _aligned_piece(
            factors,
            [*ranges[:split_atom], split_range, *ranges[split_atom + 1 :]],
            split_atom=split_atom,
            steps_per_chunk=steps_per_chunk,
            chunk_steps=chunk_steps,
            element_steps=element_steps,
        )


def split_dim_part(
    factors: Sequence[SizedAxis], chunk_length: int, *, atom_ranges: Mapping[str, Range], start: int
) -> Iterator[DimPiece]:
    """Split a part of a leaf dim at the chunk boundaries of the dim. See `split_dim`.

    Args:
        factors: The axes of the part, outermost first.
        chunk_length: Length of a chunk along the dim.
        atom_ranges: Index range of each axis. Axes of other dims are ignored.
        start: First index of the part in the dim, e.g. 6 for the second part of `(a=2 b=3 | c=4)`.

    Yields:
        Pieces that cover the box, each element once.
    """
    if start == 0:
        yield from split_dim(factors, chunk_length, atom_ranges=atom_ranges)
        return
    chunk, element = divmod(start, chunk_length)
    extent = math.prod(factor.extent for factor in factors)
    if element and element + extent > chunk_length:
        # Chunk boundaries cut the part at other indices than those of a dim of its own.
        ranges = [atom_ranges[factor.atom] for factor in factors]
        yield from _pieces_by_chunk(factors, chunk_length, ranges, start)
        return
    # The part lies in one chunk, or starts at a chunk boundary. It is a dim of its own, moved by chunks and elements.
    own_length = extent if element else chunk_length
    for piece in split_dim(factors, own_length, atom_ranges=atom_ranges):
        yield replace(
            piece,
            chunk_index=piece.chunk_index + chunk,
            element_offset=piece.element_offset + element,
        )


def find_split_atom(extents: Sequence[int], chunk_length: int) -> int | None:
    """Return the position of the axis of a dim split by chunk boundaries.

    Args:
        extents: Extents of the dim's axes, outermost first, e.g. [4, 6] for (heads=4 head_dim=6).
        chunk_length: Length of a chunk along the dim.

    Returns:
        The position of the only split axis. None if chunk boundaries fall at different indices of the inner axes.
    """
    # (heads=4 head_dim=6): chunks of 12 have 2 whole heads and split `heads`, chunks of 3 split
    # `head_dim`. Chunks of 4 split neither alone: they end at 4 in head 0, but at 2 and 6 in head 1.
    chunk_length = min(chunk_length, math.prod(extents))
    inner_extent = 1
    for number in reversed(range(len(extents))):
        if chunk_length % inner_extent == 0 and chunk_length // inner_extent <= extents[number]:
            # Chunks may end short at the end of the whole dim, but not at each step of outer atoms.
            is_even = extents[number] % (chunk_length // inner_extent) == 0
            if is_even or math.prod(extents[:number]) == 1:
                return number
            return None
        inner_extent *= extents[number]
    return None


def _split_at_multiples(split_range: Range, step: int) -> Iterator[Range]:
    """Split a range at its first and its last multiple of `step`."""
    # The part between them is whole chunks, which one loop describes. e.g. 1 to 7 in steps of 2:
    # 1 to 2, 2 to 6, 6 to 7.
    start, stop = split_range
    first_multiple = min(stop, -(-start // step) * step)
    last_multiple = max(start, stop // step * step)
    yield from itertools.pairwise(sorted({start, first_multiple, last_multiple, stop}))


def _aligned_piece(
    factors: Sequence[SizedAxis],
    ranges: Sequence[Range],
    *,
    split_atom: int,
    steps_per_chunk: int,
    chunk_steps: Sequence[int],
    element_steps: Sequence[int],
) -> DimPiece:
    """Return where the box `ranges` is in the chunks.

    Chunks split only the axis `factors[split_atom]`, every `steps_per_chunk` steps.
    """
    steps: list[AxisStep] = []
    atom_starts: list[tuple[str, int]] = []
    chunk_index = 0
    element_offset = 0
    for number, (factor, (start, stop)) in enumerate(zip(factors, ranges)):
        count = stop - start
        atom_starts.append((factor.atom, start))
        if number < split_atom:
            # A step of an outer atom moves whole chunks.
            chunk_step = chunk_steps[number]
            steps.append(AxisStep(factor.atom, count, 1, chunk_step, 0))
            chunk_index += start * chunk_step
        elif number > split_atom:
            # A step of an inner atom stays in the chunk.
            element_step = element_steps[number - split_atom]
            steps.append(AxisStep(factor.atom, count, 1, 0, element_step))
            element_offset += start * element_step
        else:
            # Steps along the split atom move within a chunk and then to the next one. E.g. step 7 with 3
            # steps per chunk is step 1 of chunk 2.
            chunk_index += start // steps_per_chunk
            element_offset += start % steps_per_chunk * element_steps[0]
            if count > steps_per_chunk:  # whole chunks
                num_chunks = count // steps_per_chunk
                steps.append(AxisStep(factor.atom, num_chunks, steps_per_chunk, 1, 0))
            count_in_chunk = min(count, steps_per_chunk)
            steps.append(AxisStep(factor.atom, count_in_chunk, 1, 0, element_steps[0]))
    return DimPiece(tuple(atom_starts), chunk_index, element_offset, tuple(steps))


def _pieces_by_chunk(
    factors: Sequence[SizedAxis], chunk_length: int, ranges: Sequence[Range], dim_start: int = 0
) -> Iterator[DimPiece]:
    """Yield one piece per chunk and per run of the innermost axis, for unevenly placed chunk boundaries."""
    # E.g. (a=2 b=3) in chunks of 2: elements 0 1 | 2 3 | 4 5. Row a=0 has the elements 0..3, in
    # pieces 0 1 and 2. Row a=1 has 3..6, in pieces 3 and 4 5.
    atom_strides = strides([factor.extent for factor in factors])
    inner_atom = factors[-1].atom
    inner_start, inner_stop = ranges[-1]
    outer_ranges = [range(start, stop) for start, stop in ranges[:-1]]
    for index in itertools.product(*outer_ranges):
        row_start = dim_start + sum(map(mul, index, atom_strides))
        start = row_start + inner_start
        row_stop = row_start + inner_stop
        while start < row_stop:
            stop = min(row_stop, (start // chunk_length + 1) * chunk_length)
            indices = (*index, start - row_start)
            yield DimPiece(
                tuple((factor.atom, i) for factor, i in zip(factors, indices)),
                start // chunk_length,
                start % chunk_length,
                (AxisStep(inner_atom, stop - start, 1, 0, 1),),
            )
            start = stop


def free_atom_ranges(
    factors: Sequence[SizedAxis], merged_range: Range
) -> Iterator[dict[str, Range]]:
    """Split a range of a merged dim into boxes over its axes without a fixed index.

    Args:
        factors: The axes of the dim, outermost first.
        merged_range: Half-open range of the merged dim.

    Yields:
        Index range of each axis, by name. Elements with another index of a fixed axis are excluded.
    """
    # A fixed atom selects one index of its axis, e.g. (qkv=3 at 1, embed=8) is the middle third of a
    # fused weight. A box without that index has no element of the leaf.
    for box in split_merged_range(merged_range, [factor.extent for factor in factors]):
        free_ranges: dict[str, Range] = {}
        has_fixed = True
        for factor, (start, stop) in zip(factors, box):
            if factor.fixed is None:
                free_ranges[factor.atom] = (start, stop)
            elif not start <= factor.fixed < stop:
                has_fixed = False
        if has_fixed:
            yield free_ranges
