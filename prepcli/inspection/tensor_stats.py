"""Least, greatest and mean value of a tensor, and how many are special; memory does not depend on its size."""

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
from prepcli.planning.boxes import strides
from prepcli.planning.plan import Contiguous, Locations, Stream
from prepcli.planning.tensors import ITEM_BITS, itemsize

RUN_NBYTES = 1 << 20  # widened to float32, and to an index of 8 bytes where a chunk is padded, it stays in a cache


@dataclass(frozen=True, slots=True)
class TensorStats:
    """`least`, `greatest` and `mean` are of the finite values; None where there are none, or where they have no order
    (complex). `mean` is None too where it is beyond float64."""

    minimum: float | None
    maximum: float | None
    mean: float | None
    nan: int
    inf: int
    zeros: int


@dataclass(slots=True)
class _Accumulator:
    minimum: float | None = None
    maximum: float | None = None
    total: float = 0.0
    finite: int = 0
    nan: int = 0
    inf: int = 0
    zeros: int = 0

    def add(self, found: np.ndarray) -> None:
        self.zeros += found.size - int(np.count_nonzero(found))
        if found.dtype.kind in "fc":
            nan = int(np.count_nonzero(np.isnan(found)))
            is_finite = np.isfinite(found)
            inf = found.size - nan - int(np.count_nonzero(is_finite))
            found = found if not nan and not inf else found[is_finite]
            self.nan, self.inf = self.nan + nan, self.inf + inf
        if found.size and found.dtype.kind != "c":
            low, high = found.min().item(), found.max().item()
            self.minimum = low if self.minimum is None else min(self.minimum, low)
            self.maximum = high if self.maximum is None else max(self.maximum, high)
            self.total += float(found.sum(dtype=np.float64))
            self.finite += found.size


def compute_stats(entry: TensorEntry, files: RunReader, on_read: Callable[[int], object]) -> TensorStats | None:
    """Read all of an entry, telling `read` of the bytes; None for dtypes below a byte, which stay packed."""
    if ITEM_BITS[entry.dtype] % 8:
        return None
    sums = _Accumulator()
    with np.errstate(over="ignore", invalid="ignore"):
        for found in _entry_values(entry, files, on_read, allocate_run_buffers(RUN_NBYTES)):
            sums.add(_widen(found))
        mean = sums.total / sums.finite if sums.finite else math.nan
    known_mean = mean if math.isfinite(mean) else None
    return TensorStats(sums.minimum, sums.maximum, known_mean, sums.nan, sums.inf, sums.zeros)


def stored_nbytes(entry: TensorEntry) -> int:
    """Bytes that `stats` reads: those of whole chunks."""
    whole = entry.nbytes if entry.placement else 0
    return whole + len(entry.chunks) * math.prod(entry.chunk_shape) * itemsize(entry.dtype)


def _widen(found: np.ndarray) -> np.ndarray:
    """The same values in a dtype that NumPy computes in: exact, since all others of them fit float32."""
    return found if found.dtype.kind in "iuc" or found.dtype.itemsize >= 4 else found.astype(np.float32)


def _entry_values(
    entry: TensorEntry, files: RunReader, on_read: Callable[[int], object], buffers: tuple[ByteArray, ByteArray]
) -> Iterator[np.ndarray]:
    """The values of an entry, chunk by chunk, without what lies beyond its edge."""
    dtype = np.dtype(np.uint8) if entry.dtype == "bool" else numpy_dtype(entry.dtype)
    for _, data in _ordered_runs(entry, entry.placement, files, buffers) if entry.placement else ():
        on_read(data.size)
        yield data.view(dtype)
    for index, stored in entry.chunks.items():
        inside = [min(length, extent - i * length) for i, length, extent in zip(index, entry.chunk_shape, entry.shape)]
        for start, data in _chunk_runs(entry, stored, files, buffers):
            on_read(data.size)
            found = data.view(dtype)
            padded = inside != list(entry.chunk_shape)
            yield (
                found[_inside_mask(start // dtype.itemsize, found.size, entry.chunk_shape, inside)] if padded else found
            )


def _chunk_runs(
    entry: TensorEntry, stored: StoredRange, files: RunReader, buffers: tuple[ByteArray, ByteArray]
) -> Iterator[tuple[int, ByteArray]]:
    """The bytes of a chunk, with the byte of the chunk where each run begins."""
    yield from _ordered_runs(entry, (Contiguous(stored.file, stored.offset),), files, buffers)


def _ordered_runs(
    entry: TensorEntry, side: Locations, files: RunReader, buffers: tuple[ByteArray, ByteArray]
) -> Iterator[tuple[int, ByteArray]]:
    """The bytes of a chunk in its own order, wherever they lie, with the byte where each run begins."""
    rows = entry.chunk_shape[0] if entry.chunk_shape else 1
    yield from read_values(files, Stream(entry.name, entry.dtype, entry.chunk_shape, (0, rows), side, ()), buffers)


def _inside_mask(start: int, count: int, chunk: Sequence[int], inside: Sequence[int]) -> np.ndarray:
    """Which of `count` elements of a chunk from number `start` on are within the first `inside` of every dim."""
    at = np.arange(start, start + count)
    kept = np.ones(count, bool)
    for step, length, extent in zip(strides(chunk), chunk, inside):
        if extent < length:
            kept &= at // step % length < extent
    return kept
