"""Cut streams into slabs that fit a buffer, so that both sides see long runs of whole chunks and whole pages. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from prepcli.planning.boxes import Box, strides, whole
from prepcli.planning.grids import cut_atom
from prepcli.planning.moves import Copy, Region
from prepcli.planning.plan import Stream, left_copies, right_copies
from prepcli.planning.tensors import itemsize

PAGE = 4096  # bytes: what direct I/O moves at a time
LONG_RUN = 64 << 10  # bytes that a disk moves about as fast together as any more


@dataclass(frozen=True, slots=True)
class Slab:
    """A run of a tensor's bytes: the unit of work. `Copy.at` counts from the tensor's first byte, as `start` does.

    Where values are cast, `items` are the bytes of one as it is read and as it is written; `right` counts those.
    """

    stream: int
    start: int
    nbytes: int
    left: tuple[Copy, ...]
    right: tuple[Copy, ...]
    items: tuple[int, int] = (1, 1)

    @property
    def is_cast(self) -> bool:
        """Whether values come out in another dtype."""
        return self.items != (1, 1)

    @property
    def written_start(self) -> int:
        """`start` in bytes as they are written."""
        return self.start // self.items[0] * self.items[1]

    @property
    def written_nbytes(self) -> int:
        """Bytes that are written."""
        return self.nbytes // self.items[0] * self.items[1]

    @property
    def plain(self) -> bool:
        """Either side is one run of all its bytes, or nothing: they need no other order."""
        return all(not side or [copy.width for copy in side] == [self.nbytes] for side in (self.left, self.right))


def slabs(number: int, stream: Stream, limit: int) -> Iterator[Slab]:
    """Slabs of stream `number`, each of at most `limit` bytes, in the order of the tensor's bytes."""
    if not stream.nbytes:
        return
    left, right = (tuple(itertools.islice(copies, 2)) for copies in _sides(stream, stream.box))
    if not stream.cast and Slab(number, stream.span[0], stream.nbytes, left, right).plain:
        yield from _plain(number, stream, left, right, limit)
    else:
        read, written = _items(stream)
        yield from _by_rows(number, stream, limit * read // max(read, written))


def _sides(stream: Stream, box: Box) -> tuple[Iterator[Copy], Iterator[Copy]]:
    return left_copies(stream, box), right_copies(stream, box)


def _items(stream: Stream) -> tuple[int, int]:
    return (itemsize(stream.dtype), itemsize(stream.cast)) if stream.cast else (1, 1)


def _plain(number: int, stream: Stream, left: tuple[Copy, ...], right: tuple[Copy, ...], limit: int) -> Iterator[Slab]:
    """Cut anywhere; each cut where a page of the file that is written begins."""
    low, stop = stream.span
    shift = next((c.offset - c.at for c in (*right, *left)), 0)
    while low < stop:
        page = (low + shift + limit) // PAGE * PAGE - shift
        high = min(stop, page if page > low else low + limit)
        yield Slab(number, low, high - low, _part(left, low, high), _part(right, low, high))
        low = high


def _part(copies: tuple[Copy, ...], low: int, high: int) -> tuple[Copy, ...]:
    return tuple(Copy(low, c.file, c.offset + low - c.at, high - low) for c in copies)


def _by_rows(number: int, stream: Stream, limit: int) -> Iterator[Slab]:
    """Cut along one axis, at the edges of bands of whole chunks where those fit the limit."""
    axis = _axis(stream, limit)
    bands, pages = (tuple(_bands(stream, axis)), _page_rows(stream, axis)) if stream.shape else ((), 1)
    yield from _along(number, stream, limit, axis, bands, pages)


def even_slabs(number: int, stream: Stream, limit: int) -> Iterator[Slab]:
    """Slabs that depend on the tensor's shape alone, not on what lies left and right of it."""
    return _along(number, stream, limit, _axis(stream, limit), (), 1) if stream.nbytes else iter(())


def _along(number: int, stream: Stream, limit: int, axis: int, bands: tuple[_Band, ...], pages: int) -> Iterator[Slab]:
    steps = strides(stream.shape, itemsize(stream.dtype)) or (stream.nbytes,)
    inner, extent = steps[axis], stream.shape[axis] if axis else stream.rows[1]
    edges = _Edges(bands, max(1, limit // inner), pages)
    for outer in itertools.product(*(range(*span) for span in stream.box[:axis])):
        low = 0 if axis else stream.rows[0]
        while low < extent:
            high = min(extent, edges.after(low))
            box = (*((i, i + 1) for i in outer), (low, high), *whole(stream.shape[axis + 1 :]))
            box = box if stream.shape else ()
            left, right = map(tuple, _sides(stream, box))
            start = sum(span[0] * step for span, step in zip(box, steps))
            yield Slab(number, start, (high - low) * inner, left, right, _items(stream))
            low = high


def _axis(stream: Stream, limit: int) -> int:
    """The outermost axis of which one step fits the limit."""
    sizes = strides(stream.shape, itemsize(stream.dtype))
    return next((axis for axis, nbytes in enumerate(sizes) if nbytes <= limit), max(0, len(sizes) - 1))


@dataclass(frozen=True, slots=True)
class _Band:
    """Of the rows from `first` to `stop`, which a region has, each `rows` fill whole chunks."""

    first: int
    stop: int
    rows: int


@dataclass(frozen=True, slots=True)
class _Edges:
    """Where slabs may end: after whole bands of chunks, else after rows that fill whole pages of a chunk."""

    bands: tuple[_Band, ...]  # those written first: they matter more
    step: int  # rows that fit a slab
    pages: int  # rows that fill whole pages in every chunk

    def after(self, low: int) -> int:
        """The row at which a slab that begins at `low` ends; bands that do not fit with those before them are cut."""
        high = low + self.step
        crossed = [band for band in self.bands if band.first < high < band.stop]
        if not crossed:
            return high
        found, unit = low, 1
        for band in crossed:
            together = math.lcm(unit, band.rows)
            edge = band.first + (high - band.first) // together * together
            if edge > low and band.first == crossed[0].first:
                found, unit = edge, together
        return found if found > low else low + (self.step // self.pages * self.pages or self.step)


def _bands(stream: Stream, axis: int) -> Iterator[_Band]:
    """The bands of whole chunks along an axis, of the regions written and then of those read."""
    for part in (*stream.right, *stream.left):
        if isinstance(part, Region) and (rows := _band_rows(part, axis)) > 1:
            dim = part.row.source[axis]
            yield _Band(dim.start, dim.start + dim.taken, rows)


def _band_rows(region: Region, axis: int) -> int:
    """Rows along an axis of the tensor that fill whole chunks."""
    taken = _atoms_in_chunk(region)
    rows = 1
    found = 1
    for factor in reversed(region.row.source[axis].factors):
        if taken.get(factor.atom, 1) > 1:
            found = rows * taken[factor.atom]
        rows *= factor.extent
    return found


def _atoms_in_chunk(region: Region) -> dict[str, int]:
    """How much of each atom one chunk holds; an atom that chunk edges cut unevenly counts as cut to single steps."""
    found: dict[str, int] = {}
    for dim, length in zip(region.row.leaf, region.grid.chunk):
        extents = [f.extent for f in dim]
        at = cut_atom(extents, length)
        for i, factor in enumerate(dim):
            if at is not None and i >= at:
                found[factor.atom] = factor.extent if i > at else length // math.prod(extents[at + 1 :])
    return found


def _page_rows(stream: Stream, axis: int) -> int:
    """Rows along an axis whose bytes in one chunk are whole pages."""
    rows = 1
    for part in (*stream.right, *stream.left):
        if isinstance(part, Region):
            taken = _atoms_in_chunk(part)
            inner = [f.atom for dim in part.row.source[axis + 1 :] for f in dim.factors if f.held is None]
            nbytes = math.prod(taken.get(atom, 1) for atom in inner) * part.itemsize
            rows = math.lcm(rows, PAGE // math.gcd(PAGE, nbytes))
    return rows


def all_slabs(streams: Sequence[Stream], limit: int, first: int = 0) -> Iterator[Slab]:
    """The slabs of the streams from number `first` on, in order."""
    for number in range(first, len(streams)):
        yield from slabs(number, streams[number], limit)


def wide(streams: Sequence[Stream]) -> int:
    """Bytes of the largest slab that some stream needs for long runs on both of its sides.

    Where what is adjacent on one side lies apart on the other, a run there is only as long as a slab is wide here.
    """
    return max((_wide(stream) for stream in streams if stream.nbytes), default=0)


def _wide(stream: Stream) -> int:
    items = _items(stream)
    sides = zip(_sides(stream, stream.box), items)
    found = (_spread(copy) // item for side, item in sides for copy in itertools.islice(side, 4))
    return max(found, default=0) * max(items)


def _spread(copy: Copy) -> int:
    """Bytes of the tensor over which a long run of the other side is spread; 0 where they lie together, or nowhere."""
    if not copy.dims:
        return 0
    count, here, there = copy.dims[-1]
    return min(count, -(-LONG_RUN // copy.width)) * here if there == copy.width else 0
