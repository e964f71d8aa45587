"""Cast values from one float dtype to another, and count the changes.

Each value is rounded once, to nearest even. NaN stays NaN. Only float dtypes of 16 to 64 bits are cast.
"""

from __future__ import annotations

import dataclasses
import functools
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from prepcli.core.formatting import count_text
from prepcli.engine.fills import numpy_dtype, round_to_dtype
from prepcli.planning.layout_scales import LayoutScale
from prepcli.planning.plan import Stream
from prepcli.planning.tensors import CastEntry, itemsize
from prepcli.stores.buffers import ByteArray

# Values per step: the temporary arrays of a step fit a core's cache.
BLOCK_VALUES = 1 << 14
# Digest of the written bytes and the six counts of a `StreamDigest` as text
NUM_CAST_FIELDS = 7
# 2^-149 and 2^-1074, the smallest numbers above 0
SMALLEST_SUBNORMAL = {"f": np.float32(1e-45), "d": np.float64(5e-324)}


@dataclass(frozen=True, slots=True)
class CastCounts:
    """Counts over cast values.

    Attributes:
        values: Number of values.
        changed: Values with another number after the cast.
        overflowed: Finite values with an infinite result, or NaN by an update.
        underflowed: Nonzero values with the result 0.
        nan: Values that are NaN after the cast. A cast keeps NaN, an update may add some.
        worst: Largest relative error over finite, nonzero cast values.
    """

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
    """The digests of a completed stream.

    Attributes:
        read: Digest of the bytes read.
        written: Digest of the written bytes. It differs from `read` only after a cast, a low-rank update or a scale.
        counts: Counts of the changed values, or None if no value can change.
        unscaled: Digest of the values before a scale, or empty without one.
        lost: Number of values changed by a scale and its way back.
    """

    read: str
    written: str
    counts: CastCounts | None = None
    unscaled: str = ""
    lost: int = 0

    @property
    def recorded(self) -> str:
        """Digest of the tensor for the manifest. It does not depend on the scale of a layout."""
        return self.unscaled or self.written

    def __str__(self) -> str:
        """Return the digests as one word, as journals store them. `parse_stream_digest` parses it."""
        if self.counts is None:
            return self.read
        # The hexadecimal form of a float is exact, so that a resumed run reports the same error.
        *numbers, worst = dataclasses.astuple(self.counts)
        words = [self.read, self.written, *map(str, numbers), float(worst).hex()]
        if self.unscaled:
            words += [self.unscaled, str(self.lost)]
        return ":".join(words)


def parse_stream_digest(text: str) -> StreamDigest:
    """Parse the text of a `StreamDigest`. Without a cast it is a single digest."""
    read, *cast_fields = text.split(":")
    if not cast_fields:
        return StreamDigest(read, read)
    written, *numbers, worst = cast_fields[:NUM_CAST_FIELDS]
    unscaled = ""
    lost = 0
    if len(cast_fields) > NUM_CAST_FIELDS:
        unscaled = cast_fields[NUM_CAST_FIELDS]
        lost = int(cast_fields[NUM_CAST_FIELDS + 1])
    values, changed, overflowed, underflowed, nan = map(int, numbers)
    counts = CastCounts(
        values=values,
        changed=changed,
        overflowed=overflowed,
        underflowed=underflowed,
        nan=nan,
        worst=float.fromhex(worst),
    )
    return StreamDigest(read, written, counts, unscaled, lost)


class ValueTransform(ABC):
    """A change of all values of a stream, such as a cast.

    Attributes:
        counts: Number of values, and how many of them changed, overflowed or became 0.
    """

    def __init__(self, source: str, target: str) -> None:
        self._source = numpy_dtype(source)
        self._target = numpy_dtype(target)
        self._wide = np.dtype(np.float64 if source == "float64" else np.float32)
        self._state = xxhash.xxh3_128()
        self.counts = CastCounts()

    def apply(self, data: ByteArray, out: ByteArray) -> ByteArray:
        """Change the stream's next values.

        Args:
            data: Bytes of whole values.
            out: Buffer for the result.

        Returns:
            The part of `out` with the result.
        """
        values = data.view(self._source)
        cast_bytes = out[: values.size * self._target.itemsize]
        cast_values = cast_bytes.view(self._target)
        with np.errstate(all="ignore"):
            self._change_values(values, cast_values)
        self._state.update(cast_bytes.data)
        return cast_bytes

    def digest(self) -> str:
        """Return the digest of all changed bytes so far."""
        return self._state.hexdigest()

    def stream_digest(self, read: str) -> StreamDigest:
        """Return the digests of a completed stream. `read` is the digest of the bytes read."""
        return StreamDigest(read, self.digest(), self.counts)

    @abstractmethod
    def _change_values(self, values: np.ndarray, out: np.ndarray) -> None:
        """Write the changed values to `out`, and count the changes."""


