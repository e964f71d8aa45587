"""MXFP4 and NVFP4: floats of 4 bits with scales of blocks. A code has a sign, two bits of exponent, one of mantissa.

MXFP4 of gpt-oss has blocks of 32 values with a shared exponent. blocks: uint8 [..., R, G, 16], the low nibble first.
scales: uint8 [..., R, G], exponents of a power of two (E8M0):

    value[..., 32 g + i, r] = E2M1[code[..., r, g, i]] * 2^(scale[..., r, g] - 127)

The decoded tensor [..., C, R] with C = 32 G is transposed, because transformers computes x @ W with experts of shape
[experts, in, out]. Sources: `convert_moe_packed_tensors` of transformers 5.24 (integrations/mxfp4.py), and the OCP
Microscaling Formats specification 1.0, sections 5.3.3 and 6.3.

NVFP4 has groups of 16 values with a scale in fp8, and one scale of the tensor. weight: uint8 [..., R, C / 2], the low
nibble first. scales: float8_e4m3fn [..., R, C / 16]. The scale of the tensor divides the scales in files of
compressed-tensors, and multiplies them in files of ModelOpt, here g or 1 / g:

    value[r, c] = E2M1[code[r, c]] * (scale[r, c // 16] * g)

Products are in float32. Sources: `NVFP4PackedCompressor.decompress` of compressed-tensors 0.20
(compressors/nvfp4/base.py), which rounds to bfloat16, and `NVFP4QTensor.dequantize` of NVIDIA ModelOpt 0.33
(torch/quantization/qtensor/nvfp4_tensor.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from prepcli.algebra.boxes import Range
from prepcli.planning.arrays import Array
from prepcli.quantized.decoder import (
    CodeArray,
    Decoder,
    FloatArray,
    MatrixReader,
    StoredWeights,
    check_dims,
    checked_matrix,
    lookup_nibbles,
    nibble_pairs,
    setting,
)

# E2M1 in the order of its codes.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_PAIRS = nibble_pairs(E2M1)
# The exponent 255 of E8M0 is the power 2^128, which overflows float32. MXFP4 therefore multiplies doubled codes by
# halved powers.
_DOUBLED_PAIRS = nibble_pairs([2 * value for value in E2M1])
EXPONENT_BIAS = 127
MX_BLOCK_VALUES = 32
MX_BLOCK_NBYTES = 16
NV_GROUP_VALUES = 16


class Mxfp4Decoder(Decoder):
    """Blocks of E2M1 codes with E8M0 scales, transposed."""

    # Blocks have 32 values of the input dim, which is the row dim after the transpose.
    row_multiple = MX_BLOCK_VALUES

    def __init__(self, name: str, blocks: Array, scales: Array) -> None:
        check_dims(blocks, 3)
        *leading, rows, groups, _ = blocks.shape
        block_bytes = groups * MX_BLOCK_NBYTES
        shape = (*blocks.shape[:-1], MX_BLOCK_NBYTES)
        self._blocks = checked_matrix(blocks, name, ("uint8",), [shape], block_bytes)
        scale_dtypes = ("uint8", "float8_e8m0fnu")
        self._scales = checked_matrix(scales, name, scale_dtypes, [blocks.shape[:-1]])
        shape = (*leading, groups * MX_BLOCK_VALUES, rows)
        super().__init__(name, shape, "bfloat16", (blocks, scales))

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
        groups = (columns[0] // MX_BLOCK_VALUES, -(-columns[1] // MX_BLOCK_VALUES))
        block_bytes = (groups[0] * MX_BLOCK_NBYTES, groups[1] * MX_BLOCK_NBYTES)
        exponents = read(self._scales, stored_rows, groups).view(np.uint8)
        values = lookup_nibbles(_DOUBLED_PAIRS, read(self._blocks, stored_rows, block_bytes))
        blocks = values.reshape(len(values), -1, MX_BLOCK_VALUES)
        blocks *= half_powers(exponents)[:, :, None]
        start = groups[0] * MX_BLOCK_VALUES
        return values[:, columns[0] - start : columns[1] - start]


def half_powers(exponents: CodeArray) -> FloatArray:
    """Return 2^(e - 127) / 2 for each E8M0 exponent e. The half is finite in float32 for all exponents."""
    return np.ldexp(np.float32(1), exponents.astype(np.int32) - EXPONENT_BIAS - 1)


def find_mxfp4(settings: Mapping[str, Any], stored: StoredWeights) -> Iterator[Decoder]:
    """Yield the decoders of a model of MXFP4."""
    for name, weight_name in [*stored.names_ending("_blocks")]:
        blocks = stored.take(name, weight_name)
        yield Mxfp4Decoder(weight_name, blocks, stored.take(f"{weight_name}_scales", weight_name))


class Nvfp4Decoder(Decoder):
    """E2M1 codes with fp8 scales of groups and a scale of the tensor, a divisor in compressed-tensors."""

    def __init__(
        self, name: str, weight: Array, scales: Array, tensor_scale: Array, *, is_divisor: bool
    ) -> None:
        check_dims(weight, 2)
        *leading, rows, octets = weight.shape
        groups = -(-2 * octets // NV_GROUP_VALUES)
        weight_shape = (*leading, rows, groups * NV_GROUP_VALUES // 2)
        self._weight = checked_matrix(weight, name, ("uint8",), [weight_shape])
        scale_shape = (*leading, rows, groups)
        self._scales = checked_matrix(scales, name, ("float8_e4m3fn",), [scale_shape])
        shapes = [(1,)] if is_divisor else [(1,), ()]
        self._tensor_scale = checked_matrix(tensor_scale, name, ("float32",), shapes)
        dtype = "bfloat16" if is_divisor else "float32"
        shape = (*leading, rows, 2 * octets)
        super().__init__(name, shape, dtype, (weight, scales, tensor_scale))
        self._is_divisor = is_divisor

    def _decode(self, rows: Range, read: MatrixReader) -> FloatArray:
        tensor_scale = read(self._tensor_scale, (0, 1))
        operation = np.divide if self._is_divisor else np.multiply
        scales = read(self._scales, rows).astype(np.float32)
        scales = operation(scales, tensor_scale, dtype=np.float32)
        values = lookup_nibbles(_PAIRS, read(self._weight, rows))
        groups = values.reshape(len(values), -1, NV_GROUP_VALUES)
        groups *= scales[:, :, None]
        return values


def find_modelopt(settings: Mapping[str, Any], stored: StoredWeights) -> Iterator[Decoder]:
    """Yield the decoders of a model of ModelOpt."""
    setting(settings, "quant_algo", ("NVFP4",), "NVFP4")
    setting(settings, "group_size", (NV_GROUP_VALUES,), NV_GROUP_VALUES)
    for name, weight_name in [*stored.names_ending("_scale_2")]:
        tensor_scale = stored.take(name, weight_name)
        weight = stored.take(weight_name, weight_name)
        scales = stored.take(f"{weight_name}_scale", weight_name)
        yield Nvfp4Decoder(weight_name, weight, scales, tensor_scale, is_divisor=False)


def modelopt_file_settings(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings in ModelOpt's `hf_quant_config.json`."""
    section = document.get("quantization")
    return section if isinstance(section, Mapping) else {}
