"""NF4 and FP4 of bitsandbytes: codes of 4 bits with one scale per block of the flattened tensor.

weight: uint8 [ceil(n / 2), 1], the high nibble first. With blocks of B values, value i of the tensor is

    value[i] = quant_map[code[i]] * absmax[i // B]

absmax is float32, or nested: codes of 8 bits with their own table and scales of blocks of B' codes, and an offset:

    absmax[b] = nested_quant_map[code[b]] * nested_absmax[b // B'] + nested_offset

The product is rounded to the dtype of the original weights. Source: `dequantize_4bit` of bitsandbytes 0.50
(functional.py). The tensor `weight.quant_state.bitsandbytes__nf4` has the other facts as JSON.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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
    lookup_nibbles,
    nibble_pairs,
)

QUANT_TYPES = ("nf4", "fp4")
MAX_BLOCK_VALUES = 1 << 20
MAX_DIMS = 64


@dataclass(frozen=True, slots=True)
class QuantState:
    """Settings of a 4-bit weight. With double quantization, its scales are quantised too (nested scales).

    Attributes:
        shape: Shape of the decoded tensor.
        dtype: Dtype of the original weights.
        block_size: Number of values that share a scale.
        nested_block_size: Number of quantised scales that share a scale of their own.
        nested_offset: Number to add to each decoded scale.
    """

    shape: tuple[int, ...]
    dtype: str
    block_size: int
    nested_block_size: int
    nested_offset: float


def parse_quant_state(document: object) -> QuantState:
    """Check the JSON of a `quant_state` tensor.

    Raises:
        ValueError: A value is missing or invalid.
    """
    if not isinstance(document, Mapping):
        raise ValueError("it is not a JSON object")
    quant_type = document.get("quant_type")
    if quant_type not in QUANT_TYPES:
        raise ValueError(f"quant_type={quant_type!r:.40} is not {' or '.join(QUANT_TYPES)}")
    dtype = document.get("dtype")
    if dtype not in VALUE_DTYPES:
        raise ValueError(f"dtype={dtype!r:.40} is not {', '.join(VALUE_DTYPES)}")
    shape = document.get("shape")
    if not isinstance(shape, list) or not 0 < len(shape) <= MAX_DIMS:
        raise ValueError("it has no shape")
    dims = tuple(_checked_count(size, "shape", 1 << 40) for size in shape)
    nested_block_size = 0
    nested_offset = 0.0
    if "nested_blocksize" in document:
        nested_block_size = _checked_count(
            document["nested_blocksize"], "nested_blocksize", MAX_BLOCK_VALUES
        )
        offset = document.get("nested_offset")
        if not isinstance(offset, float | int) or not math.isfinite(offset):
            raise ValueError("nested_offset is not a number")
        nested_offset = float(offset)
    block_size = _checked_count(document.get("blocksize"), "blocksize", MAX_BLOCK_VALUES)
    return QuantState(dims, dtype, block_size, nested_block_size, nested_offset)


def _checked_count(value: Any, name: str, most: int) -> int:
    if type(value) is not int or not 1 <= value <= most:
        raise ValueError(f"{name}={value!r:.40} is not a number from 1 to {most:,}")
    return value


class Bits4Decoder(Decoder):
    """Codes of 4 bits with the scales of blocks."""

    def __init__(
        self,
        name: str,
        weight: Array,
        absmax: Array,
        quant_map: Array,
        *,
        state: QuantState,
        nested_absmax: Array | None = None,
        nested_quant_map: Array | None = None,
    ) -> None:
        """Check the stored tensors.

        Args:
            name: Name of the decoded tensor.
            weight: Codes.
            absmax: Scales, or their codes.
            quant_map: Values of the 16 codes.
            state: Facts of the JSON.
            nested_absmax: Scales of the codes of `absmax`.
            nested_quant_map: Values of the 256 codes of `absmax`.

        Raises:
            DamagedError: A shape or a dtype does not fit.
        """
        count = math.prod(state.shape)
        blocks = -(-count // state.block_size)
        check_dtype(weight, ("uint8",), name)
        check_shape(weight, [(-(-count // 2), 1), (-(-count // 2),)], name)
        check_shape(absmax, [(blocks,)], name)
        check_dtype(quant_map, ("float32",), name)
        check_shape(quant_map, [(16,)], name)
        stored = [weight, absmax, quant_map]
        self._nested: tuple[StoredMatrix, StoredMatrix] | None = None
        if nested_absmax is not None and nested_quant_map is not None:
            check_dtype(absmax, ("uint8",), name)
            check_dtype(nested_absmax, ("float32",), name)
            check_dtype(nested_quant_map, ("float32",), name)
            nested_blocks = -(-blocks // max(state.nested_block_size, 1))
            check_shape(nested_absmax, [(nested_blocks,)], name)
            check_shape(nested_quant_map, [(256,)], name)
            self._nested = (
                StoredMatrix(nested_absmax, nested_blocks, 1),
                StoredMatrix(nested_quant_map, 1, 256),
            )
            stored += [nested_absmax, nested_quant_map]
        else:
            check_dtype(absmax, ("float32",), name)
        if (state.nested_block_size > 0) != (self._nested is not None):
            raise DamagedError(
                f"the scales of {quote_name(name)} are incomplete",
                "its quant_state and its tensors disagree on nested scales",
                GET_AGAIN_HINT,
            )
        super().__init__(name, state.shape, state.dtype, stored)
        self._state = state
        self._count = count
        self._weight = StoredMatrix(weight, -(-count // 2), 1)
        self._absmax = StoredMatrix(absmax, blocks, 1)
        self._quant_map = StoredMatrix(quant_map, 1, 16)

    def _decode(self, rows: Range, read: MatrixReader) -> FloatArray:
        # Blocks run over the ends of rows. All blocks of the rows are decoded.
        size = self._state.block_size
        first = rows[0] * self.columns
        stop = rows[1] * self.columns
        blocks = (first // size, -(-stop // size))
        start = blocks[0] * size
        end = min(blocks[1] * size, self._count)
        # A block of odd size may start at the low nibble of a byte.
        code_bytes = (start // 2, -(-end // 2))
        pairs = nibble_pairs(read(self._quant_map, (0, 1))[0], high_first=True)
        values = lookup_nibbles(pairs, read(self._weight, code_bytes)).reshape(-1)
        values = values[start % 2 :][: end - start]
        scales = np.repeat(self._read_absmax(blocks, read), size)[: end - start]
        values = values * scales
        return values[first - start : stop - start].reshape(-1, self.columns)

    def _read_absmax(self, blocks: Range, read: MatrixReader) -> FloatArray:
        """Return the scales of some blocks."""
        absmax = read(self._absmax, blocks)[:, 0]
        if self._nested is None:
            return absmax
        nested_absmax, nested_quant_map = self._nested
        size = self._state.nested_block_size
        nested_blocks = (blocks[0] // size, -(-blocks[1] // size))
        scales = np.repeat(read(nested_absmax, nested_blocks)[:, 0], size)
        start = blocks[0] - nested_blocks[0] * size
        table = read(nested_quant_map, (0, 1))[0]
        values = table[absmax] * scales[start : start + absmax.size]
        return values + np.float32(self._state.nested_offset)
