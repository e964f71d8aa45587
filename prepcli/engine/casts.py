"""Changes of the values of a stream while they pass: a low-rank update, a cast and a scale, in this order.

A stream may have any of them. The update is added in float32 (float64 for a float64 tensor), and its sum or the value
read is rounded once to the written dtype, to nearest even. The scale of a layout follows. NaN stays NaN. Only float
dtypes of 16 to 64 bits are changed.

Scales follow MaxText 0.2.5 (the hooks in checkpoint_conversion/utils/param_mapping.py), in float32:

- `scale_query_layer` multiplies by `1 / sqrt(n)`, and by `sqrt(n)` on the way back.
- `pad_hf_embedding_layer` and `pad_and_scale_embedding` multiply by a rounded root, and divide by it on the way back.
- `scale_rmsnorm_layer` adds 1, and subtracts it on the way back.

A product is rounded once. It is exact both ways if n is a power of 4.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from prepcli.algebra.boxes import Range, split_merged_range
from prepcli.core.errors import GET_AGAIN_HINT, DamagedError
from prepcli.core.formatting import count_text
from prepcli.engine.digest import TensorDigest
from prepcli.engine.files import RunReader
from prepcli.engine.fills import numpy_dtype, round_to_dtype
from prepcli.engine.stream_values import allocate_run_buffers, read_values
from prepcli.planning.libraries import LayoutScale
from prepcli.planning.plan import ExpertUpdate, Stream
from prepcli.planning.tensors import CastEntry, itemsize
from prepcli.stores.buffers import ByteArray

# Values per step: the temporary arrays of a step fit a core's cache.
BLOCK_VALUES = 1 << 14
PRODUCT_BLOCK_VALUES = 1 << 15
# Bytes of one read of a matrix.
MATRIX_RUN_NBYTES = 256 << 10
FLOAT32_NBYTES = 4
# Digest of the written bytes and the six counts of a `StreamDigest` as text
NUM_CAST_FIELDS = 7
# 2^-149 and 2^-1074, the smallest numbers above 0
SMALLEST_SUBNORMAL = {"f": np.float32(1e-45), "d": np.float64(5e-324)}


@dataclass(frozen=True, slots=True)
class CastCounts:
    """Counts over changed values.

    Attributes:
        values: Number of values.
        changed: Values with another number after the change.
        overflowed: Finite values with an infinite result, or NaN by an update.
        underflowed: Nonzero values with the result 0.
        nan: Values that are NaN after the change. A cast keeps NaN, an update may add some.
        worst: Largest relative error over finite, nonzero values.
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
        written: Digest of the written bytes. It differs from `read` only after a change of values.
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
        """Return the digests as one word, as notes store them. `parse_stream_digest` parses it."""
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
    unscaled, lost = cast_fields[NUM_CAST_FIELDS:] or ("", "0")
    counts = CastCounts(*map(int, numbers), worst=float.fromhex(worst))
    return StreamDigest(read, written, counts, unscaled, int(lost))


def value_change(stream: Stream, source: RunReader) -> ValueTransform | None:
    """Return the change of a stream's values, or None to keep them.

    Raises:
        DamagedError: A matrix of an update differs from its recorded digest.
    """
    return ValueTransform(stream, source) if stream.is_changed else None


