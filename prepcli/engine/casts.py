"""Values from one floating dtype into another, each rounded once, to the nearest or in a tie to the even, and counted.

What is not a floating number of 16 to 64 bits is never cast. NaN stays NaN.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from prepcli.engine.files import ByteArray
from prepcli.engine.fills import numpy_dtype, round_to_dtype
from prepcli.planning.plan import Stream
from prepcli.planning.tensors import itemsize

BLOCK_VALUES = 1 << 14  # values at a time: all that is made of them on the way stays in a core's cache
SMALLEST_SUBNORMAL = {"f": np.float32(1e-45), "d": np.float64(5e-324)}


@dataclass(frozen=True, slots=True)
class CastCounts:
    """Of values that were cast: how many there are, are another number, became infinite or 0 though they were not, and
    are no number; and the largest relative error of those that are still finite and not 0."""

    values: int = 0
    changed: int = 0
    overflowed: int = 0
    underflowed: int = 0
    nan: int = 0
    worst: float = 0.0

    def __add__(self, other: CastCounts) -> CastCounts:
        return CastCounts(
            self.values + other.values,
            self.changed + other.changed,
            self.overflowed + other.overflowed,
            self.underflowed + other.underflowed,
            self.nan + other.nan,
            max(self.worst, other.worst),
        )


@dataclass(frozen=True, slots=True)
class StreamDigest:
    """What is known of a stream once it is whole: the digest of the bytes that were read, and where they were cast that
    of what was written, and counts."""

    read: str
    written: str
    counts: CastCounts | None = None

    def __str__(self) -> str:
        """As one word, as a journal keeps it; `moved` reads it."""
        if self.counts is None:
            return self.read
        *numbers, worst = dataclasses.astuple(self.counts)
        return ":".join([self.read, self.written, *map(str, numbers), float(worst).hex()])


def parse_stream_digest(text: str) -> StreamDigest:
    """What `str(Moved)` made; a digest alone of what was not cast."""
    read, *rest = text.split(":")
    if not rest:
        return StreamDigest(read, read)
    written, *numbers, worst = rest
    return StreamDigest(read, written, CastCounts(*map(int, numbers), worst=float.fromhex(worst)))


class StreamCast:
    """A tensor on its way into another dtype: counts, and the digest of what comes out."""

    def __init__(self, source: str, target: str) -> None:
        self._source, self._target = numpy_dtype(source), numpy_dtype(target)
        self._wide = np.dtype(np.float64 if source == "float64" else np.float32)
        self._is_exact = target == "float32" and source in ("float16", "bfloat16")
        self._state = xxhash.xxh3_128()
        self.counts = CastCounts()

    def cast(self, data: ByteArray, out: ByteArray) -> ByteArray:
        """Cast whole values, which go on those before them, into the first bytes of `out`; returns these."""
        values = data.view(self._source)
        made = out[: values.size * self._target.itemsize]
        cast = made.view(self._target)
        with np.errstate(all="ignore"):
            for low in range(0, values.size, BLOCK_VALUES):
                self.counts += self._block(values[low : low + BLOCK_VALUES], cast[low : low + BLOCK_VALUES])
        self._state.update(made.data)
        return made

    def digest(self) -> str:
        """That of all bytes that came out so far."""
        return self._state.hexdigest()

    def _block(self, values: np.ndarray, out: np.ndarray) -> CastCounts:
        wide = values.astype(self._wide, copy=False)
        out[...] = round_to_dtype(wide, self._target)
        if self._is_exact:
            return CastCounts(values.size, nan=int(np.count_nonzero(np.isnan(wide))))
        return count_changes(wide, out.astype(self._wide))


def max_finite(dtype: str) -> float:
    """The largest number that a dtype has; beyond half a step from there values become infinite."""
    import ml_dtypes

    return float(ml_dtypes.finfo(numpy_dtype(dtype)).max)


def count_changes(before: np.ndarray, after: np.ndarray) -> CastCounts:
    """What became of values, both in one dtype that holds them exactly."""
    nan = int(np.count_nonzero(np.isnan(before)))
    changed = int(np.count_nonzero(before != after)) - nan
    if not changed:
        return CastCounts(before.size, nan=nan)
    overflowed = int(np.count_nonzero(np.isinf(after))) - int(np.count_nonzero(np.isinf(before)))
    underflowed = int(np.count_nonzero(after == 0)) - int(np.count_nonzero(before == 0))
    values = before.size
    if nan or overflowed or underflowed or not np.isfinite(before).all():
        kept = np.isfinite(after) & (after != 0)
        before, after = before[kept], after[kept]
    errors = np.abs(after - before) / np.maximum(np.abs(before), SMALLEST_SUBNORMAL[before.dtype.char])
    worst = float(errors.max(initial=0.0))
    return CastCounts(values, changed, overflowed, underflowed, nan, worst)


def report_casts(streams: Sequence[Stream], digests: Mapping[int, str] | None = None) -> list[dict[str, Any]]:
    """What is cast from which dtype into which, tensors and values, and their counts where `seen` has the streams."""
    groups: dict[tuple[str, str], list[int]] = {}
    for number, stream in enumerate(streams):
        if stream.cast_to:
            groups.setdefault((stream.dtype, stream.cast_to), []).append(number)
    found = []
    for (source, target), numbers in groups.items():
        names = {streams[number].name for number in numbers}
        values = sum(streams[number].nbytes for number in numbers) // itemsize(source)
        counts = dataclasses.asdict(_total_counts(digests, numbers)) if digests else {}
        found.append({"from": source, "to": target, "tensors": len(names), **counts, "values": values})
    return found


def _total_counts(digests: Mapping[int, str], numbers: Sequence[int]) -> CastCounts:
    each = (parse_stream_digest(digests[number]).counts or CastCounts() for number in numbers)
    return functools.reduce(CastCounts.__add__, each, CastCounts())


def format_cast(entry: Mapping[str, Any]) -> str:
    """An entry of a report, for people."""
    kinds = ("changed", "changed"), ("overflowed", "overflowed"), ("underflowed", "became 0"), ("nan", "are nan")
    counts = ", ".join(f"{entry[key]:,} {text}" for key, text in kinds)
    head = f"{entry['from']} -> {entry['to']}: {entry['tensors']} tensors, {entry['values']:,} values"
    return f"{head}: {counts}; largest relative error {entry['worst']:.3g}"
