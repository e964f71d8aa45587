"""Minimum, maximum and mean of a tensor, and counts of special values, in constant memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from prepcli.engine.files import ByteArray, RunReader
from prepcli.engine.fills import numpy_dtype
from prepcli.engine.stream_values import allocate_run_buffers, read_values
from prepcli.formats.orbax_store import StoredRange
from prepcli.inspection.contents import TensorEntry
from prepcli.planning.plan import Contiguous, Locations, Stream
from prepcli.planning.tensors import ITEM_BITS, itemsize
from trainer.models.boxes import strides

# Bytes per read. The values fit into a CPU cache, even after the conversion to float32 and with the 8-byte indices
# that select the elements without padding.
RUN_NBYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class TensorStats:
    """Statistics of a tensor.

    `minimum`, `maximum` and `mean` cover the finite values. They are None without finite values and for complex dtypes.
    `mean` is also None if it exceeds float64.
    """

    minimum: float | None
    maximum: float | None
    mean: float | None
    nan: int
    inf: int
    zeros: int


@dataclass(slots=True)
class _Accumulator:
    """Running statistics of the values added so far."""

    minimum: float | None = None
    maximum: float | None = None
    total: float = 0.0
    finite: int = 0
    nan: int = 0
    inf: int = 0
    zeros: int = 0

    def add(self, values: np.ndarray) -> None:
        """Add values."""
        self.zeros += values.size - int(np.count_nonzero(values))
        if values.dtype.kind in "fc":
            nan = int(np.count_nonzero(np.isnan(values)))
            is_finite = np.isfinite(values)
            inf = values.size - nan - int(np.count_nonzero(is_finite))
            if nan or inf:
                values = values[is_finite]
            self.nan = self.nan + nan
            self.inf = self.inf + inf
        # Complex values have no order, so minimum, maximum and mean stay None.
        if values.size and values.dtype.kind != "c":
            minimum = values.min().item()
            maximum = values.max().item()
            if self.minimum is None:
                self.minimum = minimum
            else:
                self.minimum = min(self.minimum, minimum)
            if self.maximum is None:
                self.maximum = maximum
            else:
                self.maximum = max(self.maximum, maximum)
            self.total += float(values.sum(dtype=np.float64))
            self.finite += values.size


def compute_stats(
    entry: TensorEntry, files: RunReader, on_read: Callable[[int], object]
) -> TensorStats | None:
    """Compute the statistics of an entry from all its values.

    Args:
        entry: The tensor.
        files: Reader of its files.
        on_read: Called with the number of bytes after each read.

    Returns:
        The statistics, or None for packed dtypes smaller than a byte.
    """
    if ITEM_BITS[entry.dtype] % 8:
        return None
    accumulator = _Accumulator()
    # The sum of large float64 values may overflow to inf. The mean is then not reported.
    with np.errstate(over="ignore", invalid="ignore"):
        for values in _entry_values(entry, files, on_read, allocate_run_buffers(RUN_NBYTES)):
            accumulator.add(_widen(values))
        if accumulator.finite:
            mean = accumulator.total / accumulator.finite
        else:
            mean = math.nan
    finite_mean = None
    if math.isfinite(mean):
        finite_mean = mean
    return TensorStats(
        accumulator.minimum,
        accumulator.maximum,
        finite_mean,
        accumulator.nan,
        accumulator.inf,
        accumulator.zeros,
    )


def stats_cells(statistics: TensorStats | None) -> list[str]:
    """Return minimum, maximum, mean, and the numbers of NaN, infinite and zero values as texts.

    >>> stats_cells(TensorStats(-1.5, 2.0, None, nan=0, inf=0, zeros=1200))
    ['-1.5', '2', '-', '0', '0', '1,200']
    """
    if statistics is None:
        return ["-"] * 6
    cells: list[str] = []
    for value in (statistics.minimum, statistics.maximum, statistics.mean):
        cells.append("-" if value is None else f"{value:.6g}")
    for count in (statistics.nan, statistics.inf, statistics.zeros):
        cells.append(f"{count:,}")
    return cells


def stored_nbytes(entry: TensorEntry) -> int:
    """Return the number of bytes that `compute_stats` reads, in whole chunks."""
    # Chunks at the edge are stored whole, with padding beyond the tensor.
    chunk_nbytes = math.prod(entry.chunk_shape) * itemsize(entry.dtype)
    nbytes = len(entry.chunks) * chunk_nbytes
    if entry.placement:
        nbytes += entry.nbytes
    return nbytes


def _widen(values: np.ndarray) -> np.ndarray:
    """Return the values in a dtype that NumPy computes in. Exact: all other dtypes fit in float32."""
    if values.dtype.kind in "iuc" or values.dtype.itemsize >= 4:
        return values
    return values.astype(np.float32)


def _entry_values(
    entry: TensorEntry,
    files: RunReader,
    on_read: Callable[[int], object],
    buffers: tuple[ByteArray, ByteArray],
) -> Iterator[np.ndarray]:
    """Yield the values of an entry, chunk by chunk, without padding beyond its edge."""
    # A file may hold other bytes than 0 and 1, which are undefined values of a NumPy bool.
    if entry.dtype == "bool":
        dtype = np.dtype(np.uint8)
    else:
        dtype = numpy_dtype(entry.dtype)
    if entry.placement:
        for _, data in _runs_in_element_order(entry, entry.placement, files, buffers):
            on_read(data.size)
            yield data.view(dtype)
    for index, stored in entry.chunks.items():
        inside: list[int] = []
        for i, length, extent in zip(index, entry.chunk_shape, entry.shape):
            # E.g. extent 10 in chunks of 4: chunk 2 has 10 - 2 * 4 = 2 rows inside.
            inside.append(min(length, extent - i * length))
        is_padded = inside != list(entry.chunk_shape)
        for start, data in _iter_chunk_bytes(entry, stored, files, buffers):
            on_read(data.size)
            values = data.view(dtype)
            if is_padded:
                first = start // dtype.itemsize
                values = values[_unpadded_mask(first, values.size, entry.chunk_shape, inside)]
            yield values


def _iter_chunk_bytes(
    entry: TensorEntry, stored: StoredRange, files: RunReader, buffers: tuple[ByteArray, ByteArray]
) -> Iterator[tuple[int, ByteArray]]:
    """Yield the bytes of a chunk piece by piece, each with its byte offset in the chunk."""
    yield from _runs_in_element_order(
        entry, (Contiguous(stored.file, stored.offset),), files, buffers
    )


def _runs_in_element_order(
    entry: TensorEntry, locations: Locations, files: RunReader, buffers: tuple[ByteArray, ByteArray]
) -> Iterator[tuple[int, ByteArray]]:
    """Yield the bytes of a chunk in the order of its elements, piece by piece, each with its byte offset."""
    if entry.chunk_shape:
        rows = entry.chunk_shape[0]
    else:
        rows = 1
    yield from read_values(
        files,
        Stream(entry.name, entry.dtype, entry.chunk_shape, (0, rows), locations, ()),
        buffers=buffers,
    )


def _unpadded_mask(
    start: int, count: int, chunk: Sequence[int], inside: Sequence[int]
) -> np.ndarray:
    """Return a mask with True for elements of the tensor, and False for padding.

    Args:
        start: First element of the chunk to test, in row-major order.
        count: Number of elements to test.
        chunk: Shape of the chunk.
        inside: Extent of the tensor inside the chunk, along each dim.
    """
    # E.g. a chunk [4, 3] with 2 columns inside: element 5 is in column 5 // 1 % 3 = 2, so it is padding.
    positions = np.arange(start, start + count)
    mask = np.ones(count, bool)
    for stride, length, extent in zip(strides(chunk), chunk, inside):
        if extent < length:
            mask &= positions // stride % length < extent
    return mask
