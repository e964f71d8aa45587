"""Where the chunks of an array are stored: at regular offsets of a file, in a table, or as boxes with own strides."""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import add, mul, sub
from typing import ClassVar, NamedTuple

from prepcli.algebra.boxes import Box, split_merged_range, strides

# File number and offset.
FilePosition = tuple[int, int]
ChunkIndex = tuple[int, ...]


# In place of a file number: a chunk of zeros without stored bytes, and a chunk kept in the index of a checkpoint.
ABSENT = -1
INLINE = -2


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

    @classmethod
    def single(cls, file: int, offset: int, num_dims: int) -> StridedChunks:
        """Return an array's only chunk."""
        zeros = (0,) * num_dims
        return cls(file, offset, zeros, zeros)

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
    def from_places(
        cls, first: ChunkIndex, stop: ChunkIndex, places: Mapping[ChunkIndex, FilePosition]
    ) -> ChunkTable:
        """Return the table of all chunks in a box of the grid."""
        files = array("i")
        offsets = array("q")
        for index in itertools.product(*map(range, first, stop)):
            file, offset = places[index]
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
        numbers = _sums([(count, steps[dim] * step) for count, _, dim, step in loops], start)
        displacements = _sums([(count, stride) for count, stride, _, _ in loops], 0)
        for number, displacement in zip(numbers, displacements):
            yield self.files[number], self.offsets[number], displacement

    def _gather(self, first: ChunkIndex, stop: ChunkIndex) -> tuple[array[int], array[int]]:
        """Return the files and offsets of a box of chunks."""
        steps = strides(self.counts)
        start = sum(map(mul, map(sub, first, self.first), steps))
        numbers = _sums([*zip(map(sub, stop, first), steps)], start)
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


def _sums(loops: Sequence[tuple[int, int]], start: int) -> list[int]:
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
