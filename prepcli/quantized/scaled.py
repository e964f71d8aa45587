"""fp8 and int8 weights with one scale per block, row or tensor: fine-grained fp8, compressed-tensors, LLM.int8().

W: codes [..., R, C], S: scales [..., ceil(R / M), ceil(C / N)] of blocks of M x N values, Z: zero points like S.

    value[r, c] = (W[r, c] - Z[r // M, c // N]) * S[r // M, c // N]

Sources: `Fp8Dequantize` of transformers 5.24 (integrations/finegrained_fp8.py) with blocks of 128 x 128,
`dequantize` of compressed-tensors 0.20 (quantization/lifecycle/forward.py), and `int8_vectorwise_dequant` of
bitsandbytes 0.50 (_ops.py), where a row has one scale and the product is multiplied by 1/127.
"""

from __future__ import annotations

import functools
import math

import numpy as np
import numpy.typing as npt

from prepcli.algebra.boxes import Range
from prepcli.core.errors import GET_AGAIN_HINT, DamagedError
from prepcli.core.json_values import quote_name
from prepcli.engine.fills import numpy_dtype
from prepcli.planning.arrays import Array
from prepcli.quantized.decoder import (
    VALUE_DTYPES,
    Decoder,
    FloatArray,
    MatrixReader,
    PairTable,
    StoredMatrix,
    check_dtype,
    check_shape,
    code_pairs,
    lookup,
)

FP8_DTYPES = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
CODE_DTYPES = (*FP8_DTYPES, "int8")
# Bytes with the exponent of a power of two: 2^(byte - 127). 255 is NaN.
EXPONENT_DTYPES = ("uint8", "float8_e8m0fnu")
# bitsandbytes stores the largest magnitude of a row, which the code 127 stands for.
INT8_STEP = np.float32(7.874015718698502e-3)


class ScaledDecoder(Decoder):
    """Codes of 8 bits with a grid of scales."""

    def __init__(
        self,
        weight: Array,
        scale: Array,
        *,
        block: tuple[int, int],
        zero_point: Array | None = None,
        dtype: str = "float32",
    ) -> None:
        """Check the stored tensors.

        Args:
            weight: Codes.
            scale: Scales of the blocks.
            block: Rows and columns of a block. Blocks at the edges may be smaller.
            zero_point: Zero points of the blocks, or None for symmetric codes.
            dtype: Dtype of the decoded values.

        Raises:
            DamagedError: A shape or a dtype does not fit.
        """
        stored = [weight, scale]
        if zero_point is not None:
            stored.append(zero_point)
        super().__init__(weight.name, weight.shape, dtype, stored)
        check_dtype(weight, CODE_DTYPES, weight.name)
        check_dtype(scale, (*VALUE_DTYPES, *EXPONENT_DTYPES), weight.name)
        *leading, rows, columns = weight.shape
        self._block = block
        self._matrix_rows = rows
        shapes = scale_shapes(weight.shape, block)
        grid = shapes[0][-2:]
        self._grid_rows = grid[0]
        check_shape(scale, shapes, weight.name)
        num_grid_rows = math.prod(leading) * grid[0]
        self._weight = StoredMatrix(weight, self.rows, columns)
        self._scale = StoredMatrix(scale, num_grid_rows, grid[1])
        self._zero_point: StoredMatrix | None = None
        if zero_point is not None:
            check_dtype(zero_point, ("int8",), weight.name)
            check_shape(zero_point, shapes, weight.name)
            self._zero_point = StoredMatrix(zero_point, num_grid_rows, grid[1])

    def _decode(self, rows: Range, read: MatrixReader) -> FloatArray:
        codes = read(self._weight, rows)
        if codes.dtype == np.int8:
            values = codes.astype(np.float32)
        else:
            values = lookup(fp8_code_pairs(self._weight.tensor.dtype), codes.view(np.uint8))
        grid_rows = self._grid_rows_of(rows)
        first = int(grid_rows[0])
        grid_range = (first, int(grid_rows[-1]) + 1)
        if self._zero_point is not None:
            zero_points = read(self._zero_point, grid_range).astype(np.float32)
            self._combine_with_blocks(values, zero_points[grid_rows - first], np.subtract)
        scales = read_scales(read(self._scale, grid_range))
        self._combine_with_blocks(values, scales[grid_rows - first], np.multiply)
        return values

    def _grid_rows_of(self, rows: Range) -> npt.NDArray[np.int64]:
        """Return, for each row of the tensor, the row in the grid of scales."""
        # E.g. 3 matrices of 130 rows in blocks of 128 have the grid rows 0 0 ... 1 1, 2 2 ... 3 3, 4 4 ... 5 5.
        matrices, matrix_rows = np.divmod(np.arange(*rows), self._matrix_rows)
        return matrices * self._grid_rows + matrix_rows // self._block[0]

    def _combine_with_blocks(
        self, values: FloatArray, grid: FloatArray, operation: np.ufunc
    ) -> None:
        """Combine the values of each row [R, C] with those of its blocks [R, G], in place."""
        width = self._block[1]
        if self.columns % width == 0:
            blocks = values.reshape(len(values), -1, width)
            operation(blocks, grid[:, :, None], out=blocks)
        else:
            operation(values, np.repeat(grid, width, axis=1)[:, : self.columns], out=values)


class Int8Decoder(ScaledDecoder):
    """Codes of LLM.int8() with the largest magnitude of each row, `SCB`."""

    def __init__(self, weight: Array, row_maxima: Array) -> None:
        check_dtype(weight, ("int8",), weight.name)
        super().__init__(weight, row_maxima, block=(1, weight.shape[-1]))

    def _decode(self, rows: Range, read: MatrixReader) -> FloatArray:
        return super()._decode(rows, read) * INT8_STEP


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
            raise DamagedError(
                f"{quote_name(scale.name)} has shape {[*scale.shape]}",
                f"it does not divide {quote_name(weight.name)} of shape {[*weight.shape]}",
                GET_AGAIN_HINT,
            )
        block.append(size // count)
    return block[0], block[1]


def read_scales(scales: np.ndarray) -> FloatArray:
    """Return scales in float32. Bytes are exponents of powers of two."""
    if scales.dtype == np.uint8:
        scales = scales.view(numpy_dtype("float8_e8m0fnu"))
    return scales.astype(np.float32)


@functools.cache
def fp8_code_pairs(dtype: str) -> PairTable:
    """Return the decoded values of each pair of fp8 codes, for `lookup`."""
    codes = np.arange(256, dtype=np.uint8)
    return code_pairs(codes.view(numpy_dtype(dtype)).astype(np.float32))
