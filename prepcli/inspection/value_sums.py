"""Sums of hashed values: they are equal for a tensor and its transpose, and add up for its slices and parts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from prepcli.engine.files import ByteArray, RunReader
from prepcli.engine.fills import numpy_dtype, round_to_dtype
from prepcli.planning.tensors import ITEM_BITS, itemsize
from prepcli.sources.source import SourceTensor
from prepcli.sources.tensor_rows import read_rows

# Bytes that are read and hashed at once.
PIECE_NBYTES = 4 << 20
# Longer rows are not read: a row is in memory as a whole, with eight times as many bytes of hashes.
MAX_ROW_NBYTES = 64 << 20

Sums = np.ndarray


@dataclass(frozen=True, slots=True)
class ValueSums:
    """Sums of the hashes of a tensor's elements, modulo 2^64.

    Attributes:
        total: Sum over all elements.
        axes: For each dim, the sums over all other dims, by index along the dim.
    """

    total: int
    axes: tuple[Sums, ...]


def can_sum(tensor: SourceTensor) -> bool:
    """Return whether a tensor has elements of whole bytes, and small enough rows."""
    item_bits = ITEM_BITS[tensor.dtype]
    row_nbytes = math.prod(tensor.shape[-1:]) * item_bits // 8
    return item_bits in (8, 16, 32, 64) and tensor.nbytes > 0 and row_nbytes <= MAX_ROW_NBYTES


def sum_values(files: RunReader, tensor: SourceTensor, dtype: str) -> ValueSums:
    """Read a tensor, and return the sums of its hashed values.

    Args:
        files: Reader of its files.
        tensor: The tensor.
        dtype: Dtype of the hashed values. Values of another dtype are cast.
    """
    item_nbytes = itemsize(tensor.dtype)
    row_nbytes = math.prod(tensor.shape[-1:]) * item_nbytes
    lead_shape = tensor.shape[:-1]
    num_rows = math.prod(lead_shape)
    axes = [np.zeros(extent, np.uint64) for extent in tensor.shape]
    step = max(1, PIECE_NBYTES // row_nbytes)
    total = 0
    for start in range(0, num_rows, step):
        stop = min(num_rows, start + step)
        data = read_rows(files, tensor, (start, stop))
        if dtype != tensor.dtype:
            data = _cast_rows(data, tensor.dtype, dtype)
        hashes = _hash_values(data.view(f"<u{itemsize(dtype)}"))
        row_sums = hashes.sum(axis=1, dtype=np.uint64)
        total += int(row_sums.sum(dtype=np.uint64))
        if not axes:
            continue
        axes[-1] += hashes.sum(axis=0, dtype=np.uint64)
        if lead_shape:
            indices = np.unravel_index(np.arange(start, stop), lead_shape)
            for sums, index in zip(axes, indices):
                np.add.at(sums, index, row_sums)
    return ValueSums(total % (1 << 64), tuple(axes))


def _cast_rows(data: ByteArray, dtype: str, to_dtype: str) -> ByteArray:
    """Return rows of bytes with each value cast as a conversion casts it."""
    values = data.view(numpy_dtype(dtype))
    if dtype != "float64":
        values = values.astype(np.float32)
    # A value beyond the range becomes infinite, and equals no finite value.
    with np.errstate(over="ignore"):
        return round_to_dtype(values, numpy_dtype(to_dtype)).view(np.uint8)


def _hash_values(values: np.ndarray) -> Sums:
    """Return a hash of each value. The constants are those of splitmix64 (Steele et al., 2014)."""
    hashes = values.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    hashes ^= hashes >> np.uint64(30)
    hashes *= np.uint64(0xBF58476D1CE4E5B9)
    hashes ^= hashes >> np.uint64(27)
    hashes *= np.uint64(0x94D049BB133111EB)
    hashes ^= hashes >> np.uint64(31)
    return hashes


# Sums that `align_dims` adds up at most. Tensors with one value have many alignments, and the first one is found soon.
MAX_ADDED_SUMS = 1 << 28


@dataclass(frozen=True, slots=True)
class DimAlignment:
    """The common axes of two tensors with equal values.

    Attributes:
        extents: Extent of each axis.
        left: Axes of each dim of the first tensor, outermost first.
        right: The same for the second tensor.
    """

    extents: tuple[int, ...]
    left: tuple[tuple[int, ...], ...]
    right: tuple[tuple[int, ...], ...]


def align_dims(left: Sequence[Sums], right: Sequence[Sums]) -> DimAlignment | None:
    """Find the common axes of two tensors with equal values, from their sums along each dim.

    E.g. the dims [32, 16] of a matrix, and the dims [16, 8, 4] of its transpose with divided rows: the axes are 8, 4
    and 16.

    Args:
        left: Sums along each dim of the first tensor.
        right: Sums along each dim of the second one.

    Returns:
        The axes. None if the sums do not agree.
    """
    segments: list[_Segment] = []
    for dim, sums in enumerate(right):
        segments.append(_Segment(dim, sums))
    return _Alignment([len(sums) for sums in left], len(right)).search(list(left), segments)


@dataclass(frozen=True, slots=True)
class _Segment:
    """Neighbouring axes of a dim of the second tensor.

    Attributes:
        dim: The dim.
        sums: Sums along the merged axes, if they are not known yet.
        axis: The axis. -1 if it is not known yet.
    """

    dim: int
    sums: Sums
    axis: int = -1

    @property
    def length(self) -> int:
        """Number of indices without a known axis."""
        return 1 if self.axis >= 0 else len(self.sums)


class _Alignment:
    """A search for the axes of two tensors: the outermost axis of the first tensor, and its place in the second one."""

    def __init__(self, lengths: Sequence[int], num_right: int) -> None:
        self.num_right = num_right
        self.extents: list[int] = []
        self.left: list[list[int]] = [[] for _ in lengths]
        self.num_added = 0

    def search(self, left: list[Sums], segments: list[_Segment]) -> DimAlignment | None:
        """Return the axes of the remaining parts of all dims."""
        dim = next((dim for dim, sums in enumerate(left) if len(sums) > 1), None)
        if dim is None:
            return self._result(segments)
        sums = left[dim]
        for number, extent, outer in self._places(len(sums), segments):
            self.num_added += len(segments[number].sums) + len(sums)
            if self.num_added > MAX_ADDED_SUMS:
                return None
            axis_sums = segments[number].sums.reshape(outer, extent, -1)
            outer_sums = sums.reshape(extent, -1).sum(axis=1, dtype=np.uint64)
            if not np.array_equal(outer_sums, axis_sums.sum(axis=(0, 2), dtype=np.uint64)):
                continue
            axis = len(self.extents)
            self.extents.append(extent)
            self.left[dim].append(axis)
            inner_sums = sums.reshape(extent, -1).sum(axis=0, dtype=np.uint64)
            alignment = self.search(
                [*left[:dim], inner_sums, *left[dim + 1 :]],
                [
                    *segments[:number],
                    *_split_segment(segments[number], axis_sums, axis),
                    *segments[number + 1 :],
                ],
            )
            if alignment is not None:
                return alignment
            self.extents.pop()
            self.left[dim].pop()
        return None

    def _places(self, length: int, segments: Sequence[_Segment]) -> Iterator[tuple[int, int, int]]:
        """Yield segment, extent and outer extent of each place of an axis. Whole segments come first."""
        for number, segment in enumerate(segments):
            if segment.length == length > 1:
                yield number, length, 1
        for number, segment in enumerate(segments):
            for extent in _divisors(math.gcd(length, segment.length)):
                for outer in reversed(_divisors(segment.length // extent)):
                    if extent > 1:
                        yield number, extent, outer

    def _result(self, segments: Sequence[_Segment]) -> DimAlignment:
        right: list[list[int]] = [[] for _ in range(self.num_right)]
        for segment in segments:
            if segment.axis >= 0:
                right[segment.dim].append(segment.axis)
        return DimAlignment(
            tuple(self.extents), tuple(map(tuple, self.left)), tuple(map(tuple, right))
        )


def _split_segment(segment: _Segment, axis_sums: Sums, axis: int) -> Iterator[_Segment]:
    """Yield the axes before an axis of a segment, the axis, and the axes after it."""
    before = axis_sums.sum(axis=(1, 2), dtype=np.uint64)
    after = axis_sums.sum(axis=(0, 1), dtype=np.uint64)
    if len(before) > 1:
        yield _Segment(segment.dim, before)
    yield _Segment(segment.dim, segment.sums, axis)
    if len(after) > 1:
        yield _Segment(segment.dim, after)


def _divisors(number: int) -> list[int]:
    """Return the divisors of a number, the largest first."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)}, reverse=True)