class StreamCast(ValueTransform):
    """Casts the values of a stream (rows of one tensor) to another dtype."""

    def __init__(self, source: str, target: str) -> None:
        super().__init__(source, target)
        # float32 has all exponents and all bits of the 16-bit dtypes, so that only NaN needs counting.
        self._is_exact = target == "float32" and source in ("float16", "bfloat16")

    def _change_values(self, values: np.ndarray, out: np.ndarray) -> None:
        for start in range(0, values.size, BLOCK_VALUES):
            block = slice(start, start + BLOCK_VALUES)
            self.counts += self._cast_block(values[block], out[block])

    def _cast_block(self, values: np.ndarray, out: np.ndarray) -> CastCounts:
        """Cast one block of values into `out`, and count the changes."""
        wide = values.astype(self._wide, copy=False)
        out[...] = round_to_dtype(wide, self._target)
        if self._is_exact:
            return CastCounts(values.size, nan=int(np.count_nonzero(np.isnan(wide))))
        return count_changes(wide, out.astype(self._wide))


def max_finite(dtype: str) -> float:
    """Return the largest finite value of a dtype. Values more than half a spacing above it become infinite."""
    import ml_dtypes

    return float(ml_dtypes.finfo(numpy_dtype(dtype)).max)


def count_changes(before: np.ndarray, after: np.ndarray) -> CastCounts:
    """Count the changes between values before and after a cast or an update.

    Args:
        before: The original values.
        after: The changed values, in the dtype of `before`, which represents them exactly.

    Returns:
        The counts.
    """
    nan = int(np.count_nonzero(np.isnan(after)))
    # NaN differs from itself, and NaN before stays NaN.
    changed = int(np.count_nonzero(before != after)) - int(np.count_nonzero(np.isnan(before)))
    if not changed:
        return CastCounts(before.size, nan=nan)
    is_finite = np.isfinite(before)
    overflowed = int(np.count_nonzero(is_finite & ~np.isfinite(after)))
    underflowed = int(np.count_nonzero((after == 0) & (before != 0)))
    values = before.size
    if overflowed or underflowed or not is_finite.all():
        is_comparable = np.isfinite(after) & (after != 0)
        before = before[is_comparable]
        after = after[is_comparable]
    # |after - before| / |before|, with the smallest subnormal in place of 0 as the divisor
    magnitudes = np.maximum(np.abs(before), SMALLEST_SUBNORMAL[before.dtype.char])
    errors = np.abs(after - before) / magnitudes
    # A low-rank update may change a 0. The relative change is then undefined, and is taken as 0.
    errors[before == 0] = 0
    # JSON has no infinity: the largest number represents a larger change of a subnormal value.
    worst = min(float(errors.max(initial=0.0)), float(np.finfo(errors.dtype).max))
    return CastCounts(values, changed, overflowed, underflowed, nan, worst)


def report_casts(
    streams: Sequence[Stream], digests: Mapping[int, str] | None = None
) -> list[CastEntry]:
    """Summarize the casts and the updates of a plan by pair of dtypes.

    Args:
        streams: The plan's streams.
        digests: Text of each completed stream's `StreamDigest`, by stream number.

    Returns:
        One entry per pair of dtypes, with the numbers of tensors and values. With `digests` also the cast counts.
        Entries of updates have `update`. Entries of scales have the formula `scale`, and the number `sqrt` under its
        root. Their counts are of the way back.
    """
    groups: dict[tuple[str, str, bool, LayoutScale | None], list[int]] = {}
    for number, stream in enumerate(streams):
        if stream.is_changed:
            scale = stream.scale and dataclasses.replace(stream.scale, significant="")
            kind = (stream.dtype, stream.written_dtype, bool(stream.update), scale)
            groups.setdefault(kind, []).append(number)
    entries: list[CastEntry] = []
    for (source, target, is_update, scale), numbers in groups.items():
        names = {streams[number].name for number in numbers}
        values = sum(streams[number].nbytes for number in numbers) // itemsize(source)
        entry: CastEntry = {"from": source, "to": target, "tensors": len(names), "values": values}
        if is_update:
            entry = {
                "from": source,
                "to": target,
                "update": "low-rank",
                "tensors": len(names),
                "values": values,
            }
        if scale:
            entry["scale"] = scale.formula
            if scale.number != 1:
                entry["sqrt"] = scale.number
        if digests:
            counts = _total_counts(digests, numbers)
            entry["changed"] = counts.changed
            entry["overflowed"] = counts.overflowed
            entry["underflowed"] = counts.underflowed
            entry["nan"] = counts.nan
            entry["worst"] = counts.worst
        entries.append(entry)
    return entries


def _total_counts(digests: Mapping[int, str], numbers: Sequence[int]) -> CastCounts:
    """Return the sum of the counts of some streams."""
    counts = (parse_stream_digest(digests[number]).counts or CastCounts() for number in numbers)
    return functools.reduce(CastCounts.__add__, counts, CastCounts())


def format_cast(entry: CastEntry) -> str:
    """Return an entry of `report_casts` as a line of text."""
    counts = (
        f"{entry.get('changed', 0):,} changed, {entry.get('overflowed', 0):,} overflowed,"
        f" {entry.get('underflowed', 0):,} became 0, {entry.get('nan', 0):,} are nan"
    )
    dtypes = f"{entry['from']} -> {entry['to']}"
    measure = "error"
    if "scale" in entry:
        dtypes = f"{dtypes} {entry['scale']} and back"
    if "update" in entry:
        dtypes = f"adapter added to {entry['to']}"
        measure = "change"
    head = f"{dtypes}: {count_text(entry['tensors'], 'tensor')}, {count_text(entry['values'], 'value')}"
    return f"{head}: {counts}; largest relative {measure} {entry.get('worst', 0.0):.3g}"
