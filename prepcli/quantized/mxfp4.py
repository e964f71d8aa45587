"""MXFP4 of gpt-oss: blocks of 32 values of 4 bits with a shared exponent.

blocks: uint8 [..., R, G, 16], the low nibble first. scales: uint8 [..., R, G]. Each code has a sign, two bits of
exponent and one of mantissa (E2M1), and each scale is the exponent of a power of two (E8M0):

    value[..., 32 g + i, r] = E2M1[code[..., r, g, i]] * 2^(scale[..., r, g] - 127)

The decoded tensor [..., C, R] with C = 32 G is transposed, because transformers computes x @ W with experts of shape
[experts, in, out]. Sources: `convert_moe_packed_tensors` of transformers 5.24 (integrations/mxfp4.py), and the OCP
Microscaling Formats specification 1.0, sections 5.3.3 and 6.3.
"""

from __future__ import annotations

import math

import numpy as np

from prepcli.algebra.boxes import Range
from prepcli.planning.arrays import Array
from prepcli.quantized.decoder import (
    CodeArray,
    Decoder,
    FloatArray,
    MatrixReader,
    StoredMatrix,
    check_dims,
    check_dtype,
    check_shape,
    lookup_nibbles,
    nibble_pairs,
)

BLOCK_VALUES = 32
BLOCK_NBYTES = 16
# E2M1 in the order of its codes.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
EXPONENT_BIAS = 127
# The exponent 255 is the power 2^128, which overflows float32. The decoder therefore multiplies doubled codes by halved
# powers.
_PAIRS = nibble_pairs([2 * value for value in E2M1])


class Mxfp4Decoder(Decoder):
    """Blocks of E2M1 codes with E8M0 scales, transposed."""

    # Blocks have 32 values of the input dim, which is the row dim after the transpose.
    row_multiple = 32

    def __init__(self, name: str, blocks: Array, scales: Array) -> None:
        """Check the stored tensors.

        Args:
            name: Name of the decoded tensor.
            blocks: Codes.
            scales: Exponents.

        Raises:
            DamagedError: A shape or a dtype does not fit.
        """
        check_dtype(blocks, ("uint8",), name)
        check_dtype(scales, ("uint8", "float8_e8m0fnu"), name)
        check_dims(blocks, 3)
        check_shape(blocks, [(*blocks.shape[:-1], BLOCK_NBYTES)], name)
        check_shape(scales, [blocks.shape[:-1]], name)
        *leading, rows, groups, _ = blocks.shape
        super().__init__(
            name, (*leading, groups * BLOCK_VALUES, rows), "bfloat16", (blocks, scales)
        )
        stored_rows = math.prod(leading) * rows
        self._blocks = StoredMatrix(blocks, stored_rows, groups * BLOCK_NBYTES)
        self._scales = StoredMatrix(scales, stored_rows, groups)

    def _decode(self, rows: Range, read: MatrixReader) -> FloatArray:
        values = np.empty((rows[1] - rows[0], self.columns), np.float32)
        row = rows[0]
        while row < rows[1]:
            # All leading dims are merged to rows here. Each pass decodes the rows of one matrix.
            matrix, first = divmod(row, self.shape[-2])
            stop = min(self.shape[-2], first + rows[1] - row)
            target = values[row - rows[0] : row - rows[0] + stop - first]
            target[...] = self._decode_columns(matrix, (first, stop), read).T
            row += stop - first
        return values

    def _decode_columns(self, matrix: int, columns: Range, read: MatrixReader) -> FloatArray:
        """Return columns of a stored matrix [R, C]."""
        stored_rows = (matrix * self.columns, (matrix + 1) * self.columns)
        groups = (columns[0] // BLOCK_VALUES, -(-columns[1] // BLOCK_VALUES))
        block_bytes = (groups[0] * BLOCK_NBYTES, groups[1] * BLOCK_NBYTES)
        exponents = read(self._scales, stored_rows, groups).view(np.uint8)
        values = _decode_blocks(read(self._blocks, stored_rows, block_bytes), exponents)
        start = groups[0] * BLOCK_VALUES
        return values[:, columns[0] - start : columns[1] - start]


def _decode_blocks(octets: CodeArray, exponents: CodeArray) -> FloatArray:
    """Return the values [R, 32 G] of blocks [R, 16 G] with exponents [R, G]."""
    values = lookup_nibbles(_PAIRS, octets)
    blocks = values.reshape(len(values), -1, BLOCK_VALUES)
    blocks *= half_powers(exponents)[:, :, None]
    return values


def half_powers(exponents: CodeArray) -> FloatArray:
    """Return 2^(e - 127) / 2 for each E8M0 exponent e. The half is finite in float32 for all exponents."""
    return np.ldexp(np.float32(1), exponents.astype(np.int32) - EXPONENT_BIAS - 1)