class ValueTransform:
    """The change of the values of a stream, with digests and counts over all slabs.

    Attributes:
        counts: Counts of the changes. With a scale they compare the values read with the values after its way back.
    """

    def __init__(self, stream: Stream, source: RunReader) -> None:
        self.counts = CastCounts()
        self._read_dtype = numpy_dtype(stream.dtype)
        self._written_dtype = numpy_dtype(stream.written_dtype)
        self._wide_dtype = np.dtype(np.float64 if stream.dtype == "float64" else np.float32)
        self._product = LowRankProduct(stream, source) if stream.update else None
        self._scale = stream.scale
        # float32 has all exponents and all bits of the 16-bit dtypes, so that only NaN needs counting.
        is_wider = stream.cast_to == "float32" and stream.dtype in ("float16", "bfloat16")
        self._is_exact = is_wider and not stream.update and not stream.scale
        self._digest = TensorDigest()
        self._unscaled_digest = TensorDigest()
        self._lost = 0
        self._next_value = stream.byte_range[0] // self._read_dtype.itemsize

    def apply(self, data: ByteArray, out: ByteArray) -> ByteArray:
        """Change the stream's next values.

        Args:
            data: Bytes of whole values.
            out: Buffer for the result.

        Returns:
            The part of `out` with the result.
        """
        values = data.view(self._read_dtype)
        written_bytes = out[: values.size * self._written_dtype.itemsize]
        written = written_bytes.view(self._written_dtype)
        first = self._next_value
        self._next_value += values.size
        with np.errstate(all="ignore"):
            if self._product is None:
                for start in range(0, values.size, BLOCK_VALUES):
                    block = slice(start, start + BLOCK_VALUES)
                    wide = values[block].astype(self._wide_dtype, copy=False)
                    self._write_block(wide, wide, written[block])
            else:
                for block, product in self._product.blocks((first, self._next_value)):
                    wide = values[block].astype(self._wide_dtype, copy=False)
                    self._write_block(wide, wide + product, written[block])
        self._digest.update(written_bytes.data)
        return written_bytes

    def _write_block(self, before: np.ndarray, after: np.ndarray, out: np.ndarray) -> None:
        """Cast and scale values into `out`, and count the changes from the values before the update."""
        cast = round_to_dtype(after, self._written_dtype)
        restored = cast
        if self._scale is None:
            out[...] = cast
        else:
            self._unscaled_digest.update(cast.view(np.uint8).data)
            out[...] = scale_values(cast, self._scale)
            restored = unscale_values(out, self._scale)
            bits = f"u{self._written_dtype.itemsize}"
            self._lost += int(np.count_nonzero(cast.view(bits) != restored.view(bits)))
        if self._is_exact:
            self.counts += CastCounts(before.size, nan=int(np.count_nonzero(np.isnan(before))))
        else:
            self.counts += count_changes(before, restored.astype(self._wide_dtype))

    def digest(self) -> str:
        """Return the digest of all written bytes so far."""
        return self._digest.hexdigest()

    def stream_digest(self, read: str) -> StreamDigest:
        """Return the digests of a completed stream. `read` is the digest of the bytes read."""
        unscaled = self._unscaled_digest.hexdigest() if self._scale else ""
        return StreamDigest(read, self.digest(), self.counts, unscaled, self._lost)


