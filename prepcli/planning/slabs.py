"""Split streams into slabs that fit a buffer. A slab is a contiguous byte range of a tensor.

Slab boundaries are chosen so that reads and writes have long runs of whole chunks and whole pages.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from prepcli.algebra.boxes import Box, Range, full_box, strides
from prepcli.algebra.grids import find_split_atom
from prepcli.algebra.strided_copies import StridedCopy
from prepcli.planning.arrays import MappedArray, location_copies
from prepcli.planning.plan import Stream
from prepcli.planning.tensors import itemsize

PAGE = 4096  # bytes. Direct I/O transfers whole pages.
# Longer runs are hardly faster.
LONG_RUN_NBYTES = 64 << 10
# Runs of a smaller slab for the caches: a system call per run is then a small part of the time.
MIN_CACHED_RUN_NBYTES = 256 << 10


@dataclass(frozen=True, slots=True)
class Slab:
    """The unit of copies: a contiguous byte range of a tensor in C order.

    Attributes:
        stream_number: Number of the stream.
        start: Offset of the first byte in the tensor.
        nbytes: Size of the range.
        reads: Copies from the source files.
        writes: Copies to the output files. Their tensor offsets count bytes of the written dtype.
        itemsizes: Bytes per element in the read and in the written dtype, or (1, 1) for unchanged values.
    """

    stream_number: int
    start: int
    nbytes: int
    reads: tuple[StridedCopy, ...]
    writes: tuple[StridedCopy, ...]
    itemsizes: tuple[int, int] = (1, 1)

    @property
    def changes_values(self) -> bool:
        """Whether values are changed: cast to another dtype, or updated."""
        return self.itemsizes != (1, 1)

    @property
    def written_start(self) -> int:
        """`start` in bytes of the written dtype."""
        return self.start // self.itemsizes[0] * self.itemsizes[1]

    @property
    def written_nbytes(self) -> int:
        """`nbytes` in bytes of the written dtype."""
        return self.nbytes // self.itemsizes[0] * self.itemsizes[1]


def split_stream(
    stream_number: int, stream: Stream, *, max_nbytes: int, cached_nbytes: int | None = None
) -> Iterator[Slab]:
    """Split a stream into slabs.

    Args:
        stream_number: Number of the stream.
        stream: The stream.
        max_nbytes: Maximum size of a slab.
        cached_nbytes: Size of a slab that fits the caches. It is preferred if it does not make runs short. By default,
            `max_nbytes`.
    """
    if not stream.nbytes:
        return iter(())
    # E.g. float32 to float64: a slab of 32 MiB as written has 16 MiB as read.
    itemsizes = _itemsizes(stream)
    max_read_nbytes = max_nbytes * itemsizes[0] // max(itemsizes)
    preferred_nbytes = min(max_read_nbytes, cached_nbytes or max_nbytes)
    # Most tensors are small, and whole.
    is_one_slab = stream.nbytes <= preferred_nbytes and stream.box == full_box(stream.shape)
    # Otherwise two copies of each suffice to see whether a stream is contiguous.
    num_copies = None if is_one_slab else 2
    reads = tuple(itertools.islice(location_copies(stream.reads, stream.box), num_copies))
    writes = tuple(itertools.islice(location_copies(stream.writes, stream.box), num_copies))
    if not stream.is_changed:
        one_run = [stream.nbytes]
        widths = ([copy.width for copy in reads], [copy.width for copy in writes])
        if widths[0] in ([], one_run) and widths[1] in ([], one_run):
            max_nbytes = cached_nbytes or max_nbytes
            return _contiguous_slabs(stream_number, stream, reads, writes, max_nbytes)
    if is_one_slab:
        return iter([Slab(stream_number, 0, stream.nbytes, reads, writes, itemsizes)])
    axis = _split_axis(stream, max_read_nbytes)
    bands: tuple[_ChunkBand, ...] = ()
    page_rows = 1
    if stream.shape:
        # Slabs end at boundaries of bands of whole chunks, where possible.
        bands = tuple(_aligned_bands(stream, axis))
        page_rows = _rows_filling_whole_pages(stream, axis)
        if preferred_nbytes < min(stream.nbytes, max_read_nbytes):
            start_row = stream.box[axis][0]
            max_read_nbytes = _fit_slab_to_caches(
                stream,
                axis,
                lambda max_rows: _end_row(start_row, bands, max_rows, page_rows),
                cached_nbytes=preferred_nbytes,
                max_nbytes=max_read_nbytes,
            )
    return _slabs_along_axis(stream_number, stream, max_read_nbytes, axis, bands, page_rows)


def _fit_slab_to_caches(
    stream: Stream, axis: int, end_row: Callable[[int], int], *, cached_nbytes: int, max_nbytes: int
) -> int:
    """Return the smallest size of a slab from `cached_nbytes` on that has long runs, or runs as long as `max_nbytes`.

    Args:
        stream: The stream.
        axis: The axis along which slabs divide the stream.
        end_row: Returns the end of the first slab, given the number of rows that fit.
        cached_nbytes: Preferred size.
        max_nbytes: Maximum size.
    """
    # E.g. float32 [8192, 2048] in chunks [2048, 32], stored one after another. 4 MiB are 512 rows, and 64 runs of
    # 512 * 128 bytes = 64 KiB. 8 MiB have runs of 128 KiB. 16 MiB are whole chunks, and therefore a single run.
    row_nbytes = strides(stream.shape, itemsize(stream.dtype))[axis]
    fitting_nbytes = max_nbytes
    long_nbytes = MIN_CACHED_RUN_NBYTES
    nbytes = max_nbytes
    while nbytes >= max(cached_nbytes, row_nbytes):
        run_nbytes = _shortest_run_nbytes(stream, axis, end_row(nbytes // row_nbytes))
        if nbytes == max_nbytes:
            long_nbytes = min(long_nbytes, run_nbytes)
        if run_nbytes >= long_nbytes:
            fitting_nbytes = nbytes
        nbytes //= 2
    return fitting_nbytes


def _shortest_run_nbytes(stream: Stream, axis: int, stop_row: int) -> int:
    """Return the length of the shortest run of the first slab along an axis, which ends at `stop_row`."""
    box: list[Range] = list(stream.box)
    for outer in range(axis):
        start = box[outer][0]
        box[outer] = (start, start + 1)
    start, end = box[axis]
    box[axis] = (start, min(stop_row, end))
    shortest_nbytes = stream.nbytes
    for locations in (stream.reads, stream.writes):
        # A few copies suffice. Those of other chunks have equal runs, except at the edges of an array.
        for copy in itertools.islice(location_copies(locations, tuple(box)), 4):
            shortest_nbytes = min(shortest_nbytes, copy.run_nbytes)
    return shortest_nbytes


def _itemsizes(stream: Stream) -> tuple[int, int]:
    """Return the read and the written bytes per element, or (1, 1) for unchanged values."""
    if not stream.is_changed:
        return 1, 1
    return itemsize(stream.dtype), itemsize(stream.written_dtype)


def _contiguous_slabs(
    stream_number: int,
    stream: Stream,
    reads: tuple[StridedCopy, ...],
    writes: tuple[StridedCopy, ...],
    max_nbytes: int,
) -> Iterator[Slab]:
    """Split a stream that needs no reordering, at page boundaries of the written file."""
    # file offset = tensor offset + shift. A slab ends at the last page boundary of the file that it
    # can reach, e.g. shift 100 and slabs of 8,192 bytes: the first one has 8,092.
    start, stop = stream.byte_range
    shift = next((copy.file_offset - copy.tensor_offset for copy in (*writes, *reads)), 0)
    while start < stop:
        page_start = (start + shift + max_nbytes) // PAGE * PAGE - shift
        slab_stop = min(stop, page_start if page_start > start else start + max_nbytes)
        nbytes = slab_stop - start
        clipped: list[tuple[StridedCopy, ...]] = []
        for copies in (reads, writes):
            offsets = [copy.file_offset + start - copy.tensor_offset for copy in copies]
            parts = zip(copies, offsets)
            clipped.append(tuple(StridedCopy(start, c.file, offset, nbytes) for c, offset in parts))
        yield Slab(stream_number, start, nbytes, clipped[0], clipped[1])
        start = slab_stop


def split_stream_evenly(stream_number: int, stream: Stream, *, max_nbytes: int) -> Iterator[Slab]:
    """Split a stream at rows that depend on the tensor's shape alone, not on how it is stored."""
    if not stream.nbytes:
        return iter(())
    axis = _split_axis(stream, max_nbytes)
    return _slabs_along_axis(stream_number, stream, max_nbytes, axis, (), 1)


