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

from prepcli.engine.files import Bytes
from prepcli.engine.fills import numpy_dtype, rounded
from prepcli.planning.plan import Stream
from prepcli.planning.tensors import itemsize

BLOCK = 1 << 14  # values at a time: all that is made of them on the way stays in a core's cache
LEAST = {"f": np.float32(1e-45), "d": np.float64(5e-324)}


@dataclass(frozen=True, slots=True)
class Counts:
    """Of values that were cast: how many there are, are another number, became infinite or 0 though they were not, and
    are no number; and the largest relative error of those that are still finite and not 0."""

    values: int = 0
    changed: int = 0
    overflowed: int = 0
    underflowed: int = 0
    nan: int = 0
    worst: float = 0.0

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            self.values + other.values,
            self.changed + other.changed,
            self.overflowed + other.overflowed,
            self.underflowed + other.underflowed,
            self.nan + other.nan,
            max(self.worst, other.worst),
        )


@dataclass(frozen=True, slots=True)
class Moved:
    """What is known of a stream once it is whole: the digest of the bytes that were read, and where they were cast that
    of what was written, and counts."""

    read: str
    written: str
    counts: Counts | None = None

    def __str__(self) -> str:
        """As one word, as a journal keeps it; `moved` reads it."""
        if self.counts is None:
            return self.read
        *numbers, worst = dataclasses.astuple(self.counts)
        return ":".join([self.read, self.written, *map(str, numbers), float(worst).hex()])


def moved(text: str) -> Moved:
    """What `str(Moved)` made; a digest alone of what was not cast."""
    read, *rest = text.split(":")
    if not rest:
        return Moved(read, read)
    written, *numbers, worst = rest
    return Moved(read, written, Counts(*map(int, numbers), worst=float.fromhex(worst)))


class Cast:
    """A tensor on its way into another dtype: counts, and the digest of what comes out."""

    def __init__(self, source: str, target: str) -> None:
        self._source, self._target = numpy_dtype(source), numpy_dtype(target)
        self._wide = np.dtype(np.float64 if source == "float64" else np.float32)
        self._is_exact = target == "float32" and source in ("float16", "bfloat16")
        self._state = xxhash.xxh3_128()
        self.counts = Counts()

    def run(self, data: Bytes, out: Bytes) -> Bytes:
        """Cast whole values, which go on those before them, into the first bytes of `out`; returns these."""
        values = data.view(self._source)
        made = out[: values.size * self._target.itemsize]
        cast = made.view(self._target)
        with np.errstate(all="ignore"):
            for low in range(0, values.size, BLOCK):
                self.counts += self._block(values[low : low + BLOCK], cast[low : low + BLOCK])
        self._state.update(made.data)
        return made

    def digest(self) -> str:
        """That of all bytes that came out so far."""
        return self._state.hexdigest()

    def _block(self, values: np.ndarray, out: np.ndarray) -> Counts:
        wide = values.astype(self._wide, copy=False)
        out[...] = rounded(wide, self._target)
        if self._is_exact:
            return Counts(values.size, nan=int(np.count_nonzero(np.isnan(wide))))
        return counted(wide, out.astype(self._wide))


def largest(dtype: str) -> float:
    """The largest number that a dtype has; beyond half a step from there values become infinite."""
    import ml_dtypes

    return float(ml_dtypes.finfo(numpy_dtype(dtype)).max)


def counted(before: np.ndarray, after: np.ndarray) -> Counts:
    """What became of values, both in one dtype that holds them exactly."""
    nan = int(np.count_nonzero(np.isnan(before)))
    changed = int(np.count_nonzero(before != after)) - nan
    if not changed:
        return Counts(before.size, nan=nan)
    overflowed = int(np.count_nonzero(np.isinf(after))) - int(np.count_nonzero(np.isinf(before)))
    underflowed = int(np.count_nonzero(after == 0)) - int(np.count_nonzero(before == 0))
    values = before.size
    if nan or overflowed or underflowed or not np.isfinite(before).all():
        kept = np.isfinite(after) & (after != 0)
        before, after = before[kept], after[kept]
    errors = np.abs(after - before) / np.maximum(np.abs(before), LEAST[before.dtype.char])
    worst = float(errors.max(initial=0.0))
    return Counts(values, changed, overflowed, underflowed, nan, worst)


def report(streams: Sequence[Stream], seen: Mapping[int, str] | None = None) -> list[dict[str, Any]]:
    """What is cast from which dtype into which, tensors and values, and their counts where `seen` has the streams."""
    groups: dict[tuple[str, str], list[int]] = {}
    for number, stream in enumerate(streams):
        if stream.cast:
            groups.setdefault((stream.dtype, stream.cast), []).append(number)
    found = []
    for (source, target), numbers in groups.items():
        names = {streams[number].name for number in numbers}
        values = sum(streams[number].nbytes for number in numbers) // itemsize(source)
        counts = dataclasses.asdict(_sum(seen, numbers)) if seen else {}
        found.append({"from": source, "to": target, "tensors": len(names), **counts, "values": values})
    return found


def _sum(seen: Mapping[int, str], numbers: Sequence[int]) -> Counts:
    each = (moved(seen[number]).counts or Counts() for number in numbers)
    return functools.reduce(Counts.__add__, each, Counts())


def line(entry: Mapping[str, Any]) -> str:
    """An entry of a report, for people."""
    kinds = ("changed", "changed"), ("overflowed", "overflowed"), ("underflowed", "became 0"), ("nan", "are nan")
    counts = ", ".join(f"{entry[key]:,} {text}" for key, text in kinds)
    head = f"{entry['from']} -> {entry['to']}: {entry['tensors']} tensors, {entry['values']:,} values"
    return f"{head}: {counts}; largest relative error {entry['worst']:.3g}"
