"""NVFP4: groups of 16 values of 4 bits with a scale in fp8, and one scale of the tensor.

weight: uint8 [..., R, C / 2], the low nibble first. scales: float8_e4m3fn [..., R, C / 16]. The scale of the tensor
divides the scales in files of compressed-tensors, and multiplies them in files of ModelOpt, here g or 1 / g:

    value[r, c] = E2M1[code[r, c]] * (scale[r, c // 16] * g)

Products are in float32. Sources: `NVFP4PackedCompressor.decompress` of compressed-tensors 0.20
(compressors/nvfp4/base.py), which rounds to bfloat16, and `NVFP4QTensor.dequantize` of NVIDIA ModelOpt 0.33
(torch/quantization/qtensor/nvfp4_tensor.py).
"""

from __future__ import annotations

import math

import numpy as np

from prepcli.algebra.boxes import Range
from prepcli.planning.arrays import Array
from prepcli.quantized.decoder import (
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
from prepcli.quantized.mxfp4 import E2M1

GROUP_VALUES = 16
_PAIRS = nibble_pairs(E2M1)


class Nvfp4Decoder(Decoder):
    """E2M1 codes with fp8 scales of groups and a scale of the tensor."""

    def __init__(
        self,
        name: str,
        weight: Array,
        scales: Array,
        tensor_scale: Array,
        *,
        is_divisor: bool,
    ) -> None:
        """Check the stored tensors.

        Args:
            name: Name of the decoded tensor.
            weight: Codes.
            scales: Scales of the groups.
            tensor_scale: Scale of the tensor.
            is_divisor: Whether the scale of the tensor divides, as in compressed-tensors.

        Raises:
            DamagedError: A shape or a dtype does not fit.
        """
        check_dtype(weight, ("uint8",), name)
        check_dtype(scales, ("float8_e4m3fn",), name)
        check_dtype(tensor_scale, ("float32",), name)
        check_dims(weight, 2)
        *leading, rows, octets = weight.shape
        columns = 2 * octets
        groups = -(-columns // GROUP_VALUES)
        check_shape(weight, [(*leading, rows, groups * GROUP_VALUES // 2)], name)
        check_shape(scales, [(*leading, rows, groups)], name)
        check_shape(tensor_scale, [(1,)] if is_divisor else [(1,), ()], name)
        dtype = "bfloat16" if is_divisor else "float32"
        super().__init__(name, (*leading, rows, columns), dtype, (weight, scales, tensor_scale))
        self._is_divisor = is_divisor
        num_rows = math.prod(leading) * rows
        self._weight = StoredMatrix(weight, num_rows, octets)
        self._scales = StoredMatrix(scales, num_rows, groups)
        self._tensor_scale = StoredMatrix(tensor_scale, 1, 1)

    def _decode(self, rows: Range, read: MatrixReader) -> FloatArray:
        values = lookup_nibbles(_PAIRS, read(self._weight, rows))
        groups = values.reshape(len(values), -1, GROUP_VALUES)
        groups *= self._read_scales(rows, read)[:, :, None]
        return values

    def _read_scales(self, rows: Range, read: MatrixReader) -> FloatArray:
        """Return the groups' scales [R, G], multiplied by the scale of the whole tensor."""
        scales = read(self._scales, rows).astype(np.float32)
        tensor_scale = read(self._tensor_scale, (0, 1))
        operation = np.divide if self._is_divisor else np.multiply
        return operation(scales, tensor_scale, dtype=np.float32)
