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

from prepcli.planning.boxes import Box, Range, strides, volume, whole
from prepcli.planning.gaps import Gapped
from prepcli.planning.grids import Grid, Lattice
from prepcli.planning.moves import Copy, Region, copies, merge
from prepcli.planning.tensors import itemsize


@dataclass(frozen=True, slots=True)
class Flat:
    """A side on which the whole tensor lies in C order, from `offset` of a file."""

    file: int
    offset: int


@dataclass(frozen=True, slots=True)
class Strided:
    """A side on which the whole tensor lies with `steps` bytes, above 0, from element to element along each dim: a view
    of a PyTorch storage."""

    file: int
    offset: int
    steps: tuple[int, ...]


Side = tuple[Flat | Strided | Region | Gapped, ...]


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
    left: Side
    right: Side
    fill: Fill | None = None
    cast: str = ""

    @property
    def written_dtype(self) -> str:
        """The dtype on the right."""
        return self.cast or self.dtype

    @property
    def written_nbytes(self) -> int:
        """Bytes on the right."""
        return self.nbytes // itemsize(self.dtype) * itemsize(self.cast) if self.cast else self.nbytes

    @property
    def row_nbytes(self) -> int:
        return math.prod(self.shape[1:]) * itemsize(self.dtype)

    @property
    def span(self) -> Range:
        """Bytes of the tensor that are streamed."""
        return self.rows[0] * self.row_nbytes, self.rows[1] * self.row_nbytes

    @property
    def nbytes(self) -> int:
        return self.span[1] - self.span[0]

    @property
    def box(self) -> Box:
        """The elements that are streamed."""
        return (self.rows, *whole(self.shape[1:])) if self.shape else ()


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file that is read, and what tells whether it is still the same; `path` is relative to the source."""

    path: str
    size: int
    mtime_ns: int
    digest: str  # XXH3-128 of its header, or of the index that points into it


@dataclass(frozen=True, slots=True)
class OutFile:
    """A file that is written: `head` is its first bytes (a header), `fixed` are others (offset, bytes) that do not hang
    on tensors, the streams write the rest."""

    path: str
    size: int
    head: bytes = field(default=b"", repr=False)
    fixed: tuple[tuple[int, bytes], ...] = ()


@dataclass(frozen=True, slots=True)
class SmallFile:
    """A file of settings: its content, or where it is copied from (a tokenizer)."""

    path: str
    content: bytes = b""
    copied_from: str = field(default="", repr=False)  # where it lies is no part of what the plan makes
    stamp: tuple[int, int] = (0, 0)  # size and time of what is copied: another tokenizer is another plan


@dataclass(frozen=True, slots=True)
class Placed:
    """A box of a leaf's chunks that lies regularly: chunk indices from `first` up to, not including, `stop`."""

    first: tuple[int, ...]
    stop: tuple[int, ...]
    places: Lattice

    def indices(self) -> Iterator[tuple[int, ...]]:
        """The index of every chunk."""
        return itertools.product(*(range(low, high) for low, high in zip(self.first, self.stop)))


@dataclass(frozen=True, slots=True)
class Leaf:
    """A leaf that is written: its path in the tree, its chunks and where they lie."""

    path: tuple[str, ...]
    dtype: str
    grid: Grid
    placed: tuple[Placed, ...]

    @property
    def name(self) -> str:
        return ".".join(self.path)

    @property
    def chunk_nbytes(self) -> int:
        return math.prod(self.grid.chunk) * itemsize(self.dtype)

    @property
    def nbytes(self) -> int:
        return math.prod(self.grid.shape) * itemsize(self.dtype)


@dataclass(frozen=True, slots=True)
class Dropped:
    """A tensor of the source, or some rows of one, that is not carried over, and by which rule."""

    name: str
    nbytes: int
    rule: str
    rows: Range | None = None


@dataclass(frozen=True, slots=True)
class Same:
    """Two tensors that must be equal bit for bit (tied weights), else the conversion stops."""

    name: str
    other: str


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that a conversion does; `settings` is what the manifest says of the model.

    `names`: how a tensor is called outside of prep, where that differs from its name in rows. `item`: the folder in the
    output that its files are in, but for the manifest.
    """

    command: str
    request: str  # the command line that asks for this, defaults left out
    source_name: str
    sources: tuple[SourceFile, ...]
    streams: tuple[Stream, ...]
    files: tuple[OutFile, ...]
    small_files: tuple[SmallFile, ...] = ()
    leaves: tuple[Leaf, ...] = ()
    dropped: tuple[Dropped, ...] = ()
    checks: tuple[Same, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    item: str = ""
    zstd_level: int | None = None  # of chunks that are compressed in the end

    @property
    def read_nbytes(self) -> int:
        return sum(s.nbytes for s in self.streams if s.left)

    @property
    def write_nbytes(self) -> int:
        return sum(s.written_nbytes for s in self.streams if s.right)

    @property
    def chunks(self) -> int:
        return sum(math.prod(leaf.grid.counts) for leaf in self.leaves)


def left_copies(stream: Stream, box: Box) -> Iterator[Copy]:
    """The copies that tie a box of a stream's tensor, contiguous in C order, to where it is read."""
    return side_copies(stream.left, stream.shape, itemsize(stream.dtype), box)


def right_copies(stream: Stream, box: Box) -> Iterator[Copy]:
    """The copies that tie a box of a stream's tensor, contiguous in C order, to where it is written."""
    return side_copies(stream.right, stream.shape, itemsize(stream.written_dtype), box)


def side_copies(side: Side, shape: Sequence[int], item: int, box: Box) -> Iterator[Copy]:
    """The copies that tie a box of a tensor, contiguous in C order, to a side; `item`: bytes an element."""
    for part in side:
        if isinstance(part, Flat):
            low = sum(first * step for (first, _), step in zip(box, strides(shape, item)))
            yield Copy(low, part.file, part.offset + low, volume(box) * item)
        elif isinstance(part, Strided):
            yield _strided(part, shape, item, box)
        elif isinstance(part, Gapped):
            yield from part.copies(box)
        else:
            yield from copies(part, box)


def _strided(part: Strided, shape: Sequence[int], item: int, box: Box) -> Copy:
    steps = strides(shape, item)
    low = sum(first * step for (first, _), step in zip(box, steps))
    offset = part.offset + sum(first * step for (first, _), step in zip(box, part.steps))
    counts = (stop - first for first, stop in box)
    return merge(Copy(low, part.file, offset, item, tuple(zip(counts, steps, part.steps))))