def _slabs_along_axis(
    stream_number: int,
    stream: Stream,
    max_nbytes: int,
    axis: int,
    bands: tuple[_ChunkBand, ...],
    page_rows: int,
) -> Iterator[Slab]:
    """Split a stream along an axis, for every index of the dims before it."""
    # A scalar has no axis: it is one row of all its bytes.
    byte_strides = strides(stream.shape, itemsize(stream.dtype)) or (stream.nbytes,)
    row_nbytes = byte_strides[axis]
    first_row = stream.rows[0]
    stop_row = stream.rows[1]
    if axis:
        first_row = 0
        stop_row = stream.shape[axis]
    max_rows = max(1, max_nbytes // row_nbytes)
    itemsizes = _itemsizes(stream)
    inner_box = full_box(stream.shape[axis + 1 :])
    outer_ranges = [range(start, stop) for start, stop in stream.box[:axis]]
    for outer_index in itertools.product(*outer_ranges):
        outer_box = tuple((index, index + 1) for index in outer_index)
        row = first_row
        while row < stop_row:
            slab_stop = min(stop_row, _end_row(row, bands, max_rows, page_rows))
            box: Box = ()
            if stream.shape:
                box = (*outer_box, (row, slab_stop), *inner_box)
            yield Slab(
                stream_number,
                sum(start * stride for (start, _), stride in zip(box, byte_strides)),
                (slab_stop - row) * row_nbytes,
                tuple(location_copies(stream.reads, box)),
                tuple(location_copies(stream.writes, box)),
                itemsizes,
            )
            row = slab_stop


def _split_axis(stream: Stream, max_nbytes: int) -> int:
    """Return the outermost axis at which one index has at most `max_nbytes` bytes."""
    # E.g. float32 [8, 4096, 4096] has the strides 64 MiB, 16 KiB and 4: slabs of 32 MiB split axis 1,
    # into 2,048 rows each, once for every index of axis 0.
    sizes = strides(stream.shape, itemsize(stream.dtype))
    for axis, nbytes in enumerate(sizes):
        if nbytes <= max_nbytes:
            return axis
    return max(0, len(sizes) - 1)


@dataclass(frozen=True, slots=True)
class _ChunkBand:
    """Rows `first` to `stop` of a location. Every `rows` consecutive rows fill whole chunks, or are one head."""

    first: int
    stop: int
    rows: int


def _end_row(start: int, bands: tuple[_ChunkBand, ...], max_rows: int, page_rows: int) -> int:
    """Return the end row of a slab, the unit of copying.

    It ends with whole chunks of the output and of the source, if the rows that fit allow it, or else with whole heads,
    or with whole pages of every chunk. Partial chunks would be read or written twice.

    Args:
        start: First row of the slab.
        bands: Bands of chunks, first of the output and then of the source, and bands of heads. Earlier bands have
            priority. A band without a common end with the bands before it is split.
        max_rows: Number of rows that fit a slab.
        page_rows: Number of rows that fill whole pages in every chunk.
    """
    max_stop = start + max_rows
    crossed = [band for band in bands if band.first < max_stop < band.stop]
    if not crossed:
        return max_stop
    # Bands of 6 written and 4 read rows, from row 0, at most 20 rows: 18 after the first band, but
    # 12 after both, which is a multiple of lcm(6, 4). Then neither side has a partial chunk.
    best_stop = start
    rows = 1
    for band in crossed:
        common_rows = math.lcm(rows, band.rows)
        stop = band.first + (max_stop - band.first) // common_rows * common_rows
        if stop > start and band.first == crossed[0].first:
            best_stop = stop
            rows = common_rows
    if best_stop > start:
        return best_stop
    return start + (max_rows // page_rows * page_rows or max_rows)


def _aligned_bands(stream: Stream, axis: int) -> Iterator[_ChunkBand]:
    """Yield the bands of whole chunks along an axis, then the bands of single heads or other indices within a chunk.

    Written locations come before read ones.
    """
    # The outermost atom with several indices in a chunk decides. e.g. rows (heads=4 head_dim=6) in chunks
    # of 2 heads: `heads` has 6 rows per index, so that 6 * 2 = 12 rows fill whole chunks. If these do not
    # fit a slab, it ends with a whole head of 6 rows: a leaf may have the rows of a head in another order.
    index_bands: list[_ChunkBand] = []
    for location in (*stream.writes, *stream.reads):
        if location.axis_map is None:
            continue
        atom_lengths = _atom_lengths_in_chunk(location)
        dim = location.axis_map.source_dims[axis]
        rows = 1
        band_rows = 1
        index_rows = 1
        for factor in reversed(dim.factors):
            if factor.fixed is None:
                index_rows = rows
            if atom_lengths.get(factor.atom, 1) > 1:
                band_rows = rows * atom_lengths[factor.atom]
            rows *= factor.extent
        stop = dim.start + dim.selected_extent
        if band_rows > 1:
            yield _ChunkBand(dim.start, stop, band_rows)
        if 1 < index_rows < band_rows:
            index_bands.append(_ChunkBand(dim.start, stop, index_rows))
    yield from index_bands


def _atom_lengths_in_chunk(location: MappedArray) -> dict[str, int]:
    """Return the number of indices of each named axis in one chunk, e.g. {"heads": 2, "head_dim": 64}.

    Axes with uneven chunk boundaries are omitted: they count as split into single indices.
    """
    atom_lengths: dict[str, int] = {}
    for dim, length in zip(location.axis_map.leaf_dims, location.array.chunk_shape):
        extents = [factor.extent for factor in dim]
        split_atom = find_split_atom(extents, length)
        if split_atom is None:
            continue
        for factor in dim[split_atom + 1 :]:
            atom_lengths[factor.atom] = factor.extent
        atom_lengths[dim[split_atom].atom] = length // math.prod(extents[split_atom + 1 :])
    return atom_lengths


def _rows_filling_whole_pages(stream: Stream, axis: int) -> int:
    """Return the number of rows along an axis that fill whole pages in every chunk."""
    # A row of 768 bytes in a chunk fills whole pages after 4096 / gcd(4096, 768) = 16 rows. The least
    # common multiple aligns the chunks of every location.
    rows = 1
    for location in (*stream.writes, *stream.reads):
        if location.axis_map is None:
            continue
        atom_lengths = _atom_lengths_in_chunk(location)
        row_nbytes = itemsize(location.array.dtype)
        for dim in location.axis_map.source_dims[axis + 1 :]:
            for factor in dim.factors:
                if factor.fixed is None:
                    row_nbytes *= atom_lengths.get(factor.atom, 1)
        rows = math.lcm(rows, PAGE // math.gcd(PAGE, row_nbytes))
    return rows


def min_buffer_nbytes(streams: Sequence[Stream]) -> int:
    """Return the slab size that gives every stream long runs in both reads and writes.

    In a transpose, the length of a written run is proportional to the number of rows in a slab.
    """
    needed_nbytes = 0
    for stream in streams:
        if not stream.nbytes:
            continue
        itemsizes = _itemsizes(stream)
        # Counted in elements, or in bytes for unchanged values.
        span = 0
        for locations, item_nbytes in zip((stream.reads, stream.writes), itemsizes):
            for copy in itertools.islice(location_copies(locations, stream.box), 4):
                span = max(span, _long_run_span_nbytes(copy) // item_nbytes)
        needed_nbytes = max(needed_nbytes, span * max(itemsizes))
    return needed_nbytes


def _long_run_span_nbytes(copy: StridedCopy) -> int:
    """Return how many bytes of the tensor lie between the ends of a long run of the file.

    If the run is contiguous in the tensor too, return 0.
    """
    if not copy.dims:
        return 0
    count, tensor_stride, file_stride = copy.dims[-1]
    if file_stride != copy.width:
        return 0
    # E.g. the transpose of [50257, 2048] float32: a run of 64 KiB in the file has 16,384 elements,
    # which are 8,192 bytes apart in the tensor.
    return min(count, -(-LONG_RUN_NBYTES // copy.width)) * tensor_stride
