"""bitsandbytes: NF4 and FP4 with scales of blocks, and LLM.int8() with the largest magnitude of each row.

Codes of 4 bits have one scale per block of the flattened tensor. weight: uint8 [ceil(n / 2), 1], the high nibble first.
The same bytes may be stored in another dtype (`bnb_4bit_quant_storage`), e.g. as bfloat16 [ceil(n / 4), 1] for FSDP.
With blocks of B values, value i of the tensor is

    value[i] = quant_map[code[i]] * absmax[i // B]

absmax is float32, or nested: codes of 8 bits with their own table and scales of blocks of B' codes, and an offset:

    absmax[b] = nested_quant_map[code[b]] * nested_absmax[b // B'] + nested_offset

The product is rounded to the dtype of the original weights. Source: `dequantize_4bit` of bitsandbytes 0.50
(functional.py). The tensor `weight.quant_state.bitsandbytes__nf4` has the other facts as JSON.

LLM.int8() has `SCB`, the magnitude that the code 127 of a row stands for. Source: `int8_vectorwise_dequant` of
bitsandbytes 0.50 (_ops.py), where the product is multiplied by 1/127.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from prepcli.algebra.boxes import Range
from prepcli.core.errors import GET_AGAIN_HINT, DamagedError, PrepError
from prepcli.core.json_values import parse_json, quote_name
from prepcli.engine.blobs import StoredMatrix
from prepcli.planning.arrays import Array, whole_array
from prepcli.planning.tensors import ITEM_BITS
from prepcli.quantized.decoder import (
    USE_ORIGINAL_HINT,
    VALUE_DTYPES,
    Decoder,
    FloatArray,
    MatrixReader,
    StoredWeights,
    check_dims,
    checked_matrix,
    lookup_nibbles,
    nibble_pairs,
)
from prepcli.quantized.scaled import ScaledDecoder

QUANT_TYPES = ("nf4", "fp4")
# Dtypes of the tensor with codes of 4 bits.
STORAGE_DTYPES = ("uint8", "int8", "bfloat16", "float16", "float32", "float64")
MAX_BLOCK_VALUES = 1 << 20
MAX_DIMS = 64
INT8_STEP = np.float32(7.874015718698502e-3)


class Int8Decoder(ScaledDecoder):
    """Codes of LLM.int8() with the largest magnitude of each row."""

    def __init__(self, weight: Array, row_maxima: Array) -> None:
        checked_matrix(weight, weight.name, ("int8",), [weight.shape])
        super().__init__(weight, row_maxima, block=(1, weight.shape[-1]))

    def _decode(self, rows: Range, read: MatrixReader) -> FloatArray:
        return super()._decode(rows, read) * INT8_STEP


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
        count = math.prod(state.shape)
        octets = -(-count // 2)
        blocks = -(-count // state.block_size)
        float32 = ("float32",)
        self._nested = None
        if nested_absmax is not None and nested_quant_map is not None:
            nested_blocks = -(-blocks // max(state.nested_block_size, 1))
            self._nested = (
                checked_matrix(nested_absmax, name, float32, [(nested_blocks,)], 1),
                checked_matrix(nested_quant_map, name, float32, [(256,)]),
            )
        if (state.nested_block_size > 0) != (self._nested is not None):
            raise DamagedError(
                f"the scales of {quote_name(name)} are incomplete",
                "its quant_state and its tensors disagree on nested scales",
                GET_AGAIN_HINT,
            )
        items = -(-octets // max(ITEM_BITS[weight.dtype] // 8, 1))
        checked_matrix(weight, name, STORAGE_DTYPES, [(items, 1), (items,)], 1)
        codes = whole_array(weight.name, "uint8", (weight.nbytes, 1), (weight.file, weight.offset))
        self._weight = StoredMatrix(codes, weight.nbytes, 1)
        absmax_dtypes = ("uint8",) if self._nested else float32
        self._absmax = checked_matrix(absmax, name, absmax_dtypes, [(blocks,)], 1)
        self._quant_map = checked_matrix(quant_map, name, float32, [(16,)])
        stored = [weight, absmax, quant_map]
        if self._nested:
            stored += [matrix.tensor for matrix in self._nested]
        super().__init__(name, state.shape, state.dtype, stored)
        self._state = state
        self._count = count

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


def find_bitsandbytes(settings: Mapping[str, Any], stored: StoredWeights) -> Iterator[Decoder]:
    """Yield the decoders of a model of bitsandbytes."""
    for name, prefix in [*stored.names_ending("SCB")]:
        weight_name = f"{prefix}weight"
        row_maxima = stored.take(name, weight_name)
        weight_format = stored.take_optional(f"{prefix}weight_format")
        # 0 stands for rows. Other layouts are those of kernels of earlier versions.
        if weight_format is not None and any(stored.payload(weight_format)):
            raise PrepError(
                f"the layout of {quote_name(weight_name)} is not supported",
                f"{quote_name(weight_format.name)} is not 0, which stands for rows",
                USE_ORIGINAL_HINT,
            )
        weight = stored.take(weight_name, weight_name)
        check_dims(weight, 2)
        yield Int8Decoder(weight, row_maxima)
    for quant_type in QUANT_TYPES:
        suffix = f".quant_state.bitsandbytes__{quant_type}"
        for name, weight_name in [*stored.names_ending(suffix)]:
            quant_state = stored.take(name, weight_name)
            try:
                state = parse_quant_state(parse_json(stored.payload(quant_state)))
            except ValueError as error:
                what = f"{quote_name(quant_state.name)} is invalid"
                raise DamagedError(what, str(error), GET_AGAIN_HINT) from error
            yield Bits4Decoder(
                weight_name,
                stored.take(weight_name, weight_name),
                stored.take(f"{weight_name}.absmax", weight_name),
                stored.take(f"{weight_name}.quant_map", weight_name),
                state=state,
                nested_absmax=stored.take_optional(f"{weight_name}.nested_absmax"),
                nested_quant_map=stored.take_optional(f"{weight_name}.nested_quant_map"),
            )
