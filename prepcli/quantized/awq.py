"""AWQ in GEMM order: integers of 4 bits, packed along the output dim.

qweight: int32 [in, out / 8]. qzeros: int32 [G, out / 8]. scales: [G, out]. Output 8 j + t has nibble ORDER[t] of word
j. The decoded tensor is [out, in], with the group g = i // (in / G):

    value[o, i] = (w[i, o] - z[g, o]) * scales[g, o]

The product is rounded to the dtype of the scales. Source: `dequantize_gemm` of AutoAWQ 0.2.9
(awq/utils/packing_utils.py).
"""

from __future__ import annotations

import numpy as np

from prepcli.algebra.boxes import Range
from prepcli.planning.arrays import Array
from prepcli.quantized.decoder import (
    VALUE_DTYPES,
    CodeArray,
    Decoder,
    FloatArray,
    MatrixReader,
    StoredMatrix,
    check_dtype,
    check_shape,
    unpack_bits,
)
from prepcli.quantized.packed_ints import consecutive_groups, scale_groups

BITS = 4
VALUES_PER_WORD = 8
ORDER = (0, 4, 1, 5, 2, 6, 3, 7)


class AwqDecoder(Decoder):
    """Integers packed along the output dim, with scales and zero points of groups of inputs."""

    # A word has 8 values along the rows of the decoded tensor, so that 32 rows are whole words.
    row_multiple = 32

    def __init__(self, name: str, weight: Array, zeros: Array, scales: Array) -> None:
        """Check the stored tensors.

        Args:
            name: Name of the decoded tensor.
            weight: Words of codes.
            zeros: Words of zero points.
            scales: Scales.

        Raises:
            DamagedError: A shape or a dtype does not fit.
        """
        check_dtype(weight, ("int32",), name)
        check_dtype(zeros, ("int32",), name)
        check_dtype(scales, VALUE_DTYPES, name)
        inputs, words = (0, 0, *weight.shape)[-2:]
        outputs = words * VALUES_PER_WORD
        check_shape(weight, [(inputs, words)], name)
        groups = scales.shape[0] if scales.shape else 0
        is_divided = groups > 0 and inputs % groups == 0
        check_shape(scales, [(groups if is_divided else 1, outputs)], name)
        check_shape(zeros, [(groups, words)], name)
        super().__init__(name, (outputs, inputs), scales.dtype, (weight, zeros, scales))
        self._weight = StoredMatrix(weight, inputs, words)
        self._zeros = StoredMatrix(zeros, groups, words)
        self._scales = StoredMatrix(scales, groups, outputs)

    def _decode(self, rows: Range, read: MatrixReader) -> FloatArray:
        groups = (0, self._scales.rows)
        words = (rows[0] // VALUES_PER_WORD, -(-rows[1] // VALUES_PER_WORD))
        first = rows[0] - words[0] * VALUES_PER_WORD
        outputs = slice(first, first + rows[1] - rows[0])
        codes = _unpack(read(self._weight, (0, self._weight.rows), words))[:, outputs]
        zeros = _unpack(read(self._zeros, groups, words))[:, outputs].astype(np.float32)
        scales = read(self._scales, groups, rows).astype(np.float32)
        values = np.ascontiguousarray(codes.T).astype(np.float32)
        numbers = consecutive_groups(self.columns, self.columns // groups[1])
        scale_groups(values, zeros.T, scales.T, numbers)
        return values


def _unpack(words: np.ndarray) -> CodeArray:
    """Return the codes of words in the order of outputs."""
    codes = unpack_bits(words, BITS, words.shape[1] * VALUES_PER_WORD)
    return codes.reshape(len(words), -1, VALUES_PER_WORD)[..., ORDER].reshape(len(words), -1)
