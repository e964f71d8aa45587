"""Generate new rows of a vocabulary: zeros, normal values, or the mean of all or of some true rows."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from prepcli.planning.plan import Stream, ValueOperation
from prepcli.planning.slabs import Slab
from prepcli.stores.buffers import ByteArray

# Rows per partial sum. The number is fixed, so a mean does not depend on slab boundaries.
GROUP_ROWS = 64


def numpy_dtype(dtype: str) -> np.dtype:
    """Return the dtype of a name, from ml_dtypes if NumPy does not have it."""
    try:
        return np.dtype(dtype)
    except TypeError:
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, dtype))


def round_to_dtype(values: npt.NDArray[np.floating], dtype: np.dtype) -> np.ndarray:
    """Cast float32 or float64 values to a float dtype, each rounded once, to nearest even."""
    if dtype.kind != "V" or values.dtype == np.float32:
        return values.astype(dtype)
    # ml_dtypes casts float64 through float32, which would round twice. Rounding the first step to odd prevents that
    # (Boldo and Melquiond 2008, "Emulation of FMA and Correctly Rounded Sums").
    nearest = values.astype(np.float32)
    towards_zero = nearest.view(np.uint32) - (np.abs(nearest) > np.abs(values))
    return (towards_zero | (nearest != values)).view(np.float32).astype(dtype)


@dataclass(frozen=True, slots=True)
class Fill(ValueOperation):
    """How to generate rows.

    Attributes:
        kind: `zeros`, `mean` (of the tensor's true rows), `pieces` or `normal`.
        seed: Seed of normal values.
        std: Standard deviation of normal values.
        pieces: For each row of `pieces`, the true rows to average.
    """

    kind: str
    seed: int = 0
    std: float = 0.0
    pieces: tuple[tuple[int, ...], ...] | None = None
    makes_rows: ClassVar[bool] = True

    @property
    def averages_rows(self) -> bool:
        """Whether the values depend on the true rows of the tensor."""
        return self.kind in ("mean", "pieces")

    def __str__(self) -> str:
        return f"filled with {self.kind}"

    @property
    def averaged_rows(self) -> list[int]:
        """Row numbers of all pieces, ascending."""
        return sorted({row for pieces in self.pieces or () for row in pieces})

    def kept_nbytes(self, stream: Stream) -> int:
        """Return the memory of the averaged rows."""
        return len(self.averaged_rows) * stream.row_nbytes

    def encode(self, stream: Stream) -> dict[str, str]:
        """Return the field of the fill. The first release had no pieces."""
        return {"fill": repr(self).replace(", pieces=None", "")}


def fill_of(stream: Stream) -> Fill | None:
    """Return the fill of a stream, or None if its rows are read."""
    for operation in stream.operations:
        if isinstance(operation, Fill):
            return operation
    return None


class FillGenerator:
    """Generates the new rows of a vocabulary: the rows of streams without a source.

    If new rows are means of true rows, `add_slab` must pass all true rows before `make_rows`.
    """

    def __init__(self, streams: Sequence[Stream]) -> None:
        self._streams = streams
        # Stream of true rows -> the fills of new rows that are means of them, by kind
        self._fills: dict[int, dict[str, Fill]] = {}
        # The true rows of the latest stream with a fill of a kind
        self._true_rows: dict[str, _RowMean | _PieceRows] = {}
        for number, stream in enumerate(streams):
            fill = fill_of(stream)
            if fill and fill.averages_rows:
                fills = self._fills.setdefault(mean_source_number(streams, number), {})
                fills[fill.kind] = fill

    def add_slab(self, slab: Slab, data: ByteArray) -> None:
        """Keep the parts of a slab needed for new rows."""
        stream = self._streams[slab.stream_number]
        for kind, fill in self._fills.get(slab.stream_number, {}).items():
            if slab.start == stream.byte_range[0]:
                # The rows of the preceding tensor are released before these are allocated.
                self._true_rows.pop(kind, None)
                kept = _RowMean(stream) if kind == "mean" else _PieceRows(stream, fill)
                self._true_rows[kind] = kept
            if kind in self._true_rows:
                self._true_rows[kind].add(slab.start, data)

    def make_rows(self, slab: Slab, out: ByteArray) -> ByteArray:
        """Generate a slab of a filled stream in `out`, a buffer of the slab's size.

        Raises:
            ValueError: The stream has no fill, or its mean is needed before its true rows were added.
        """
        stream = self._streams[slab.stream_number]
        fill = fill_of(stream)
        if fill is None:
            raise ValueError(f"{stream.name} is neither read nor filled")
        if fill.kind == "zeros":
            out[...] = 0
            return out
        # A slab may begin and end inside a row.
        slab_stop = slab.start + slab.nbytes
        row_nbytes = stream.row_nbytes
        for row in range(slab.start // row_nbytes, -(-slab_stop // row_nbytes)):
            if fill.kind == "normal":
                values = normal_row(stream, fill, row).view(np.uint8)
            else:
                if fill.kind not in self._true_rows:
                    raise ValueError(
                        f"{stream.name}: its mean is needed before its rows were added"
                    )
                true_rows = self._true_rows[fill.kind]
                mean = true_rows.mean(row - stream.rows[0], numpy_dtype(stream.dtype))
                values = mean.view(np.uint8)
            row_start = row * row_nbytes
            start = max(slab.start, row_start)
            stop = min(slab_stop, row_start + row_nbytes)
            part = values[start - row_start : stop - row_start]
            out[start - slab.start : stop - slab.start] = part
        return out


def mean_source_number(streams: Sequence[Stream], stream_number: int) -> int:
    """Return the number of the stream with the true rows, for a stream of padding rows."""
    while streams[stream_number].rows[0]:
        stream_number -= 1
    return stream_number


def normal_row(stream: Stream, fill: Fill, row_number: int) -> np.ndarray:
    """Generate a row of normal values from the seed of the fill and the row's number in the tensor.

    It is rounded once from float64.
    """
    count = stream.row_nbytes // numpy_dtype(stream.dtype).itemsize
    generator = np.random.Generator(
        np.random.Philox(key=np.array([fill.seed, row_number], np.uint64))
    )
    return round_to_dtype(generator.standard_normal(count) * fill.std, numpy_dtype(stream.dtype))


class _PieceRows:
    """The true rows averaged for new rows."""

    def __init__(self, stream: Stream, fill: Fill) -> None:
        self._dtype = numpy_dtype(stream.dtype)
        self._row_nbytes = stream.row_nbytes
        self._pieces = fill.pieces or ()
        self._row_numbers = fill.averaged_rows
        self._index_of_row = {row: index for index, row in enumerate(self._row_numbers)}
        self._rows = np.empty((len(self._row_numbers), self._row_nbytes), np.uint8)

    def add(self, start: int, data: ByteArray) -> None:
        """Keep the pieces in some bytes of the tensor, from the byte offset `start`."""
        stop = start + data.size
        # A slab may begin and end inside a row.
        first = bisect_left(self._row_numbers, start // self._row_nbytes)
        last = bisect_left(self._row_numbers, -(-stop // self._row_nbytes))
        for index in range(first, last):
            row_start = self._row_numbers[index] * self._row_nbytes
            low = max(start, row_start)
            high = min(stop, row_start + self._row_nbytes)
            self._rows[index, low - row_start : high - row_start] = data[low - start : high - start]

    def mean(self, new_row: int, dtype: np.dtype) -> np.ndarray:
        """Return a new row in a dtype: the mean of its pieces, computed in float64 and rounded once."""
        pieces = self._pieces[new_row]
        # One row after another: the pieces of a long token may repeat, and their copies would exceed the memory limit.
        # The sum begins with a row, because 0.0 + -0.0 has another sign than -0.0.
        rows = (self._rows[self._index_of_row[row]].view(self._dtype) for row in pieces)
        total = next(rows).astype(np.float64)
        for values in rows:
            total += values.astype(np.float64)
        return round_to_dtype(total / len(pieces), dtype)


class _RowMean:
    """The mean of a stream's rows: summed in float64 in groups of `GROUP_ROWS` rows, rounded once."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._dtype = numpy_dtype(stream.dtype)
        self._sum = np.zeros(stream.row_nbytes // self._dtype.itemsize)
        self._partial_group = np.empty(0, np.uint8)

    def add(self, start: int, data: ByteArray) -> None:
        """Add the stream's next bytes."""
        group_nbytes = GROUP_ROWS * self._stream.row_nbytes
        # A slab may end inside a group. Its rest waits in `_partial_group` for the next slab, so that the
        # groups, and with them the rounding of the sum, do not depend on the slabs.
        head_nbytes = min(data.size, -self._partial_group.size % group_nbytes)
        self._partial_group = np.concatenate([self._partial_group, data[:head_nbytes]])
        if self._partial_group.size == group_nbytes:
            self._add_rows(self._partial_group)
            self._partial_group = self._partial_group[:0]
        tail_start = head_nbytes + (data.size - head_nbytes) // group_nbytes * group_nbytes
        for first in range(head_nbytes, tail_start, group_nbytes):
            self._add_rows(data[first : first + group_nbytes])
        if tail_start < data.size:
            self._partial_group = data[tail_start:].copy()

    def _add_rows(self, data: ByteArray) -> None:
        """Add whole rows to the sum."""
        rows = data.view(self._dtype).reshape(-1, self._sum.size)
        self._sum += rows.astype(np.float64).sum(axis=0)

    def mean(self, new_row: int, dtype: np.dtype) -> np.ndarray:
        """Return the mean in a dtype, the same for each new row, after all rows of the stream were added."""
        if self._partial_group.size:
            self._add_rows(self._partial_group)
            self._partial_group = np.empty(0, np.uint8)
        start, stop = self._stream.rows
        return round_to_dtype(self._sum / (stop - start), dtype)