class LowRankProduct:
    """The product of the two small matrices of a `LowRankUpdate`, computed by blocks of a stream's tensor.

    The product is summed over the rank in order, in float32. It therefore does not depend on the slabs.
    """

    def __init__(self, stream: Stream, source: RunReader) -> None:
        update = stream.update
        assert update is not None
        a = _read_matrix(update.a, source, update.digests[0])
        b = _read_matrix(update.b, source, update.digests[1])
        # W' = W + scale * B A (LoRA, Hu et al. 2021), with A [rank, in] and B [out, rank]. A transposed
        # tensor W [in, out] gets scale * A^T B^T.
        # One matrix per expert, or one: a: [experts, rank, in], b: [experts, out, rank]
        if isinstance(update, ExpertUpdate):
            a = a.reshape(update.num_experts, -1, a.shape[1])
            b = b[slice(*update.outputs)]
            b = b.reshape(len(b), -1, update.num_experts).transpose(2, 0, 1)
            if update.expert is not None:
                a = a[update.expert : update.expert + 1]
                b = b[update.expert : update.expert + 1]
        else:
            a = a[None]
            b = b[None]
        # left: [experts, rows, rank], right: [experts, rank, columns]
        self._left, self._right = b, a
        if update.is_transposed:
            self._left, self._right = a.swapaxes(1, 2), b.swapaxes(1, 2)
        self._scale = np.float32(update.scale)
        # A stack of matrices [experts, rows, columns] is one matrix with the rows of all experts.
        self._shape = (math.prod(stream.shape[:-1]), stream.shape[-1])

    def blocks(self, value_range: Range) -> Iterator[tuple[slice, np.ndarray]]:
        """Yield the products for a range of values in C order: their positions in the range, and the products."""
        step = max(1, PRODUCT_BLOCK_VALUES // self._shape[1])
        start = 0
        for (first_row, last_row), (first, last) in split_merged_range(value_range, self._shape):
            for row in range(first_row, last_row, step):
                rows = (row, min(row + step, last_row))
                for column in range(first, last, PRODUCT_BLOCK_VALUES):
                    columns = (column, min(column + PRODUCT_BLOCK_VALUES, last))
                    product = self._block(rows, columns).reshape(-1)
                    yield slice(start, start + product.size), product
                    start += product.size

    def _block(self, rows: Range, columns: Range) -> np.ndarray:
        """Compute a block of scale * left @ right."""
        # One outer product per step instead of a matmul, which sums in an order that depends on the
        # block's shape and the library.
        num_rows = self._left.shape[1]
        total = np.zeros((rows[1] - rows[0], columns[1] - columns[0]), np.float32)
        # E.g. rows 6 to 11 of experts with 4 rows each: rows 2 to 4 of expert 1, and rows 0 to 3 of expert 2.
        for expert in range(rows[0] // num_rows, -(-rows[1] // num_rows)):
            start = max(rows[0], expert * num_rows)
            stop = min(rows[1], (expert + 1) * num_rows)
            left = self._left[expert, start - expert * num_rows : stop - expert * num_rows]
            right = self._right[expert, :, slice(*columns)]
            part = total[start - rows[0] : stop - rows[0]]
            term = np.empty_like(part)
            for number in range(len(right)):
                np.multiply(left[:, number : number + 1], right[number], out=term)
                part += term
        total *= self._scale
        return total


def matrix_nbytes(streams: Sequence[Stream]) -> int:
    """Return the memory for the matrices of the largest update, and for reading them, or 0 without updates."""
    max_count = 0
    for stream in streams:
        if update := stream.update:
            max_count = max(max_count, math.prod(update.a.shape) + math.prod(update.b.shape))
    return FLOAT32_NBYTES * max_count + 2 * MATRIX_RUN_NBYTES if max_count else 0


def _read_matrix(stream: Stream, source: RunReader, recorded_digest: str) -> np.ndarray:
    """Read a matrix as float32, and compare its bytes with the recorded digest if there is one.

    The matrices are also streams of the plan, but a resumed run does not read finished streams again.
    """
    digest = TensorDigest()
    dtype = numpy_dtype(stream.dtype)
    matrix = np.empty(stream.nbytes // dtype.itemsize, np.float32)
    for start, data in read_values(source, stream, buffers=allocate_run_buffers(MATRIX_RUN_NBYTES)):
        digest.update(data.data)
        first = start // dtype.itemsize
        matrix[first : first + data.size // dtype.itemsize] = data.view(dtype)
    computed = digest.hexdigest()
    if recorded_digest not in ("", computed):
        why = f"its bytes have the digest {computed}, its manifest records {recorded_digest}"
        raise DamagedError(f"{stream.name} of the adapter is damaged", why, GET_AGAIN_HINT)
    return matrix.reshape(stream.shape)


def scale_values(values: np.ndarray, scale: LayoutScale) -> np.ndarray:
    """Apply a scale: divide values by a power of a square root, and add the offset. They keep their dtype.

    >>> scale_values(np.array([1, 8], np.float32), LayoutScale(16))
    array([0.25, 2.  ], dtype=float32)
    """
    wide = _divide(_widen(values), scale, scale.power)
    # -0.0 + 0 is 0.0. Without an offset, zeros keep their sign.
    if scale.offset:
        wide = wide + wide.dtype.type(scale.offset)
    return round_to_dtype(wide, values.dtype)


def unscale_values(values: np.ndarray, scale: LayoutScale) -> np.ndarray:
    """Undo a scale: subtract the offset, and multiply values by the root. They keep their dtype.

    If the dtype of the layout is wider, values are rounded to their own dtype, `scale.significant`.
    """
    wide = _widen(values)
    unscaled = _divide(wide - wide.dtype.type(scale.offset), scale, -scale.power)
    unscaled = round_to_dtype(unscaled, values.dtype)
    if not scale.significant:
        return unscaled
    rounded = round_to_dtype(_widen(unscaled), numpy_dtype(scale.significant))
    return rounded.astype(values.dtype)


def _divide(wide: np.ndarray, scale: LayoutScale, power: int) -> np.ndarray:
    """Divide values by a power of the root of a scale."""
    exact_root = math.sqrt(scale.number)
    if scale.root_dtype:
        root = float(numpy_dtype(scale.root_dtype).type(exact_root))
        if power > 0:
            return wide / wide.dtype.type(root**power)
        factor = root**-power
    elif power % 2 == 0:
        factor = float(scale.number) ** (-power // 2)
    elif power > 0:
        factor = 1 / exact_root**power
    else:
        factor = exact_root**-power
    return wide * wide.dtype.type(factor)


def _widen(values: np.ndarray) -> np.ndarray:
    """Return values in float32, or in float64 if they are float64."""
    wide_dtype = np.float64 if values.dtype == np.float64 else np.float32
    return values.astype(wide_dtype, copy=False)


def max_finite(dtype: str) -> float:
    """Return the largest finite value of a dtype. Values more than half a spacing above it become infinite."""
    import ml_dtypes

    return float(ml_dtypes.finfo(numpy_dtype(dtype)).max)


def count_changes(before: np.ndarray, after: np.ndarray) -> CastCounts:
    """Count the changes between values before and after, both in the dtype of `before`, which represents them."""
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
    """Summarize the changes of values of a plan by pair of dtypes, update and scale.

    Args:
        streams: The plan's streams.
        digests: Text of each completed stream's `StreamDigest`, by stream number.

    Returns:
        One entry per kind, with the numbers of tensors and values. With `digests` also the counts. Entries of updates
        have `update`. Entries of scales have the formula `scale`, and the number `sqrt` under its root.
    """
    groups: dict[tuple[str, str, bool, LayoutScale | None], list[int]] = {}
    for number, stream in enumerate(streams):
        if stream.is_changed:
            scale = stream.scale and dataclasses.replace(stream.scale, significant="")
            kind = (stream.dtype, stream.written_dtype, bool(stream.update), scale)
            groups.setdefault(kind, []).append(number)
    entries: list[CastEntry] = []
    for (source, target, is_update, scale), numbers in groups.items():
        entry: CastEntry = {"from": source, "to": target, "tensors": 0, "values": 0}
        if is_update:
            # The order of the keys is that in manifests.
            entry = {"from": source, "to": target, "update": "low-rank", "tensors": 0, "values": 0}
        entry["tensors"] = len({streams[number].name for number in numbers})
        nbytes = sum(streams[number].nbytes for number in numbers)
        entry["values"] = nbytes // itemsize(source)
        if scale:
            entry["scale"] = scale.formula
            if scale.number != 1:
                entry["sqrt"] = scale.number
        if digests:
            parsed = [parse_stream_digest(digests[number]).counts for number in numbers]
            counts = functools.reduce(CastCounts.__add__, filter(None, parsed), CastCounts())
            entry["changed"] = counts.changed
            entry["overflowed"] = counts.overflowed
            entry["underflowed"] = counts.underflowed
            entry["nan"] = counts.nan
            entry["worst"] = counts.worst
        entries.append(entry)
    return entries


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
