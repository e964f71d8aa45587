"""Integers of 1 to 8 bits of compressed-tensors, packed into int32 words: the format `pack-quantized`.

weight_packed: int32 [R, ceil(C * bits / 32)], dense bit fields along the columns. weight_scale: [R, G], [R, 1] or [1].
weight_zero_point: int32 [ceil(R * bits / 32), G], bit fields along the rows. weight_g_idx: group g of each column,
else g = c // (C / G). Packed codes u are signed codes plus 2^(bits - 1):

    value[r, c] = ((u[r, c] - 2^(bits - 1)) - z[r, g]) * scale[r, g]

The product is rounded to the dtype of the scales. Source: `unpack_from_int32` and `dequantize` of compressed-tensors
0.20 (compressors/pack_quantized/helpers.py and quantization/lifecycle/forward.py).
"""

from __future__ import annotations

import numpy as np

from prepcli.algebra.boxes import Range
from prepcli.core.errors import GET_AGAIN_HINT, DamagedError
from prepcli.core.json_values import quote_name
from prepcli.planning.arrays import Array
from prepcli.quantized.decoder import (
    VALUE_DTYPES,
    Decoder,
    FloatArray,
    MatrixReader,
    StoredMatrix,
    check_dtype,
    check_shape,
    unpack_bits,
)

WORD_BITS = 32
MAX_BITS = 8


class PackedIntDecoder(Decoder):
    """Packed integers with scales of groups of columns, of rows, or of the tensor."""

    def __init__(
        self,
        name: str,
        packed: Array,
        scale: Array,
        *,
        bits: int,
        columns: int,
        zero_point: Array | None = None,
        column_groups: Array | None = None,
    ) -> None:
        """Check the stored tensors.

        Args:
            name: Name of the decoded tensor.
            packed: Words of codes.
            scale: Scales.
            bits: Bits per code.
            columns: Columns of the decoded tensor.
            zero_point: Words of zero points, or None for symmetric codes.
            column_groups: Group of each column, or None if a group has consecutive columns.

        Raises:
            DamagedError: A shape or a dtype does not fit.
        """
        rows = packed.shape[0] if packed.shape else 0
        stored = [packed, scale]
        check_dtype(packed, ("int32",), name)
        check_shape(packed, [(rows, word_count(columns, bits))], name)
        check_dtype(scale, VALUE_DTYPES, name)
        scale_shape = (1, 1)
        if len(scale.shape) == 2:
            scale_shape = scale.shape
        groups = scale_shape[1]
        is_divided = groups > 0 and columns % groups == 0
        check_shape(scale, [(rows, groups if is_divided else 1), (rows,), (1,), ()], name)
        self._bits = bits
        self._packed = StoredMatrix(packed, rows, packed.shape[1])
        self._scale = StoredMatrix(scale, *scale_shape)
        if scale.shape == (rows,):
            self._scale = StoredMatrix(scale, rows, 1)
        self._zero_point: StoredMatrix | None = None
        if zero_point is not None:
            check_dtype(zero_point, ("int32",), name)
            check_shape(zero_point, [(word_count(rows, bits), groups)], name)
            self._zero_point = StoredMatrix(zero_point, *zero_point.shape)
            stored.append(zero_point)
        self._column_groups: StoredMatrix | None = None
        if column_groups is not None:
            check_dtype(column_groups, ("int32",), name)
            check_shape(column_groups, [(columns,)], name)
            self._column_groups = StoredMatrix(column_groups, 1, columns)
            stored.append(column_groups)
        super().__init__(name, (rows, columns), scale.dtype, stored)

    def _decode(self, rows: Range, read: MatrixReader) -> FloatArray:
        words = read(self._packed, rows)
        values = unpack_bits(words, self._bits, self.columns).astype(np.float32)
        scale_rows = rows if self._scale.rows > 1 else (0, 1)
        scales = read(self._scale, scale_rows).astype(np.float32)
        offsets = np.full_like(scales, 1 << (self._bits - 1))
        if self._zero_point is not None:
            # Codes and zero points are both offset by 2^(bits - 1), so the offsets cancel in their difference.
            offsets = self._read_zero_points(rows, read)
        num_groups = scales.shape[1]
        group_numbers = None
        if self._column_groups is not None:
            group_numbers = read_group_numbers(self._column_groups, num_groups, read)
        if group_numbers is None:
            group_numbers = consecutive_groups(self.columns, self.columns // num_groups)
        scale_groups(values, offsets, scales, group_numbers)
        return values

    def _read_zero_points(self, rows: Range, read: MatrixReader) -> FloatArray:
        """Return the codes of the zero points of some rows, [R, G]."""
        assert self._zero_point is not None
        words, first = bit_field_words(rows, self._bits)
        columns = np.ascontiguousarray(read(self._zero_point, words).T)
        codes = unpack_bits(columns, self._bits, first + rows[1] - rows[0])[:, first:]
        return np.ascontiguousarray(codes.T).astype(np.float32)


def scale_groups(
    values: FloatArray,
    offsets: FloatArray,
    scales: FloatArray,
    group_numbers: np.ndarray,
) -> None:
    """Replace codes by (codes - offset of the group) * scale of the group, in place.

    Args:
        values: Codes [R, C].
        offsets: Offset of each group, [R, G].
        scales: Scale of each group, [R, G].
        group_numbers: Group of each column.
    """
    columns = values.shape[1]
    num_groups = scales.shape[1]
    is_divided = columns % num_groups == 0
    if is_divided and np.array_equal(
        group_numbers, consecutive_groups(columns, columns // num_groups)
    ):
        blocks = values.reshape(len(values), num_groups, -1)
        blocks -= offsets[:, :, None]
        blocks *= scales[:, :, None]
        return
    values -= np.take(offsets, group_numbers, axis=1)
    values *= np.take(scales, group_numbers, axis=1)


def consecutive_groups(columns: int, group_size: int) -> np.ndarray:
    """Return the group of each column. The last group may have fewer columns."""
    return np.arange(columns) // group_size


def read_group_numbers(
    column_groups: StoredMatrix, group_count: int, read: MatrixReader
) -> np.ndarray | None:
    """Return the group of each column, or None if each group has consecutive columns.

    Args:
        column_groups: Stored numbers. Negative ones stand for consecutive columns in each group.
        group_count: Number of groups.
        read: Reads the stored tensors.

    Raises:
        DamagedError: A group does not exist.
    """
    numbers = read(column_groups, (0, 1))[0]
    if (numbers < 0).any():
        return None
    largest = int(numbers.max(initial=0))
    if largest >= group_count:
        raise DamagedError(
            f"{quote_name(column_groups.tensor.name)} refers to group {largest}",
            f"the scales have only {group_count} groups",
            GET_AGAIN_HINT,
        )
    return numbers


def word_count(values: int, bits: int) -> int:
    """Return the number of int32 words of dense bit fields."""
    return -(-values * bits // WORD_BITS)


def bit_field_words(values: Range, bits: int) -> tuple[Range, int]:
    """Return the range of words that contain some values, and the number of values before them in these words.

    The range begins at a multiple of 32 values, where a value begins at the first bit of a word.
    """
    first = values[0] // WORD_BITS * WORD_BITS
    return (first * bits // WORD_BITS, word_count(values[1], bits)), values[0] - first
