"""Chunk grids: which chunk holds an element of a leaf, and where chunks are stored.

Chunks are computed by arithmetic: no object per chunk is created. They are stored at regular offsets of a file, in a
table, or as boxes with own strides.
"""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import add, mul, sub
from typing import ClassVar, NamedTuple

from prepcli.algebra.axis_map import SizedAxis
from prepcli.algebra.boxes import Box, Range, split_merged_range, strides

# File number and offset.
FilePosition = tuple[int, int]
ChunkIndex = tuple[int, ...]
# In place of a file number: a chunk of zeros without stored bytes, and a chunk kept in the index of a checkpoint.
ABSENT = -1
INLINE = -2


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

    def overlapping(self, box: Box) -> Iterator[tuple[int, ...]]:
        """Yield the index of each chunk that overlaps a box, in C order."""
        # E.g. rows 3 to 9 in chunks of 4 touch the chunks 0 to 3: 3 // 4 is 0, 9 / 4 rounded up is 3.
        ranges: list[range] = []
        for (low, high), length in zip(box, self.chunk_shape):
            ranges.append(range(low // length, -(-high // length)))
        return itertools.product(*ranges)


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
    factors: Sequence[SizedAxis],
    chunk_length: int,
    *,
    atom_ranges: Mapping[str, Range],
    start: int = 0,
) -> Iterator[DimPiece]:
    """Split the part `atom_ranges` of a leaf dim at its chunk boundaries, into as few regular pieces as possible.

    Args:
        factors: The axes of the dim, or of a part of it, outermost first.
        chunk_length: Length of a chunk along the dim.
        atom_ranges: Index range of each axis. Axes of other dims are ignored.
        start: First index of the part in the dim, e.g. 6 for the second part of `(a=2 b=3 | c=4)`.
    """
    first_chunk, first_element = divmod(start, chunk_length)
    if not factors:
        yield DimPiece((), first_chunk, first_element, ())
        return
    extents = [factor.extent for factor in factors]
    ranges = [atom_ranges[factor.atom] for factor in factors]
    if any(low >= high for low, high in ranges):
        return
    split_atom = None
    extent = math.prod(extents)
    if not first_element:
        split_atom = find_split_atom(extents, chunk_length)
    elif first_element + extent <= chunk_length:
        # The part lies in one chunk. It is a dim of its own, with one chunk.
        chunk_length = extent
        split_atom = find_split_atom(extents, extent)
    # Otherwise chunk boundaries cut the part at other indices than those of a dim of its own.
    if split_atom is None:
        yield from _pieces_by_chunk(factors, chunk_length, ranges, start)
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
    low, high = ranges[split_atom]
    # Between the first and the last multiple are whole chunks, which one loop describes. E.g. 1 to 7 in steps
    # of 2: 1 to 2, 2 to 6, 6 to 7.
    first_multiple = min(high, -(-low // steps_per_chunk) * steps_per_chunk)
    last_multiple = max(low, high // steps_per_chunk * steps_per_chunk)
    for split_range in itertools.pairwise(sorted({low, first_multiple, last_multiple, high})):
        yield _aligned_piece(
            factors,
            [*ranges[:split_atom], split_range, *ranges[split_atom + 1 :]],
            first=(first_chunk, first_element),
            split_atom=split_atom,
            steps_per_chunk=steps_per_chunk,
            chunk_steps=chunk_steps,
            element_steps=element_steps,
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


def _aligned_piece(
    factors: Sequence[SizedAxis],
    ranges: Sequence[Range],
    *,
    first: tuple[int, int],
    split_atom: int,
    steps_per_chunk: int,
    chunk_steps: Sequence[int],
    element_steps: Sequence[int],
) -> DimPiece:
    """Return where the box `ranges` is in the chunks.

    The first element of the axes is in the chunk `first[0]`, at the offset `first[1]`. Chunks split only the axis
    `factors[split_atom]`, every `steps_per_chunk` steps.
    """
    steps: list[AxisStep] = []
    atom_starts: list[tuple[str, int]] = []
    chunk_index, element_offset = first
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


class StoredRange(NamedTuple):
    """A byte range of file number `file`."""

    file: int
    offset: int
    nbytes: int


# The place of a stored value, or the value itself if the index of a checkpoint has it
StoredValue = StoredRange | bytes


@dataclass(frozen=True, slots=True)
class StridedChunks:
    """Chunks at regular offsets of one file.

    Attributes:
        file: Number of the file.
        offset: Offset of the first chunk.
        first: Index of the first chunk in the grid of the array.
        strides: Bytes from one chunk to the next, along each dim of the grid.
    """

    file: int
    offset: int
    first: ChunkIndex
    strides: tuple[int, ...]
    is_direct: ClassVar[bool] = True

    def find(self, index: Sequence[int]) -> FilePosition:
        """Return the file number and offset of the chunk with this index in the grid."""
        # E.g. offset 0, first index [0, 0] and strides (8, 8): chunk [2, 0] is at 2 * 8 + 0 * 8 = 16.
        # C-level maps: this runs once per chunk, and a 13B model has 10^5 chunks.
        displacement = sum(map(mul, map(sub, index, self.first), self.strides))
        return self.file, self.offset + displacement

    def positions(self) -> Iterable[FilePosition]:
        """Return positions: at least one in each file, and the first one of each file."""
        return [(self.file, self.offset)]

    def moved(self, first_file: int) -> StridedChunks:
        """Return the same chunks after `first_file` files were put before their files."""
        return replace(self, file=self.file + first_file)

    def within(self, first: ChunkIndex, stop: ChunkIndex) -> StridedChunks:
        """Return the chunks in a box of the grid."""
        file, offset = self.find(first)
        return replace(self, file=file, offset=offset, first=first)


@dataclass(frozen=True, slots=True)
class ChunkTable:
    """Chunks of a box of the grid with a place each. A chunk takes 12 or 20 bytes of memory.

    Attributes:
        first: Index of the first chunk in the grid of the array.
        counts: Number of chunks in the table along each dim.
        files: File number of each chunk, in C order, or ABSENT or INLINE.
        offsets: Offset of each chunk, in C order.
        nbytes: Stored size of each chunk, in C order. Empty for chunks of equal size.
        inline: Bytes of the chunks in the index of a checkpoint.
    """

    first: ChunkIndex
    counts: tuple[int, ...]
    files: Sequence[int]
    offsets: Sequence[int]
    nbytes: Sequence[int] = ()
    inline: Mapping[ChunkIndex, bytes] = field(default_factory=dict)

    @classmethod
    def from_stored(
        cls, counts: tuple[int, ...], values: Mapping[ChunkIndex, StoredValue]
    ) -> ChunkTable:
        """Return the table of all chunks of a grid. Chunks without a value are zeros."""
        files = array("i")
        offsets = array("q")
        nbytes = array("q")
        inline: dict[ChunkIndex, bytes] = {}
        for index in itertools.product(*map(range, counts)):
            value = values.get(index)
            place = StoredRange(ABSENT, 0, 0)
            if isinstance(value, StoredRange):
                place = value
            elif value is not None:
                inline[index] = value
                place = StoredRange(INLINE, 0, len(value))
            files.append(place.file)
            offsets.append(place.offset)
            nbytes.append(place.nbytes)
        return cls((0,) * len(counts), counts, files, offsets, nbytes, inline)

    @classmethod
    def from_positions(
        cls, first: ChunkIndex, stop: ChunkIndex, positions: Mapping[ChunkIndex, FilePosition]
    ) -> ChunkTable:
        """Return the table of all chunks in a box of the grid."""
        files = array("i")
        offsets = array("q")
        for index in itertools.product(*map(range, first, stop)):
            file, offset = positions[index]
            files.append(file)
            offsets.append(offset)
        return cls(first, tuple(map(sub, stop, first)), files, offsets)

    @property
    def is_direct(self) -> bool:
        """Whether every chunk is a byte range of a file."""
        return min(self.files, default=0) >= 0

    def find(self, index: Sequence[int]) -> FilePosition:
        """Return the file number and offset of the chunk with this index in the grid."""
        number = self._number(index)
        return self.files[number], self.offsets[number]

    def stored(self, index: ChunkIndex) -> StoredValue | None:
        """Return the place or the bytes of a chunk of a table with sizes. None for a chunk of zeros."""
        number = self._number(index)
        file = self.files[number]
        if file == INLINE:
            return self.inline[index]
        if file == ABSENT:
            return None
        return StoredRange(file, self.offsets[number], self.nbytes[number])

    def _number(self, index: Sequence[int]) -> int:
        return sum(map(mul, map(sub, index, self.first), strides(self.counts)))

    def indices(self) -> Iterable[ChunkIndex]:
        """Return the index of every chunk, in C order."""
        stop = map(add, self.first, self.counts)
        return itertools.product(*map(range, self.first, stop))

    def positions(self) -> Iterable[FilePosition]:
        """Return the position of every chunk in a file, in C order."""
        return [place for place in zip(self.files, self.offsets) if place[0] >= 0]

    def moved(self, first_file: int) -> ChunkTable:
        """Return the same chunks after `first_file` files were put before their files."""
        files = [file + first_file if file >= 0 else file for file in self.files]
        return replace(self, files=array("i", files))

    def within(self, first: ChunkIndex, stop: ChunkIndex) -> StridedChunks | ChunkTable:
        """Return the chunks in a box of the grid, without a table if their offsets are regular and ascending."""
        counts = tuple(map(sub, stop, first))
        table = self
        if counts != self.counts:
            table = ChunkTable(first, counts, *self._gather(first, stop))
        return table._as_strided() or table

    def walk(
        self, index: Sequence[int], loops: Sequence[tuple[int, int, int, int]]
    ) -> Iterator[tuple[int, int, int]]:
        """Yield the file, offset and tensor displacement of each chunk of nested loops over the table.

        Args:
            index: Index of the first chunk.
            loops: (count, tensor stride, dim of the grid, step along the dim) of each loop, outermost first.
        """
        steps = strides(self.counts)
        start = sum(map(mul, map(sub, index, self.first), steps))
        numbers = loop_sums([(count, steps[dim] * step) for count, _, dim, step in loops], start)
        displacements = loop_sums([(count, stride) for count, stride, _, _ in loops], 0)
        for number, displacement in zip(numbers, displacements):
            yield self.files[number], self.offsets[number], displacement

    def _gather(self, first: ChunkIndex, stop: ChunkIndex) -> tuple[array[int], array[int]]:
        """Return the files and offsets of a box of chunks."""
        steps = strides(self.counts)
        start = sum(map(mul, map(sub, first, self.first), steps))
        numbers = loop_sums([*zip(map(sub, stop, first), steps)], start)
        files = array("i", [self.files[number] for number in numbers])
        return files, array("q", [self.offsets[number] for number in numbers])

    def _as_strided(self) -> StridedChunks | None:
        # A strided form is a few numbers in the plan, a table has an entry per chunk. A 7B model in chunks of 4 MiB
        # has 3,000 of them.
        if not self.offsets:
            return None
        file = self.files[0]
        offset = self.offsets[0]
        step = 0
        if len(self.offsets) > 1:
            step = self.offsets[1] - offset
        # Readers expect ascending offsets. TensorStore may write the chunks of an array in descending order.
        if file < 0 or step < 0 or any(other != file for other in self.files):
            return None
        if any(place != offset + i * step for i, place in enumerate(self.offsets)):
            return None
        return StridedChunks(file, offset, self.first, strides(self.counts, step))


class ArrayPart(NamedTuple):
    """A box of an array and its place in a file.

    Attributes:
        box: The box.
        file: Number of the file.
        offset: Offset of the first element.
        strides: Bytes between neighbouring elements along each dim.
    """

    box: Box
    file: int
    offset: int
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ArrayParts:
    """Boxes of an array, each with a place and strides of its own. They cover the array."""

    parts: tuple[ArrayPart, ...]
    is_direct: ClassVar[bool] = True

    def positions(self) -> Iterable[FilePosition]:
        """Return the position of every part."""
        return [(part.file, part.offset) for part in self.parts]

    def moved(self, first_file: int) -> ArrayParts:
        """Return the same parts after `first_file` files were put before their files."""
        return ArrayParts(tuple(part._replace(file=part.file + first_file) for part in self.parts))

    def within(self, first: ChunkIndex, stop: ChunkIndex) -> ArrayParts:
        """Return all parts: an array in parts is one chunk."""
        return self


Chunks = StridedChunks | ChunkTable | ArrayParts


def loop_sums(loops: Sequence[tuple[int, int]], start: int) -> list[int]:
    """Return `start` plus the displacement of each iteration of nested loops (count, step), outermost loop first."""
    sums = [start]
    for count, step in loops:
        if count != 1:
            steps = range(0, count * step, step) if step else [0] * count
            sums = list(map(sum, itertools.product(sums, steps)))
    return sums


def run_parts(
    shape: Sequence[int], item_nbytes: int, runs: Iterable[tuple[int, int]], file: int
) -> ArrayParts:
    """Return the parts of an array in C order in several runs (offset, nbytes) of a file, e.g. with headers between.

    A run of an array with n dims is at most 2 n - 1 boxes. Each of them is contiguous in the file.
    """
    steps = strides(shape, item_nbytes)
    parts: list[ArrayPart] = []
    start = 0
    for offset, nbytes in runs:
        stop = start + nbytes // item_nbytes
        for box in split_merged_range((start, stop), shape):
            element = sum((low * step) // item_nbytes for (low, _), step in zip(box, steps))
            parts.append(ArrayPart(box, file, offset + (element - start) * item_nbytes, steps))
        start = stop
    if start != math.prod(shape):
        raise ValueError(f"the runs have {start} of {math.prod(shape)} elements")
    return ArrayParts(tuple(parts))
