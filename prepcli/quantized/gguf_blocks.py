"""Blocks of GGUF: 32 or 256 consecutive values of a row with their scales.

Each block type is a C struct, here a NumPy dtype. The formulas stand above the functions, with h = 0, 1, ... for halves
or quarters of a block and i for a value in them. Source: `dequantize` of gguf 0.19 (quants.py), which is equal bit for
bit, and ggml-common.h and ggml-quants.c of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np

from prepcli.algebra.boxes import Range
from prepcli.planning.arrays import Array
from prepcli.quantized.decoder import (
    CodeArray,
    Decoder,
    FloatArray,
    MatrixReader,
    checked_matrix,
    lookup_nibbles,
    nibble_pairs,
)
from prepcli.quantized.float4 import E2M1, half_powers

HALF = "<f2"
Q4_0 = np.dtype([("d", HALF), ("qs", "u1", 16)])
Q4_1 = np.dtype([("d", HALF), ("m", HALF), ("qs", "u1", 16)])
Q5_0 = np.dtype([("d", HALF), ("qh", "u1", 4), ("qs", "u1", 16)])
Q5_1 = np.dtype([("d", HALF), ("m", HALF), ("qh", "u1", 4), ("qs", "u1", 16)])
Q8_0 = np.dtype([("d", HALF), ("qs", "i1", 32)])
MXFP4 = np.dtype([("e", "u1"), ("qs", "u1", 16)])
Q2_K = np.dtype([("scales", "u1", 16), ("qs", "u1", 64), ("d", HALF), ("dmin", HALF)])
Q3_K = np.dtype([("hmask", "u1", 32), ("qs", "u1", 64), ("scales", "u1", 12), ("d", HALF)])
Q4_K = np.dtype([("d", HALF), ("dmin", HALF), ("scales", "u1", 12), ("qs", "u1", 128)])
Q5_K = np.dtype(
    [("d", HALF), ("dmin", HALF), ("scales", "u1", 12), ("qh", "u1", 32), ("qs", "u1", 128)]
)
Q6_K = np.dtype([("ql", "u1", 128), ("qh", "u1", 64), ("scales", "i1", 16), ("d", HALF)])

# The code of -0 is 0.
_MXFP4_PAIRS = nibble_pairs([2 * value + 0.0 for value in E2M1])


@dataclass(frozen=True, slots=True)
class BlockType:
    """A type of blocks.

    Attributes:
        values: Values per block.
        dtype: Struct of a block.
        decode: Returns the values [N, values] of N blocks.
    """

    values: int
    dtype: np.dtype
    decode: Callable[[np.ndarray], FloatArray]


def _float_column(field: np.ndarray) -> FloatArray:
    """Return a field with one number per block as a column [N, 1] of float32."""
    return field.astype(np.float32)[:, None]


def _low_and_high_nibbles(nibbles: CodeArray) -> CodeArray:
    """Return the codes [N, 2, B] of low nibbles, then high nibbles, of bytes [N, B]."""
    codes = np.empty((len(nibbles), 2, nibbles.shape[1]), np.uint8)
    np.bitwise_and(nibbles, 15, out=codes[:, 0])
    np.right_shift(nibbles, 4, out=codes[:, 1])
    return codes


def _unpack_fields(octets: CodeArray, bits: int) -> CodeArray:
    """Return the bit fields [N, 8 / bits, B] of bytes [N, B], the lowest bits first."""
    count = 8 // bits
    codes = np.empty((len(octets), count, octets.shape[1]), np.uint8)
    for number in range(count):
        np.right_shift(octets, bits * number, out=codes[:, number])
    codes &= (1 << bits) - 1
    return codes


# value[16 h + i] = d * (code - offset) + m, with the code nibble h of qs[i] + 16 * bit (16 h + i) of qh. The types of 4
# bits have no qh. Q4_0 and Q5_0 have an offset and no m.
def _decode_nibbles(blocks: np.ndarray, offset: int = 0) -> FloatArray:
    codes = _low_and_high_nibbles(blocks["qs"]).reshape(-1, 32)
    if "qh" in _field_names(blocks):
        codes |= np.unpackbits(blocks["qh"], axis=1, bitorder="little") * np.uint8(16)
    values = codes.astype(np.float32)
    if offset:
        values -= offset
    values *= _float_column(blocks["d"])
    if "m" in _field_names(blocks):
        values += _float_column(blocks["m"])
    return values


def _field_names(blocks: np.ndarray) -> tuple[str, ...]:
    return blocks.dtype.names or ()


# value[i] = d * qs[i]
def _decode_q8_0(blocks: np.ndarray) -> FloatArray:
    values = blocks["qs"].astype(np.float32)
    values *= _float_column(blocks["d"])
    return values


# value[16 h + i] = 2^(e - 128) * (2 * E2M1[nibble h of qs[i]])
def _decode_mxfp4(blocks: np.ndarray) -> FloatArray:
    pairs = lookup_nibbles(_MXFP4_PAIRS, np.ascontiguousarray(blocks["qs"]))
    # From pairs of a byte to halves of the block: [N, 16, 2] -> [N, 2, 16].
    values = np.ascontiguousarray(pairs.reshape(-1, 16, 2).transpose(0, 2, 1)).reshape(-1, 32)
    values *= half_powers(blocks["e"])[:, None]
    return values


# Groups of 16 values, g = 8 k + 2 h + j for the quarters h of 32 bytes k, with scale and minimum in the nibbles of
# scales[g]:
# value[16 g + i] = d * low(scales[g]) * (bits 2 h and 2 h + 1 of qs[32 k + 16 j + i]) - dmin * high(scales[g])
def _decode_q2_k(blocks: np.ndarray) -> FloatArray:
    scales = _low_and_high_nibbles(blocks["scales"]).astype(np.float32)
    steps = _float_column(blocks["d"]) * scales[:, 0]
    minima = _float_column(blocks["dmin"]) * scales[:, 1]
    codes = _unpack_fields(blocks["qs"].reshape(-1, 32), 2)
    values = codes.reshape(-1, 16, 16).astype(np.float32)
    values *= steps[:, :, None]
    values -= minima[:, :, None]
    return values.reshape(-1, 256)


# Groups as in Q2_K. The 6-bit scale s[g] has its low bits in a nibble of the first 8 bytes and its high bits in the
# last 4 bytes. A bit of hmask that is 0 subtracts 4:
# value[16 g + i] = d * (s[g] - 32) * (bits 2 h and 2 h + 1 of qs[32 k + 16 j + i] - 4 * (1 - bit 4 k + h of
# hmask[16 j + i]))
def _decode_q3_k(blocks: np.ndarray) -> FloatArray:
    packed = blocks["scales"]
    low = _low_and_high_nibbles(packed[:, :8]).reshape(-1, 16)
    high = _unpack_fields(packed[:, 8:], 2).reshape(-1, 16)
    scales = (low | high << 4).astype(np.float32) - 32
    steps = _float_column(blocks["d"]) * scales
    codes = _unpack_fields(blocks["qs"].reshape(-1, 32), 2).reshape(-1, 256)
    high_codes = _unpack_fields(blocks["hmask"], 1).reshape(-1, 256)
    values = (codes + 4 * high_codes).reshape(-1, 16, 16).astype(np.float32)
    values -= 4
    values *= steps[:, :, None]
    return values.reshape(-1, 256)


def _scales_and_minima(packed: CodeArray) -> tuple[FloatArray, FloatArray]:
    """Return the 6-bit scales and minima [N, 8] of Q4_K and Q5_K.

    The first four of each are the low bits of bytes 0 to 3 and 4 to 7. The last four have their low bits in the nibbles
    of bytes 8 to 11, and their high bits in the high bits of the first ones.
    """
    first_scales = packed[:, :4]
    first_minima = packed[:, 4:8]
    low = packed[:, 8:]
    last_scales = low & 15 | first_scales >> 2 & 0x30
    last_minima = low >> 4 | first_minima >> 2 & 0x30
    scales = np.concatenate([first_scales & 63, last_scales], axis=1)
    minima = np.concatenate([first_minima & 63, last_minima], axis=1)
    return scales.astype(np.float32), minima.astype(np.float32)


# Groups of 32 values, g = 2 k + h for the halves h of 32 bytes k, with scale s[g] and minimum m[g]. Q4_K has no qh:
# value[32 g + i] = d * s[g] * (nibble h of qs[32 k + i] + 16 * bit g of qh[i]) - dmin * m[g]
def _decode_q4_k_or_q5_k(blocks: np.ndarray) -> FloatArray:
    scales, minima = _scales_and_minima(blocks["scales"])
    codes = _low_and_high_nibbles(blocks["qs"].reshape(-1, 32)).reshape(-1, 8, 32)
    if "qh" in _field_names(blocks):
        codes |= _unpack_fields(blocks["qh"], 1) << 4
    values = codes.astype(np.float32)
    values *= (_float_column(blocks["d"]) * scales)[:, :, None]
    values -= (_float_column(blocks["dmin"]) * minima)[:, :, None]
    return values.reshape(-1, 256)


# Groups of 16 values, with the scale scales[g]. 128 values k have 64 bytes of ql and 32 bytes of qh:
# value[128 k + 32 q + i] = d * scales[g] * (nibble q // 2 of ql[64 k + 32 (q % 2) + i]
#                                            + 16 * (bits 2 q and 2 q + 1 of qh[32 k + i]) - 32)
def _decode_q6_k(blocks: np.ndarray) -> FloatArray:
    codes = _low_and_high_nibbles(blocks["ql"].reshape(-1, 64)).reshape(-1, 256)
    codes |= _unpack_fields(blocks["qh"].reshape(-1, 32), 2).reshape(-1, 256) << 4
    values = codes.reshape(-1, 16, 16).astype(np.float32)
    values -= 32
    values *= (_float_column(blocks["d"]) * blocks["scales"])[:, :, None]
    return values.reshape(-1, 256)


# Types without blocks, with the dtype of their values.
FLOAT_TYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def _decode_floats(values: np.ndarray) -> FloatArray:
    return values.astype(np.float32)[:, None]


def _decode_bf16(halves: np.ndarray) -> FloatArray:
    return np.left_shift(halves, 16, dtype=np.uint32).view(np.float32)[:, None]


BLOCK_TYPES: Mapping[str, BlockType] = {
    "F32": BlockType(1, np.dtype("<f4"), _decode_floats),
    "F16": BlockType(1, np.dtype("<f2"), _decode_floats),
    "BF16": BlockType(1, np.dtype("<u2"), _decode_bf16),
    "Q4_0": BlockType(32, Q4_0, partial(_decode_nibbles, offset=8)),
    "Q4_1": BlockType(32, Q4_1, _decode_nibbles),
    "Q5_0": BlockType(32, Q5_0, partial(_decode_nibbles, offset=16)),
    "Q5_1": BlockType(32, Q5_1, _decode_nibbles),
    "Q8_0": BlockType(32, Q8_0, _decode_q8_0),
    "MXFP4": BlockType(32, MXFP4, _decode_mxfp4),
    "Q2_K": BlockType(256, Q2_K, _decode_q2_k),
    "Q3_K": BlockType(256, Q3_K, _decode_q3_k),
    "Q4_K": BlockType(256, Q4_K, _decode_q4_k_or_q5_k),
    "Q5_K": BlockType(256, Q5_K, _decode_q4_k_or_q5_k),
    "Q6_K": BlockType(256, Q6_K, _decode_q6_k),
}


class GgufDecoder(Decoder):
    """Rows of blocks, with the changes that llama.cpp makes to some tensors undone.

    - Some tensors are transposed: the stored rows are the columns of the decoded tensor, as in GPT-2.
    - The rows of queries and keys of LLaMA are interleaved. Stored rows 2 i and 2 i + 1 of a head of n rows are the
      decoded rows i and n / 2 + i, which a rotary embedding rotates together.
    - A number is added to some values, e.g. -1 to undo the norms of Gemma.

    Attributes:
        type_name: Type of the blocks, a key of BLOCK_TYPES.
    """

    def __init__(
        self,
        stored: Array,
        type_name: str,
        shape: tuple[int, ...],
        *,
        is_transposed: bool = False,
        interleaved_rows: int = 0,
        offset: float = 0.0,
    ) -> None:
        dtype = FLOAT_TYPES.get(type_name, "float32")
        super().__init__(stored.name, shape, "float32" if offset else dtype, (stored,))
        self.type_name = type_name
        self._type = BLOCK_TYPES[type_name]
        self._is_transposed = is_transposed
        self._interleaved_rows = interleaved_rows
        self._offset = np.float32(offset)
        if is_transposed:
            self.row_multiple = self._type.values
        elif interleaved_rows:
            self.row_multiple = interleaved_rows
        stored_rows, stored_columns = self.rows, self.columns
        if is_transposed:
            stored_rows, stored_columns = stored_columns, stored_rows
        row_nbytes = stored_columns // self._type.values * self._type.dtype.itemsize
        self._blocks = checked_matrix(stored, stored.name, ("uint8",), [(stored_rows, row_nbytes)])

    def _decode(self, rows: Range, read: MatrixReader) -> FloatArray:
        if self._is_transposed:
            values = self._decode_columns(rows, read)
        elif self._interleaved_rows:
            values = self._decode_heads(rows, read)
        else:
            values = self._decode_blocks(read(self._blocks, rows)).reshape(-1, self.columns)
        if self._offset:
            values = values + self._offset
        return values

    def _decode_blocks(self, octets: np.ndarray) -> FloatArray:
        """Return the values of whole blocks."""
        return self._type.decode(octets.reshape(-1).view(self._type.dtype))

    def _decode_heads(self, rows: Range, read: MatrixReader) -> FloatArray:
        """Return rows in the order of the decoded tensor.

        The file interleaves the two halves of each head: rows 0 2 1 3 of a head of 4 rows.
        """
        size = self._interleaved_rows
        first = rows[0] // size * size
        stop = -(-rows[1] // size) * size
        values = self._decode_blocks(read(self._blocks, (first, stop)))
        pairs = values.reshape(-1, size // 2, 2, self.columns)
        heads = pairs.swapaxes(1, 2).reshape(-1, self.columns)
        return heads[rows[0] - first : rows[1] - first]

    def _decode_columns(self, columns: Range, read: MatrixReader) -> FloatArray:
        """Return columns of the stored matrix as rows."""
        size = self._type.values
        nbytes = self._type.dtype.itemsize
        blocks = (columns[0] // size, -(-columns[1] // size))
        stored_rows = (0, self._blocks.rows)
        octets = read(self._blocks, stored_rows, (blocks[0] * nbytes, blocks[1] * nbytes))
        values = self._decode_blocks(octets).reshape(self._blocks.rows, -1)
        start = blocks[0] * size
        return values[:, columns[0] - start : columns[1] - start].T
