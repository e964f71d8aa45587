"""fp8 and int8 weights with one scale per block, row or tensor: fine-grained fp8, compressed-tensors, LLM.int8().

W: codes [..., R, C], S: scales [..., ceil(R / M), ceil(C / N)] of blocks of M x N values, Z: zero points like S.

    value[r, c] = (W[r, c] - Z[r // M, c // N]) * S[r // M, c // N]

Sources: `Fp8Dequantize` of transformers 5.24 (integrations/finegrained_fp8.py) with blocks of 128 x 128, and
`dequantize` of compressed-tensors 0.20 (quantization/lifecycle/forward.py).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from prepcli.algebra.boxes import Range
from prepcli.core.json_values import quote_name
from prepcli.engine.fills import numpy_dtype
from prepcli.planning.arrays import Array
from prepcli.quantized.decoder import (
    VALUE_DTYPES,
    Decoder,
    FloatArray,
    MatrixReader,
    PairTable,
    StoredWeights,
    check_dims,
    checked_matrix,
    code_pairs,
    lookup,
    shape_error,
)

FP8_DTYPES = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
CODE_DTYPES = (*FP8_DTYPES, "int8")
# Bytes with the exponent of a power of two: 2^(byte - 127). 255 is NaN.
EXPONENT_DTYPES = ("uint8", "float8_e8m0fnu")


class ScaledDecoder(Decoder):
    """Codes of 8 bits with a grid of scales, one per `block` of rows and columns. Blocks at edges may be smaller."""

    def __init__(
        self,
        weight: Array,
        scale: Array,
        *,
        block: tuple[int, int],
        zero_point: Array | None = None,
        dtype: str = "float32",
    ) -> None:
        super().__init__(weight.name, weight.shape, dtype, (weight, scale, zero_point))
        self._block = block
        self._matrix_rows = weight.shape[-2]
        shapes = scale_shapes(weight.shape, block)
        self._grid_rows, grid_columns = shapes[0][-2:]
        self._weight = checked_matrix(weight, weight.name, CODE_DTYPES, [weight.shape])
        scale_dtypes = (*VALUE_DTYPES, *EXPONENT_DTYPES)
        self._scale = checked_matrix(scale, weight.name, scale_dtypes, shapes, grid_columns)
        self._zero_point = None
        if zero_point is not None:
            self._zero_point = checked_matrix(
                zero_point, weight.name, ("int8",), shapes, grid_columns
            )

    def _decode(self, rows: Range, read: MatrixReader) -> FloatArray:
        codes = read(self._weight, rows)
        if codes.dtype == np.int8:
            values = codes.astype(np.float32)
        else:
            values = lookup(_fp8_code_pairs(self._weight.tensor.dtype), codes.view(np.uint8))
        # The row in the grid of scales of each row of the tensor. E.g. 3 matrices of 130 rows in blocks of 128 have the
        # grid rows 0 0 ... 1 1, 2 2 ... 3 3, 4 4 ... 5 5.
        matrices, matrix_rows = np.divmod(np.arange(*rows), self._matrix_rows)
        grid_rows = matrices * self._grid_rows + matrix_rows // self._block[0]
        first = int(grid_rows[0])
        grid_range = (first, int(grid_rows[-1]) + 1)
        if self._zero_point is not None:
            zero_points = read(self._zero_point, grid_range).astype(np.float32)
            self._combine_with_blocks(values, zero_points[grid_rows - first], np.subtract)
        scales = read(self._scale, grid_range)
        if scales.dtype == np.uint8:
            scales = scales.view(numpy_dtype("float8_e8m0fnu"))
        scales = scales.astype(np.float32)
        self._combine_with_blocks(values, scales[grid_rows - first], np.multiply)
        return values

    def _combine_with_blocks(
        self, values: FloatArray, grid: FloatArray, operation: np.ufunc
    ) -> None:
        """Combine the values of each row [R, C] with the numbers of its blocks [R, G], in place."""
        width = self._block[1]
        if self.columns % width == 0:
            blocks = values.reshape(len(values), -1, width)
            operation(blocks, grid[:, :, None], out=blocks)
        else:
            operation(values, np.repeat(grid, width, axis=1)[:, : self.columns], out=values)


def scale_shapes(shape: tuple[int, ...], block: tuple[int, int]) -> list[tuple[int, ...]]:
    """Return the shapes of the scales of a weight [..., R, C] in blocks. The first one is the grid [..., G, H]."""
    *leading, rows, columns = shape
    grid = (-(-rows // block[0]), -(-columns // block[1]))
    shapes: list[tuple[int, ...]] = [(*leading, *grid)]
    # A scale of a tensor, or of each row, may come without dims of size 1.
    if grid == (1, 1) and not leading:
        shapes += [(1,), ()]
    elif grid[1] == 1 and not leading:
        shapes.append((grid[0],))
    return shapes


def block_of_grid(weight: Array, scale: Array) -> tuple[int, int]:
    """Return the rows and columns of a block from the shapes of codes and scales.

    Raises:
        DamagedError: The scales do not divide the codes.
    """
    block: list[int] = []
    shape = (1, 1, *scale.shape)[-2:]
    for size, count in zip(weight.shape[-2:], shape):
        if count < 1 or size % count:
            why = f"it does not divide {quote_name(weight.name)} of shape {[*weight.shape]}"
            raise shape_error(scale, why)
        block.append(size // count)
    return block[0], block[1]


def parse_block(value: object) -> tuple[int, int] | None:
    """Return the rows and columns of a block in a config, or None if it is not a pair of numbers."""
    if not isinstance(value, list) or len(value) != 2:
        return None
    rows, columns = value
    for size in value:
        if type(size) is not int or not 1 <= size < 1 << 32:
            return None
    return rows, columns


@functools.cache
def _fp8_code_pairs(dtype: str) -> PairTable:
    """Return the decoded values of each pair of fp8 codes, for `lookup`."""
    codes = np.arange(256, dtype=np.uint8)
    return code_pairs(codes.view(numpy_dtype(dtype)).astype(np.float32))


def find_fp8(settings: Mapping[str, Any], stored: StoredWeights) -> Iterator[Decoder]:
    """Yield the decoders of a model of fine-grained fp8."""
    block_setting = parse_block(settings.get("weight_block_size"))
    for weight in [*stored.tensors_of(FP8_DTYPES)]:
        check_dims(weight, 2)
        stored.take(weight.name, weight.name)
        scale = stored.take(f"{weight.name}_scale_inv", weight.name)
        yield ScaledDecoder(weight, scale, block=block_setting or block_of_grid(weight, scale))
