"""A Plan: what a conversion will do, as pure data. Two equal plans write the same bytes.

A conversion streams tensors. Each is moved in its own (C) order, whatever lies left and right of it: a file that has
it as it is (`Flat`), or leaves that have its elements in chunks (`Region`). So one digest fits every layout; saving,
exporting and laying out anew are one thing. Padding is rows of a tensor with a stream of their own. Pure.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from prepcli.planning.boxes import Box, Range, full_box, strides, volume
from prepcli.planning.gapped_regions import GappedRegion
from prepcli.planning.grids import ChunkGrid, StridedPlacement
from prepcli.planning.strided_copies import Region, StridedCopy, merge_dims, region_copies
from prepcli.planning.tensors import itemsize


@dataclass(frozen=True, slots=True)
class Contiguous:
    """A side on which the whole tensor lies in C order, from `offset` of a file."""

    file: int
    offset: int


@dataclass(frozen=True, slots=True)
class Strided:
    """A side on which the whole tensor lies with `steps` bytes, above 0, from element to element along each dim: a view
    of a PyTorch storage."""

    file: int
    offset: int
    strides: tuple[int, ...]


Locations = tuple[Contiguous | Strided | Region | GappedRegion, ...]


@dataclass(frozen=True, slots=True)
class Fill:
    """Rows made rather than read: zeros, the mean of the true rows of the stream before it, or normal values."""

    kind: str  # zeros | mean | normal
    seed: int = 0
    std: float = 0.0


@dataclass(frozen=True, slots=True)
class Stream:
    """Rows `rows` of a tensor of `shape` (0-d: one row), moved in order; the unit of digests.

    left: where they are read (nothing: they are filled); right: where they are written (nothing: digested only), and
    there `cast` is their dtype where it is not that of the left. Bytes are counted as on the left.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    rows: Range
    reads: Locations
    writes: Locations
    fill: Fill | None = None
    cast_to: str = ""

    @property
    def written_dtype(self) -> str:
        """The dtype on the right."""
        return self.cast_to or self.dtype

    @property
    def written_nbytes(self) -> int:
        """Bytes on the right."""
        return self.nbytes // itemsize(self.dtype) * itemsize(self.cast_to) if self.cast_to else self.nbytes

    @property
    def row_nbytes(self) -> int:
        return math.prod(self.shape[1:]) * itemsize(self.dtype)

    @property
    def byte_range(self) -> Range:
        """Bytes of the tensor that are streamed."""
        return self.rows[0] * self.row_nbytes, self.rows[1] * self.row_nbytes

    @property
    def nbytes(self) -> int:
        return self.byte_range[1] - self.byte_range[0]

    @property
    def box(self) -> Box:
        """The elements that are streamed."""
        return (self.rows, *full_box(self.shape[1:])) if self.shape else ()


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file that is read, and what tells whether it is still the same; `path` is relative to the source."""

    path: str
    size: int
    mtime_ns: int
    digest: str  # XXH3-128 of its header, or of the index that points into it


@dataclass(frozen=True, slots=True)
class OutputFile:
    """A file that is written: `head` is its first bytes (a header), `fixed` are others (offset, bytes) that do not hang
    on tensors, the streams write the rest."""

    path: str
    size: int
    header: bytes = field(default=b"", repr=False)
    constant_ranges: tuple[tuple[int, bytes], ...] = ()


@dataclass(frozen=True, slots=True)
class SmallFile:
    """A file of settings: its content, or where it is copied from (a tokenizer)."""

    path: str
    content: bytes = b""
    copied_from: str = field(default="", repr=False)  # where it lies is no part of what the plan makes
    stamp: tuple[int, int] = (0, 0)  # size and time of what is copied: another tokenizer is another plan


@dataclass(frozen=True, slots=True)
class PlacedChunks:
    """A box of a leaf's chunks that lies regularly: chunk indices from `first` up to, not including, `stop`."""

    first: tuple[int, ...]
    stop: tuple[int, ...]
    placement: StridedPlacement

    def indices(self) -> Iterator[tuple[int, ...]]:
        """The index of every chunk."""
        return itertools.product(*(range(low, high) for low, high in zip(self.first, self.stop)))


