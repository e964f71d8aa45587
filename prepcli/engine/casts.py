"""Operations that change the values of a stream, and the digests and counts of their changes.

A stream may have a low-rank update, a cast and the scale of a layout, in this order. The values arrive in float32, or
in float64 if they are float64. An update is added to them, the cast rounds once to the written dtype, to nearest even,
and the scale follows. NaN stays NaN. Only float dtypes of 16 to 64 bits are changed. A new operation is one class, and
a place in `value_operations`. Fills of new rows are in `engine.fills`.

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
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, cast

import numpy as np

from prepcli.algebra.boxes import Range, split_merged_range
from prepcli.core.errors import GET_AGAIN_HINT, DamagedError
from prepcli.core.formatting import count_text
from prepcli.engine.digest import CastCounts, StreamDigest, TensorDigest, algorithm_of
from prepcli.engine.files import RunReader
from prepcli.engine.fills import numpy_dtype, round_to_dtype
from prepcli.engine.stream_values import allocate_run_buffers, read_values
from prepcli.planning.libraries import LayoutScale
from prepcli.planning.plan import Stream, ValueOperation, encode_text
from prepcli.planning.tensors import CastEntry, itemsize
from prepcli.stores.buffers import ByteArray

# Values per step: the temporary arrays of a step fit a core's cache.
BLOCK_VALUES = 1 << 14
# Bytes of one read of a matrix.
MATRIX_RUN_NBYTES = 256 << 10
FLOAT32_NBYTES = 4
# 2^-149 and 2^-1074, the smallest numbers above 0
SMALLEST_SUBNORMAL = {"f": np.float32(1e-45), "d": np.float64(5e-324)}
# Changes values in C order, given the number of the first one in the tensor.
ApplyChange = Callable[[np.ndarray, int], np.ndarray]


class ValueChange(ValueOperation):
    """An operation on read values."""

    __slots__ = ()
    # Whether readers of the output undo it, so that it does not change the model.
    is_undone: ClassVar[bool] = False

    @property
    def entry_fields(self) -> dict[str, object]:
        """Its fields in the summary of the changes of a plan."""
        return {}

    @abstractmethod
    def open(self, stream: Stream, source: RunReader) -> ApplyChange:
        """Return the function for values of a stream, after reading its own matrices from the source."""

    def undo(self, values: np.ndarray) -> np.ndarray:
        """Return values as a reader of the output gets them. They keep their dtype."""
        return values


def value_operations(
    dtype: str,
    written_dtype: str,
    *,
    update: LowRankUpdate | None = None,
    scale: LayoutScale | None = None,
) -> tuple[ValueOperation, ...]:
    """Return the operations of a stream in their order, or none to keep its values."""
    if dtype == written_dtype and update is None and scale is None:
        return ()
    # The sum of an update, too, is rounded once.
    steps = (update, Cast(written_dtype), scale and Scale(scale))
    return tuple(step for step in steps if step is not None)


@dataclass(frozen=True, slots=True)
class Cast(ValueChange):
    """Rounding to a dtype. It also follows an update and precedes a scale, with the dtype of the stream."""

    dtype: str

    def written_dtype(self, dtype: str) -> str:
        """Return the dtype of the cast."""
        return self.dtype

    def encode(self, stream: Stream) -> dict[str, str]:
        """Return the field of the cast. It is empty for the dtype of the stream."""
        return {"cast": repr("" if self.dtype == stream.dtype else self.dtype)}

    def open(self, stream: Stream, source: RunReader) -> ApplyChange:
        """Return the rounding."""
        dtype = numpy_dtype(self.dtype)
        return lambda values, first: round_to_dtype(values, dtype)


# --- Low-rank updates


@dataclass(frozen=True, slots=True)
class LowRankUpdate(ValueChange):
    """A matrix of low rank to add to the values of a stream: scale * B A, or its transpose.

    Attributes:
        a: Matrix A [rank, in] in the source files.
        b: Matrix B [out, rank] in the source files.
        scale: Factor of the product.
        is_transposed: Whether the stream's tensor is [in, out].
        digests: Recorded digests of A and B, each empty without one. They do not affect the plan's digest.
    """

    a: Stream
    b: Stream
    scale: float
    is_transposed: bool = False
    digests: tuple[str, str] = field(default=("", ""), repr=False)

    def __str__(self) -> str:
        return "plus an adapter"

    @property
    def entry_fields(self) -> dict[str, object]:
        """Its fields in the summary of the changes of a plan."""
        return {"update": "low-rank"}

    def kept_nbytes(self, stream: Stream) -> int:
        """Return the memory for the matrices, and for reading them."""
        count = math.prod(self.a.shape) + math.prod(self.b.shape)
        return FLOAT32_NBYTES * count + 2 * MATRIX_RUN_NBYTES

    def encode(self, stream: Stream) -> dict[str, str]:
        """Return the field of the update."""
        matrices = f"a={encode_text(self.a)}, b={encode_text(self.b)}"
        factors = f"scale={self.scale!r}, is_transposed={self.is_transposed!r}"
        return {"update": f"Update({matrices}, {factors})"}

    def open(self, stream: Stream, source: RunReader) -> ApplyChange:
        """Read the matrices, and return the sum.

        Raises:
            DamagedError: A matrix differs from its recorded digest.
        """
        a = _read_matrix(self.a, source, self.digests[0])
        b = _read_matrix(self.b, source, self.digests[1])
        # W' = W + scale * B A (LoRA, Hu et al. 2021), with A [rank, in] and B [out, rank]. A transposed
        # tensor W [in, out] gets scale * A^T B^T.
        lefts, rights = self.factors(a, b)
        if self.is_transposed:
            lefts, rights = rights.swapaxes(1, 2), lefts.swapaxes(1, 2)
        # A stack of matrices [experts, rows, columns] is one matrix with the rows of all experts.
        shape = (math.prod(stream.shape[:-1]), stream.shape[-1])

        def add_product(values: np.ndarray, first: int) -> np.ndarray:
            total = np.empty_like(values)
            start = 0
            for rows, columns in split_merged_range((first, first + values.size), shape):
                block = _product_block(lefts, rights, self.scale, rows, columns).reshape(-1)
                part = slice(start, start + block.size)
                total[part] = values[part] + block
                start += block.size
            return total

        return add_product

    def factors(self, a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return B as [experts, out, rank], and A as [experts, rank, in]."""
        return b[None], a[None]


