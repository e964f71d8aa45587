"""Least, greatest and mean value of a tensor, and how many are special; memory does not depend on its size."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from prepcli.engine.files import Bytes, Reads
from prepcli.engine.fills import numpy_dtype
from prepcli.engine.values import run_buffers, values
from prepcli.formats.orbax_store import Stored
from prepcli.inspection.contents import Entry
from prepcli.planning.boxes import strides
from prepcli.planning.plan import Flat, Side, Stream
from prepcli.planning.tensors import ITEM_BITS, itemsize

RUN_NBYTES = 1 << 20  # widened to float32, and to an index of 8 bytes where a chunk is padded, it stays in a cache


@dataclass(frozen=True, slots=True)
class Stats:
    """`least`, `greatest` and `mean` are of the finite values; None where there are none, or where they have no order
    (complex). `mean` is None too where it is beyond float64."""

    least: float | None
    greatest: float | None
    mean: float | None
    nan: int
    inf: int
    zeros: int


@dataclass(slots=True)
class _Sums:
    least: float | None = None
    greatest: float | None = None
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
            self.least = low if self.least is None else min(self.least, low)
            self.greatest = high if self.greatest is None else max(self.greatest, high)
            self.total += float(found.sum(dtype=np.float64))
            self.finite += found.size


def stats(entry: Entry, files: Reads, read: Callable[[int], object]) -> Stats | None:
    """Read all of an entry, telling `read` of the bytes; None for dtypes below a byte, which stay packed."""
    if ITEM_BITS[entry.dtype] % 8:
        return None
    sums = _Sums()
    with np.errstate(over="ignore", invalid="ignore"):
        for found in _values(entry, files, read, run_buffers(RUN_NBYTES)):
            sums.add(_computable(found))
        mean = sums.total / sums.finite if sums.finite else math.nan
    known_mean = mean if math.isfinite(mean) else None
    return Stats(sums.least, sums.greatest, known_mean, sums.nan, sums.inf, sums.zeros)


def stored_nbytes(entry: Entry) -> int:
    """Bytes that `stats` reads: those of whole chunks."""
    whole = entry.nbytes if entry.side else 0
    return whole + len(entry.chunks) * math.prod(entry.chunk) * itemsize(entry.dtype)


def _computable(found: np.ndarray) -> np.ndarray:
    """The same values in a dtype that NumPy computes in: exact, since all others of them fit float32."""
    return found if found.dtype.kind in "iuc" or found.dtype.itemsize >= 4 else found.astype(np.float32)


def _values(
    entry: Entry, files: Reads, read: Callable[[int], object], buffers: tuple[Bytes, Bytes]
) -> Iterator[np.ndarray]:
    """The values of an entry, chunk by chunk, without what lies beyond its edge."""
    dtype = np.dtype(np.uint8) if entry.dtype == "bool" else numpy_dtype(entry.dtype)
    for _, data in _ordered(entry, entry.side, files, buffers) if entry.side else ():
        read(data.size)
        yield data.view(dtype)
    for index, stored in entry.chunks.items():
        inside = [min(length, extent - i * length) for i, length, extent in zip(index, entry.chunk, entry.shape)]
        for start, data in _runs(entry, stored, files, buffers):
            read(data.size)
            found = data.view(dtype)
            padded = inside != list(entry.chunk)
            yield found[_inside(start // dtype.itemsize, found.size, entry.chunk, inside)] if padded else found


def _runs(entry: Entry, stored: Stored, files: Reads, buffers: tuple[Bytes, Bytes]) -> Iterator[tuple[int, Bytes]]:
    """The bytes of a chunk, with the byte of the chunk where each run begins."""
    yield from _ordered(entry, (Flat(stored.file, stored.offset),), files, buffers)


def _ordered(entry: Entry, side: Side, files: Reads, buffers: tuple[Bytes, Bytes]) -> Iterator[tuple[int, Bytes]]:
    """The bytes of a chunk in its own order, wherever they lie, with the byte where each run begins."""
    rows = entry.chunk[0] if entry.chunk else 1
    yield from values(files, Stream(entry.name, entry.dtype, entry.chunk, (0, rows), side, ()), buffers)


def _inside(start: int, count: int, chunk: Sequence[int], inside: Sequence[int]) -> np.ndarray:
    """Which of `count` elements of a chunk from number `start` on are within the first `inside` of every dim."""
    at = np.arange(start, start + count)
    kept = np.ones(count, bool)
    for step, length, extent in zip(strides(chunk), chunk, inside):
        if extent < length:
            kept &= at // step % length < extent
    return kept
