"""Cut streams into slabs that fit a buffer, so that both sides see long runs of whole chunks and whole pages. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from prepcli.planning.boxes import Box, full_box, strides
from prepcli.planning.grids import find_split_atom
from prepcli.planning.plan import Stream, read_copies, write_copies
from prepcli.planning.strided_copies import Region, StridedCopy
from prepcli.planning.tensors import itemsize

PAGE = 4096  # bytes: what direct I/O moves at a time
LONG_RUN_NBYTES = 64 << 10  # bytes that a disk moves about as fast together as any more


@dataclass(frozen=True, slots=True)
class Slab:
    """A run of a tensor's bytes: the unit of work. `Copy.at` counts from the tensor's first byte, as `start` does.

    Where values are cast, `items` are the bytes of one as it is read and as it is written; `right` counts those.
    """

    stream_number: int
    start: int
    nbytes: int
    reads: tuple[StridedCopy, ...]
    writes: tuple[StridedCopy, ...]
    itemsizes: tuple[int, int] = (1, 1)

    @property
    def is_cast(self) -> bool:
        """Whether values come out in another dtype."""
        return self.itemsizes != (1, 1)

    @property
    def written_start(self) -> int:
        """`start` in bytes as they are written."""
        return self.start // self.itemsizes[0] * self.itemsizes[1]

    @property
    def written_nbytes(self) -> int:
        """Bytes that are written."""
        return self.nbytes // self.itemsizes[0] * self.itemsizes[1]

    @property
    def is_contiguous(self) -> bool:
        """Either side is one run of all its bytes, or nothing: they need no other order."""
        return all(not side or [copy.width for copy in side] == [self.nbytes] for side in (self.reads, self.writes))


def split_stream(stream_number: int, stream: Stream, max_nbytes: int) -> Iterator[Slab]:
    """Slabs of stream `number`, each of at most `limit` bytes, in the order of the tensor's bytes."""
    if not stream.nbytes:
        return
    left, right = (tuple(itertools.islice(copies, 2)) for copies in _stream_copies(stream, stream.box))
    if not stream.cast_to and Slab(stream_number, stream.byte_range[0], stream.nbytes, left, right).is_contiguous:
        yield from _contiguous_slabs(stream_number, stream, left, right, max_nbytes)
    else:
        read, written = _itemsizes(stream)
        yield from _row_slabs(stream_number, stream, max_nbytes * read // max(read, written))


def _stream_copies(stream: Stream, box: Box) -> tuple[Iterator[StridedCopy], Iterator[StridedCopy]]:
    return read_copies(stream, box), write_copies(stream, box)


def _itemsizes(stream: Stream) -> tuple[int, int]:
    return (itemsize(stream.dtype), itemsize(stream.cast_to)) if stream.cast_to else (1, 1)


def _contiguous_slabs(
    stream_number: int, stream: Stream, reads: tuple[StridedCopy, ...], writes: tuple[StridedCopy, ...], max_nbytes: int
) -> Iterator[Slab]:
    """Cut anywhere; each cut where a page of the file that is written begins."""
    low, stop = stream.byte_range
    shift = next((c.file_offset - c.tensor_offset for c in (*writes, *reads)), 0)
    while low < stop:
        page = (low + shift + max_nbytes) // PAGE * PAGE - shift
        high = min(stop, page if page > low else low + max_nbytes)
        yield Slab(stream_number, low, high - low, _clip_copies(reads, low, high), _clip_copies(writes, low, high))
        low = high


def _clip_copies(copies: tuple[StridedCopy, ...], start: int, stop: int) -> tuple[StridedCopy, ...]:
    return tuple(StridedCopy(start, c.file, c.file_offset + start - c.tensor_offset, stop - start) for c in copies)


def _row_slabs(stream_number: int, stream: Stream, max_nbytes: int) -> Iterator[Slab]:
    """Cut along one axis, at the edges of bands of whole chunks where those fit the limit."""
    axis = _split_axis(stream, max_nbytes)
    bands, pages = (tuple(_chunk_bands(stream, axis)), _page_rows(stream, axis)) if stream.shape else ((), 1)
    yield from _slabs_along_axis(stream_number, stream, max_nbytes, axis, bands, pages)


def split_stream_evenly(stream_number: int, stream: Stream, max_nbytes: int) -> Iterator[Slab]:
    """Slabs that depend on the tensor's shape alone, not on what lies left and right of it."""
    return (
        _slabs_along_axis(stream_number, stream, max_nbytes, _split_axis(stream, max_nbytes), (), 1)
        if stream.nbytes
        else iter(())
    )


def _slabs_along_axis(
    stream_number: int, stream: Stream, max_nbytes: int, axis: int, bands: tuple[_ChunkBand, ...], page_rows: int
) -> Iterator[Slab]:
    steps = strides(stream.shape, itemsize(stream.dtype)) or (stream.nbytes,)
    inner, extent = steps[axis], stream.shape[axis] if axis else stream.rows[1]
    edges = _SlabEdges(bands, max(1, max_nbytes // inner), page_rows)
    for outer in itertools.product(*(range(*span) for span in stream.box[:axis])):
        low = 0 if axis else stream.rows[0]
        while low < extent:
            high = min(extent, edges.end_after(low))
            box = (*((i, i + 1) for i in outer), (low, high), *full_box(stream.shape[axis + 1 :]))
            box = box if stream.shape else ()
            left, right = map(tuple, _stream_copies(stream, box))
            start = sum(span[0] * step for span, step in zip(box, steps))
            yield Slab(stream_number, start, (high - low) * inner, left, right, _itemsizes(stream))
            low = high


def _split_axis(stream: Stream, max_nbytes: int) -> int:
    """The outermost axis of which one step fits the limit."""
    sizes = strides(stream.shape, itemsize(stream.dtype))
    return next((axis for axis, nbytes in enumerate(sizes) if nbytes <= max_nbytes), max(0, len(sizes) - 1))


@dataclass(frozen=True, slots=True)
class _ChunkBand:
    """Of the rows from `first` to `stop`, which a region has, each `rows` fill whole chunks."""

    first: int
    stop: int
    rows: int


@dataclass(frozen=True, slots=True)
class _SlabEdges:
    """Where slabs may end: after whole bands of chunks, else after rows that fill whole pages of a chunk."""

    bands: tuple[_ChunkBand, ...]  # those written first: they matter more
    max_rows: int  # rows that fit a slab
    page_rows: int  # rows that fill whole pages in every chunk

    def end_after(self, start: int) -> int:
        """The row at which a slab that begins at `low` ends; bands that do not fit with those before them are cut."""
        high = start + self.max_rows
        crossed = [band for band in self.bands if band.first < high < band.stop]
        if not crossed:
            return high
        found, unit = start, 1
        for band in crossed:
            together = math.lcm(unit, band.rows)
            edge = band.first + (high - band.first) // together * together
            if edge > start and band.first == crossed[0].first:
                found, unit = edge, together
        return found if found > start else start + (self.max_rows // self.page_rows * self.page_rows or self.max_rows)


def _chunk_bands(stream: Stream, axis: int) -> Iterator[_ChunkBand]:
    """The bands of whole chunks along an axis, of the regions written and then of those read."""
    for part in (*stream.writes, *stream.reads):
        if isinstance(part, Region) and (rows := _band_rows(part, axis)) > 1:
            dim = part.axis_map.source_dims[axis]
            yield _ChunkBand(dim.start, dim.start + dim.selected_extent, rows)


def _band_rows(region: Region, axis: int) -> int:
    """Rows along an axis of the tensor that fill whole chunks."""
    taken = _atom_lengths_in_chunk(region)
    rows = 1
    found = 1
    for factor in reversed(region.axis_map.source_dims[axis].factors):
        if taken.get(factor.atom, 1) > 1:
            found = rows * taken[factor.atom]
        rows *= factor.extent
    return found


def _atom_lengths_in_chunk(region: Region) -> dict[str, int]:
    """How much of each atom one chunk holds; an atom that chunk edges cut unevenly counts as cut to single steps."""
    found: dict[str, int] = {}
    for dim, length in zip(region.axis_map.leaf_dims, region.grid.chunk_shape):
        extents = [f.extent for f in dim]
        at = find_split_atom(extents, length)
        for i, factor in enumerate(dim):
            if at is not None and i >= at:
                found[factor.atom] = factor.extent if i > at else length // math.prod(extents[at + 1 :])
    return found


def _page_rows(stream: Stream, axis: int) -> int:
    """Rows along an axis whose bytes in one chunk are whole pages."""
    rows = 1
    for part in (*stream.writes, *stream.reads):
        if isinstance(part, Region):
            taken = _atom_lengths_in_chunk(part)
            inner = [f.atom for dim in part.axis_map.source_dims[axis + 1 :] for f in dim.factors if f.fixed is None]
            nbytes = math.prod(taken.get(atom, 1) for atom in inner) * part.itemsize
            rows = math.lcm(rows, PAGE // math.gcd(PAGE, nbytes))
    return rows


def split_streams(streams: Sequence[Stream], max_nbytes: int, first: int = 0) -> Iterator[Slab]:
    """The slabs of the streams from number `first` on, in order."""
    for number in range(first, len(streams)):
        yield from split_stream(number, streams[number], max_nbytes)


def min_buffer_nbytes(streams: Sequence[Stream]) -> int:
    """Bytes of the largest slab that some stream needs for long runs on both of its sides.

    Where what is adjacent on one side lies apart on the other, a run there is only as long as a slab is wide here.
    """
    return max((_stream_min_buffer_nbytes(stream) for stream in streams if stream.nbytes), default=0)


def _stream_min_buffer_nbytes(stream: Stream) -> int:
    items = _itemsizes(stream)
    sides = zip(_stream_copies(stream, stream.box), items)
    found = (_spread_nbytes(copy) // item for side, item in sides for copy in itertools.islice(side, 4))
    return max(found, default=0) * max(items)


def _spread_nbytes(copy: StridedCopy) -> int:
    """Bytes of the tensor over which a long run of the other side is spread; 0 where they lie together, or nowhere."""
    if not copy.dims:
        return 0
    count, here, there = copy.dims[-1]
    return min(count, -(-LONG_RUN_NBYTES // copy.width)) * here if there == copy.width else 0