@dataclass(frozen=True, slots=True)
class ExpertUpdate(LowRankUpdate):
    """An update of the projections of experts.

    A is [experts * rank, in] with the ranks of an expert next to each other. B is [out, rank * experts] with the
    experts of a rank next to each other (PEFT).

    Attributes:
        num_experts: Number of experts.
        expert: The expert of the stream's tensor. None if the tensor is [experts, out, in] or its transpose.
        outputs: Rows of B for the tensor.
    """

    num_experts: int = 1
    expert: int | None = None
    outputs: Range = (0, 0)

    def encode(self, stream: Stream) -> dict[str, str]:
        """Return the field of the update, with the names in code of its first release."""
        text = repr(self)
        for matrix in (self.a, self.b):
            # The text of a stream ended with four fields of operations then.
            operations = "fill=None, cast_to='', update=None, scale=None"
            text = text.replace(repr(matrix), f"{repr(matrix)[:-1]}, {operations})", 1)
        return {"update": text}

    def factors(self, a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return B as [experts, out, rank], and A as [experts, rank, in]."""
        a = a.reshape(self.num_experts, -1, a.shape[1])
        b = b[slice(*self.outputs)]
        b = b.reshape(len(b), -1, self.num_experts).transpose(2, 0, 1)
        if self.expert is None:
            return b, a
        experts = slice(self.expert, self.expert + 1)
        return b[experts], a[experts]


def _product_block(
    lefts: np.ndarray, rights: np.ndarray, scale: float, rows: Range, columns: Range
) -> np.ndarray:
    """Compute a block of scale * left @ right, of left [experts, rows, rank] and right [experts, rank, columns].

    The product is summed over the rank in order, in float32. It therefore does not depend on the blocks.
    """
    # One outer product per step instead of a matmul, which sums in an order that depends on the
    # block's shape and the library.
    num_rows = lefts.shape[1]
    total = np.zeros((rows[1] - rows[0], columns[1] - columns[0]), np.float32)
    # E.g. rows 6 to 11 of experts with 4 rows each: rows 2 to 4 of expert 1, and rows 0 to 3 of expert 2.
    for expert in range(rows[0] // num_rows, -(-rows[1] // num_rows)):
        start = max(rows[0], expert * num_rows)
        stop = min(rows[1], (expert + 1) * num_rows)
        left = lefts[expert, start - expert * num_rows : stop - expert * num_rows]
        right = rights[expert, :, slice(*columns)]
        part = total[start - rows[0] : stop - rows[0]]
        term = np.empty_like(part)
        for number in range(len(right)):
            np.multiply(left[:, number : number + 1], right[number], out=term)
            part += term
    total *= np.float32(scale)
    return total


def _read_matrix(stream: Stream, source: RunReader, recorded_digest: str) -> np.ndarray:
    """Read a matrix as float32, and compare its bytes with the recorded digest if there is one.

    The matrices are also streams of the plan, but a resumed run does not read finished streams again.
    """
    digest = TensorDigest(algorithm=algorithm_of(recorded_digest))
    dtype = numpy_dtype(stream.dtype)
    matrix = np.empty(stream.nbytes // dtype.itemsize, np.float32)
    for start, data in read_values(source, stream, buffers=allocate_run_buffers(MATRIX_RUN_NBYTES)):
        digest.update(data.data)
        first = start // dtype.itemsize
        matrix[first : first + data.size // dtype.itemsize] = data.view(dtype)
    computed = digest.text()
    if recorded_digest not in ("", computed):
        why = f"its bytes have the digest {computed}, its manifest records {recorded_digest}"
        raise DamagedError(f"{stream.name} of the adapter is damaged", why, GET_AGAIN_HINT)
    return matrix.reshape(stream.shape)


# --- Scales of layouts


@dataclass(frozen=True, slots=True)
class Scale(ValueChange):
    """The scale of a tensor in a layout.

    >>> Scale(LayoutScale(16)).apply(np.array([1, 8], np.float32))
    array([0.25, 2.  ], dtype=float32)
    """

    scale: LayoutScale
    is_undone: ClassVar[bool] = True

    def __str__(self) -> str:
        return self.scale.formula

    @property
    def entry_fields(self) -> dict[str, object]:
        """Its fields in the summary of the changes of a plan."""
        fields: dict[str, object] = {"scale": self.scale.formula}
        if self.scale.number != 1:
            fields["sqrt"] = self.scale.number
        return fields

    def encode(self, stream: Stream) -> dict[str, str]:
        """Return the field of the scale."""
        return {"scale": repr(self.scale).replace("LayoutScale", "RootScale", 1)}

    def open(self, stream: Stream, source: RunReader) -> ApplyChange:
        """Return the scaling."""
        return lambda values, first: self.apply(values)

    def apply(self, values: np.ndarray) -> np.ndarray:
        """Divide values by a power of a square root, and add the offset. They keep their dtype."""
        wide = self._divide(_widen(values), self.scale.power)
        # -0.0 + 0 is 0.0. Without an offset, zeros keep their sign.
        if self.scale.offset:
            wide = wide + wide.dtype.type(self.scale.offset)
        return round_to_dtype(wide, values.dtype)

    def undo(self, values: np.ndarray) -> np.ndarray:
        """Subtract the offset, and multiply values by the root. They keep their dtype.

        If the dtype of the layout is wider, values are rounded to their own dtype, `significant`.
        """
        wide = _widen(values)
        unscaled = self._divide(wide - wide.dtype.type(self.scale.offset), -self.scale.power)
        unscaled = round_to_dtype(unscaled, values.dtype)
        if not self.scale.significant:
            return unscaled
        rounded = round_to_dtype(_widen(unscaled), numpy_dtype(self.scale.significant))
        return rounded.astype(values.dtype)

    def _divide(self, wide: np.ndarray, power: int) -> np.ndarray:
        """Divide values by a power of the root."""
        number = self.scale.number
        exact_root = math.sqrt(number)
        if self.scale.root_dtype:
            root = float(numpy_dtype(self.scale.root_dtype).type(exact_root))
            if power > 0:
                return wide / wide.dtype.type(root**power)
            factor = root**-power
        elif power % 2 == 0:
            factor = float(number) ** (-power // 2)
        elif power > 0:
            factor = 1 / exact_root**power
        else:
            factor = exact_root**-power
        return wide * wide.dtype.type(factor)


def _widen(values: np.ndarray) -> np.ndarray:
    """Return values in float32, or in float64 if they are float64."""
    wide_dtype = np.float64 if values.dtype == np.float64 else np.float32
    return values.astype(wide_dtype, copy=False)


# --- Changes of a stream, and their counts


class ValueTransform:
    """The changes of the values of a stream by its operations, with digests and counts over all slabs.

    Attributes:
        counts: Counts of the changes. With a scale they compare the values read with the values after its way back.
    """

    def __init__(self, stream: Stream, source: RunReader) -> None:
        """Open the operations of a stream.

        Raises:
            DamagedError: A matrix of an update differs from its recorded digest.
        """
        self.counts = CastCounts()
        self._read_dtype = numpy_dtype(stream.dtype)
        self._written_dtype = numpy_dtype(stream.written_dtype)
        self._wide_dtype = np.dtype(np.float64 if stream.dtype == "float64" else np.float32)
        self._changes: list[tuple[ValueChange, ApplyChange]] = []
        for operation in _value_changes(stream):
            self._changes.append((operation, operation.open(stream, source)))
        # float32 has all exponents and all bits of the 16-bit dtypes, so that only NaN needs counting.
        is_wider = stream.written_dtype == "float32" and stream.dtype in ("float16", "bfloat16")
        self._is_exact = is_wider and len(stream.operations) == 1
        self._digest = TensorDigest(algorithm=stream.digest_algorithm)
        self._unscaled_digest = TensorDigest(algorithm=stream.digest_algorithm)
        self._lost = 0
        self._next_value = stream.byte_range[0] // self._read_dtype.itemsize
        # A block has whole rows, if one fits.
        row_values = math.prod(stream.shape[-1:])
        self._block_values = BLOCK_VALUES // row_values * row_values or BLOCK_VALUES

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
        start = 0
        with np.errstate(all="ignore"):
            while start < values.size:
                # E.g. blocks of 16,000 values: after value 15,000 of the tensor, a block has 1,000.
                size = self._block_values - (first + start) % self._block_values
                block = slice(start, start + size)
                # Kept until the next one is allocated: else malloc returns the memory to the system for each block.
                before = values[block].astype(self._wide_dtype, copy=False)
                self._change_block(before, first + start, out=written[block])
                start += size
        self._digest.update(written_bytes.data)
        return written_bytes

    def _change_block(self, before: np.ndarray, first: int, out: np.ndarray) -> None:
        """Change values into `out`, given the number of the first one in the tensor, and count the changes."""
        changed = before
        unscaled: np.ndarray | None = None
        for operation, change in self._changes:
            if operation.is_undone and unscaled is None:
                unscaled = changed
            changed = change(changed, first)
        out[...] = changed
        if unscaled is not None:
            for operation, _ in reversed(self._changes):
                changed = operation.undo(changed)
            self._unscaled_digest.update(unscaled.view(np.uint8).data)
            bits = f"u{self._written_dtype.itemsize}"
            self._lost += int(np.count_nonzero(unscaled.view(bits) != changed.view(bits)))
        if self._is_exact:
            self.counts += CastCounts(before.size, nan=int(np.count_nonzero(np.isnan(before))))
        else:
            self.counts += count_changes(before, changed.astype(self._wide_dtype))

    def digest(self) -> str:
        """Return the digest of all written bytes so far."""
        return self._digest.text()

    def stream_digest(self, read: str) -> StreamDigest:
        """Return the digests of a completed stream. `read` is the digest of the bytes read."""
        is_scaled = any(operation.is_undone for operation, _ in self._changes)
        unscaled = self._unscaled_digest.text() if is_scaled else ""
        return StreamDigest(read, self.digest(), self.counts, unscaled, self._lost)


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
    streams: Sequence[Stream], digests: Mapping[int, StreamDigest] | None = None
) -> list[CastEntry]:
    """Summarize the changes of values of a plan by pair of dtypes and kinds of operations.

    Args:
        streams: The plan's streams.
        digests: Digests of the completed streams, by number.

    Returns:
        One entry per kind, with the numbers of tensors and values. With `digests` also the counts. Entries of updates
        have `update`. Entries of scales have the formula `scale`, and the number `sqrt` under its root.
    """
    groups: dict[tuple[tuple[str, object], ...], list[int]] = {}
    for number, stream in enumerate(streams):
        if stream.is_changed:
            fields: dict[str, object] = {"from": stream.dtype, "to": stream.written_dtype}
            for change in _value_changes(stream):
                fields |= change.entry_fields
            groups.setdefault(tuple(fields.items()), []).append(number)
    entries: list[CastEntry] = []
    for kind, numbers in groups.items():
        fields = dict(kind)
        nbytes = sum(streams[number].nbytes for number in numbers)
        fields["tensors"] = len({streams[number].name for number in numbers})
        fields["values"] = nbytes // itemsize(streams[numbers[0]].dtype)
        if digests:
            parts = [digests[number].counts for number in numbers]
            counts = functools.reduce(CastCounts.__add__, filter(None, parts), CastCounts())
            fields |= dataclasses.asdict(counts) | {"values": fields["values"]}
        # The order of the keys is that in manifests.
        keys = [key for key in CastEntry.__annotations__ if key in fields]
        entries.append(cast(CastEntry, {key: fields[key] for key in keys}))
    return entries


def _value_changes(stream: Stream) -> list[ValueChange]:
    return [operation for operation in stream.operations if isinstance(operation, ValueChange)]


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
