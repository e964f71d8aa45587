"""Rows that are made rather than read: the padding of a vocabulary."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from prepcli.engine.files import ByteArray
from prepcli.planning.plan import Stream
from prepcli.planning.slabs import Slab

GROUP_ROWS = 64  # rows summed at a time: a number of its own, so that a mean does not depend on how slabs were cut


def numpy_dtype(dtype: str) -> np.dtype:
    """NumPy's dtype of a name, ml_dtypes' where NumPy has none."""
    try:
        return np.dtype(dtype)
    except TypeError:
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, dtype))


def round_to_dtype(values: npt.NDArray[np.floating], dtype: np.dtype) -> np.ndarray:
    """float32 or float64 in a dtype, each value rounded once, to the nearest or in a tie to the even one."""
    if dtype.kind != "V" or values.dtype == np.float32:
        return values.astype(dtype)
    # ml_dtypes rounds to float32 first. Where that step is not exact it goes to the odd neighbour, so that it never
    # ends in a tie that the second step would break in its own way.
    near = values.astype(np.float32)
    towards_zero = near.view(np.uint32) - (np.abs(near) > np.abs(values))
    return (towards_zero | (near != values)).view(np.float32).astype(dtype)


class FillGenerator:
    """Makes the rows of streams that have a fill, and sees all bytes on the way, since a mean is made of them."""

    def __init__(self, streams: Sequence[Stream]) -> None:
        self._streams = streams
        self._mean: _RowMean | None = None
        self._averaged = {
            mean_source_number(streams, i) for i, s in enumerate(streams) if s.fill and s.fill.kind == "mean"
        }

    def add_slab(self, slab: Slab, data: ByteArray) -> None:
        """Take in a slab of a stream whose mean other rows are filled with."""
        if slab.stream_number not in self._averaged:
            return
        stream = self._streams[slab.stream_number]
        if slab.start == stream.byte_range[0]:
            self._mean = _RowMean(stream)
        if self._mean:
            self._mean.add(data)

    def make_rows(self, slab: Slab, out: ByteArray) -> ByteArray:
        """The bytes of a slab of a filled stream."""
        stream = self._streams[slab.stream_number]
        if stream.fill is None:
            raise ValueError(f"{stream.name}: nothing to read and nothing to fill it with")
        if stream.fill.kind == "zeros":
            out[...] = 0
            return out
        low, size = slab.start, stream.row_nbytes
        for row in range(low // size, -(-(low + slab.nbytes) // size)):
            values = self._make_row(stream, row).view(np.uint8)
            first, last = max(low, row * size), min(low + slab.nbytes, (row + 1) * size)
            out[first - low : last - low] = values[first - row * size : last - row * size]
        return out

    def _make_row(self, stream: Stream, row: int) -> np.ndarray:
        if stream.fill and stream.fill.kind == "normal":
            return normal_row(stream, row)
        if self._mean is None:
            raise ValueError(f"{stream.name}: its mean is wanted before its rows were seen")
        return self._mean.value(numpy_dtype(stream.dtype))


def mean_source_number(streams: Sequence[Stream], stream_number: int) -> int:
    """The stream of the true rows of the tensor that stream `number` pads."""
    while streams[stream_number].rows[0]:
        stream_number -= 1
    return stream_number


def normal_row(stream: Stream, row_number: int) -> np.ndarray:
    """A row of normal values by seed and row number alone, rounded once from float64."""
    fill = stream.fill
    if fill is None:
        raise ValueError(f"{stream.name} has no fill")
    count = stream.row_nbytes // numpy_dtype(stream.dtype).itemsize
    generator = np.random.Generator(np.random.Philox(key=np.array([fill.seed, row_number], np.uint64)))
    return round_to_dtype(generator.standard_normal(count) * fill.std, numpy_dtype(stream.dtype))


class _RowMean:
    """The mean of a stream's rows in float64, rounded once; rows are added in groups of a fixed size."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._dtype = numpy_dtype(stream.dtype)
        self._sum = np.zeros(stream.row_nbytes // self._dtype.itemsize)
        self._rest = np.empty(0, np.uint8)

    def add(self, data: ByteArray) -> None:
        size = GROUP_ROWS * self._stream.row_nbytes
        first = min(data.size, -self._rest.size % size)  # what completes the group that was begun
        self._rest = np.concatenate([self._rest, data[:first]])
        if self._rest.size == size:
            self._add_rows(self._rest)
            self._rest = self._rest[:0]
        last = first + (data.size - first) // size * size
        for low in range(first, last, size):
            self._add_rows(data[low : low + size])
        if last < data.size:
            self._rest = data[last:].copy()

    def _add_rows(self, data: ByteArray) -> None:
        self._sum += data.view(self._dtype).reshape(-1, self._sum.size).astype(np.float64).sum(axis=0)

    def value(self, dtype: np.dtype) -> np.ndarray:
        """The mean in a dtype, once all the rows of the stream were added."""
        if self._rest.size:
            self._add_rows(self._rest)
            self._rest = np.empty(0, np.uint8)
        low, high = self._stream.rows
        return round_to_dtype(self._sum / (high - low), dtype)