@dataclass(frozen=True, slots=True)
class OutputLeaf:
    """A leaf that is written: its path in the tree, its chunks and where they lie."""

    path: tuple[str, ...]
    dtype: str
    grid: ChunkGrid
    placed_chunks: tuple[PlacedChunks, ...]

    @property
    def name(self) -> str:
        return ".".join(self.path)

    @property
    def chunk_nbytes(self) -> int:
        return math.prod(self.grid.chunk_shape) * itemsize(self.dtype)

    @property
    def nbytes(self) -> int:
        return math.prod(self.grid.shape) * itemsize(self.dtype)


@dataclass(frozen=True, slots=True)
class DroppedTensor:
    """A tensor of the source, or some rows of one, that is not carried over, and by which rule."""

    name: str
    nbytes: int
    rule: str
    rows: Range | None = None


@dataclass(frozen=True, slots=True)
class EqualityCheck:
    """Two tensors that must be equal bit for bit (tied weights), else the conversion stops."""

    name: str
    duplicate_of: str


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that a conversion does; `settings` is what the manifest says of the model.

    `names`: how a tensor is called outside of prep, where that differs from its name in rows. `item`: the folder in the
    output that its files are in, but for the manifest.
    """

    command: str
    request: str  # the command line that asks for this, defaults left out
    source_name: str
    source_files: tuple[SourceFile, ...]
    streams: tuple[Stream, ...]
    files: tuple[OutputFile, ...]
    small_files: tuple[SmallFile, ...] = ()
    leaves: tuple[OutputLeaf, ...] = ()
    dropped: tuple[DroppedTensor, ...] = ()
    checks: tuple[EqualityCheck, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    display_names: Mapping[str, str] = field(default_factory=dict)
    item: str = ""
    zstd_level: int | None = None  # of chunks that are compressed in the end

    @property
    def read_nbytes(self) -> int:
        return sum(s.nbytes for s in self.streams if s.reads)

    @property
    def write_nbytes(self) -> int:
        return sum(s.written_nbytes for s in self.streams if s.writes)

    @property
    def chunk_count(self) -> int:
        return sum(math.prod(leaf.grid.chunk_counts) for leaf in self.leaves)


def read_copies(stream: Stream, box: Box) -> Iterator[StridedCopy]:
    """The copies that tie a box of a stream's tensor, contiguous in C order, to where it is read."""
    return location_copies(stream.reads, stream.shape, itemsize(stream.dtype), box)


def write_copies(stream: Stream, box: Box) -> Iterator[StridedCopy]:
    """The copies that tie a box of a stream's tensor, contiguous in C order, to where it is written."""
    return location_copies(stream.writes, stream.shape, itemsize(stream.written_dtype), box)


def location_copies(locations: Locations, shape: Sequence[int], item_nbytes: int, box: Box) -> Iterator[StridedCopy]:
    """The copies that tie a box of a tensor, contiguous in C order, to a side; `item`: bytes an element."""
    for part in locations:
        if isinstance(part, Contiguous):
            low = sum(first * step for (first, _), step in zip(box, strides(shape, item_nbytes)))
            yield StridedCopy(low, part.file, part.offset + low, volume(box) * item_nbytes)
        elif isinstance(part, Strided):
            yield _strided_copy(part, shape, item_nbytes, box)
        elif isinstance(part, GappedRegion):
            yield from part.copies(box)
        else:
            yield from region_copies(part, box)


def _strided_copy(location: Strided, shape: Sequence[int], item_nbytes: int, box: Box) -> StridedCopy:
    steps = strides(shape, item_nbytes)
    low = sum(first * step for (first, _), step in zip(box, steps))
    offset = location.offset + sum(first * step for (first, _), step in zip(box, location.strides))
    counts = (stop - first for first, stop in box)
    return merge_dims(StridedCopy(low, location.file, offset, item_nbytes, tuple(zip(counts, steps, location.strides))))
