"""Minimum, maximum and mean of a tensor, and counts of special values, in constant memory."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from prepcli.algebra.boxes import strides
from prepcli.algebra.grids import ArrayParts
from prepcli.algebra.strided_copies import StridedCopy
from prepcli.engine.files import RunReader
from prepcli.engine.fills import numpy_dtype
from prepcli.engine.stream_values import allocate_run_buffers, read_values
from prepcli.inspection.contents import num_chunks
from prepcli.planning.arrays import whole_array
from prepcli.planning.plan import Stream
from prepcli.planning.slabs import Slab, split_stream_evenly
from prepcli.planning.tensors import ITEM_BITS
from prepcli.sources.source import SourceTensor, stored_tensor
from prepcli.stores.buffers import ByteArray, allocate_buffer
from prepcli.stores.byte_ranges import PART_NBYTES

# Bytes per read. The values fit into a CPU cache, even after the conversion to float32 and with the 8-byte indices
# that select the elements without padding.
RUN_NBYTES = 1 << 20
# Bytes per read of a remote file, which is one request
REMOTE_READ_NBYTES = PART_NBYTES


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
    entry: SourceTensor,
    files: RunReader,
    on_read: Callable[[int], object],
    *,
    is_remote: bool = False,
) -> TensorStats | None:
    """Compute the statistics of an entry from all its values.

    `on_read` is called with the number of bytes after each read. Few large reads are faster on a server.

    Returns:
        The statistics, or None for packed dtypes smaller than a byte.
    """
    if ITEM_BITS[entry.dtype] % 8:
        return None
    accumulator = _Accumulator()
    # The sum of large float64 values may overflow to inf. The mean is then not reported.
    with np.errstate(over="ignore", invalid="ignore"):
        tensor_reader = _TensorReader(files, is_remote=is_remote)
        for values in _entry_values(entry, tensor_reader, on_read):
            # NumPy does not compute in smaller float dtypes. All of them fit into float32.
            if values.dtype.kind not in "iuc" and values.dtype.itemsize < 4:
                values = values.astype(np.float32)
            accumulator.add(values)
        mean = accumulator.total / accumulator.finite if accumulator.finite else math.nan
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


def stored_nbytes(entry: SourceTensor) -> int:
    """Return the number of bytes that `compute_stats` reads, in whole chunks."""
    location = entry.placement[0]
    if location.axis_map is not None or len(entry.placement) > 1:
        return entry.nbytes
    # Chunks at the edge are stored whole, with padding beyond the tensor.
    return num_chunks(entry) * location.chunk_nbytes


def _entry_values(
    entry: SourceTensor, runs: _TensorReader, on_read: Callable[[int], object]
) -> Iterator[np.ndarray]:
    """Yield the values of an entry, chunk by chunk, without padding beyond its edge."""
    # A file may hold other bytes than 0 and 1, which are undefined values of a NumPy bool.
    dtype = np.dtype(np.uint8) if entry.dtype == "bool" else numpy_dtype(entry.dtype)
    array = entry.placement[0].array
    is_part = entry.placement[0].axis_map is not None or array.strides is not None
    if array.is_contiguous or is_part or isinstance(array.chunks, ArrayParts):
        for _, data in runs.read_in_element_order(entry):
            on_read(data.size)
            yield data.view(dtype)
        return
    # The array is in chunks, each in C order.
    for index in itertools.product(*map(range, array.grid.chunk_counts)):
        inside: list[int] = []
        for i, length, extent in zip(index, array.chunk_shape, array.shape):
            # E.g. extent 10 in chunks of 4: chunk 2 has 10 - 2 * 4 = 2 rows inside.
            inside.append(min(length, extent - i * length))
        position = array.chunks.find(index)
        chunk = whole_array(array.name, array.dtype, array.chunk_shape, position)
        for start, data in runs.read_in_element_order(stored_tensor(chunk)):
            on_read(data.size)
            values = data.view(dtype)
            if tuple(inside) != array.chunk_shape:
                first = start // dtype.itemsize
                # E.g. a chunk [4, 3] with 2 columns inside: element 5 is in column 5 // 1 % 3 = 2, so it is padding.
                positions = np.arange(first, first + values.size)
                mask = np.ones(values.size, bool)
                for stride, length, extent in zip(
                    strides(array.chunk_shape), array.chunk_shape, inside
                ):
                    if extent < length:
                        mask &= positions // stride % length < extent
                values = values[mask]
            yield values


class _TensorReader:
    """Reader of tensors in runs of at most RUN_NBYTES. Local and remote files have the same runs."""

    def __init__(self, files: RunReader, *, is_remote: bool) -> None:
        self._files = files
        self._buffers = allocate_run_buffers(RUN_NBYTES)
        self._remote_buffer: ByteArray | None = None
        if is_remote:
            self._remote_buffer = allocate_buffer(REMOTE_READ_NBYTES)

    def read_in_element_order(self, tensor: SourceTensor) -> Iterator[tuple[int, ByteArray]]:
        """Yield the bytes of a tensor in the order of its elements, each run with its byte offset."""
        rows = tensor.shape[0] if tensor.shape else 1
        stream = Stream(tensor.name, tensor.dtype, tensor.shape, (0, rows), tensor.placement, ())
        location = tensor.placement[0]
        if self._remote_buffer is not None and location.is_contiguous:
            slabs = split_stream_evenly(0, stream, max_nbytes=RUN_NBYTES)
            for group in _slab_groups(slabs, self._remote_buffer.size):
                first = group[0].start
                nbytes = sum(slab.nbytes for slab in group)
                file, offset = location.position
                copy = StridedCopy(0, file, offset + first, nbytes)
                data = self._files.read_runs([copy], self._remote_buffer)
                for slab in group:
                    start = slab.start - first
                    yield slab.start, data[start : start + slab.nbytes]
        else:
            yield from read_values(self._files, stream, buffers=self._buffers)


def _slab_groups(slabs: Iterable[Slab], max_nbytes: int) -> Iterator[list[Slab]]:
    """Group neighbouring slabs of at most `max_nbytes` together."""
    group: list[Slab] = []
    nbytes = 0
    for slab in slabs:
        if group and nbytes + slab.nbytes > max_nbytes:
            yield group
            group = []
            nbytes = 0
        group.append(slab)
        nbytes += slab.nbytes
    if group:
        yield group
