"""GPTQ: integers of 2, 3, 4 or 8 bits, packed along the input dim.

qweight: int32 [in * bits / 32, out], dense bit fields along the rows. qzeros: int32 [G, out * bits / 32], bit fields
along the columns. scales: [G, out]. g_idx: group g of each input, else g = i // group_size. The decoded tensor is
[out, in]:

    value[o, i] = scales[g, o] * (w[i, o] - z[g, o])

Files of version 1 store z - 1. The sum (z - 1) + 1 is taken modulo 2^bits, except with 3 bits. The product is rounded
to the dtype of the scales. Source: `QuantLinear` of AutoGPTQ 0.7.1 (auto_gptq/nn_modules/qlinear/qlinear_cuda_old.py).
Version 2 is `checkpoint_format: gptq_v2` of GPTQModel.
"""

from __future__ import annotations

import numpy as np

from prepcli.algebra.boxes import Range
from prepcli.core.errors import PrepError
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
from prepcli.quantized.packed_ints import (
    WORD_BITS,
    bit_field_words,
    consecutive_groups,
    read_group_numbers,
    scale_groups,
    word_count,
)

BITS = (2, 3, 4, 8)


class GptqDecoder(Decoder):
    """Integers packed along the input dim, with scales and zero points of groups of inputs."""

    # Zero points are packed along the rows of the decoded tensor: those of 32 rows are whole words.
    row_multiple = 32

    def __init__(
        self,
        name: str,
        weight: Array,
        zeros: Array,
        scales: Array,
        *,
        bits: int,
        is_zero_stored_minus_1: bool = True,
        input_groups: Array | None = None,
        group_size: int | None = None,
        settings_file: str = "config.json",
    ) -> None:
        """Check the stored tensors.

        Args:
            name: Name of the decoded tensor.
            weight: Words of codes.
            zeros: Words of zero points.
            scales: Scales.
            bits: Bits per code.
            is_zero_stored_minus_1: Whether the file has version 1.
            input_groups: Group of each input, or None if a group has consecutive inputs.
            group_size: Inputs of a group, or None if all groups have the same number of inputs.
            settings_file: Name of the file with the quantisation config, for messages.

        Raises:
            DamagedError: A shape or a dtype does not fit.
            PrepError: The group of an input is unknown.
        """
        check_dtype(weight, ("int32",), name)
        check_dtype(zeros, ("int32",), name)
        check_dtype(scales, VALUE_DTYPES, name)
        words, outputs = (0, 0, *weight.shape)[-2:]
        inputs = words * WORD_BITS // bits
        groups = scales.shape[0] if scales.shape else 0
        check_shape(weight, [(word_count(inputs, bits), outputs)], name)
        check_shape(scales, [(max(groups, 1), outputs)], name)
        check_shape(zeros, [(groups, word_count(outputs, bits))], name)
        stored = [weight, zeros, scales]
        self._input_groups: StoredMatrix | None = None
        if input_groups is not None:
            check_dtype(input_groups, ("int32",), name)
            check_shape(input_groups, [(inputs,)], name)
            self._input_groups = StoredMatrix(input_groups, 1, inputs)
            stored.append(input_groups)
        super().__init__(name, (outputs, inputs), scales.dtype, stored)
        self._bits = bits
        self._is_zero_stored_minus_1 = is_zero_stored_minus_1
        self._weight = StoredMatrix(weight, words, outputs)
        self._zeros = StoredMatrix(zeros, groups, zeros.shape[1])
        self._scales = StoredMatrix(scales, groups, outputs)
        self._group_size = group_size
        self._settings_file = settings_file
        if group_size is None and inputs % groups == 0:
            self._group_size = inputs // groups
        if input_groups is None and self._group_size is None:
            raise self._group_size_error()

    def _decode(self, rows: Range, read: MatrixReader) -> FloatArray:
        groups = (0, self._scales.rows)
        words = np.ascontiguousarray(read(self._weight, (0, self._weight.rows), rows).T)
        values = unpack_bits(words, self._bits, self.columns).astype(np.float32)
        zero_words, first = bit_field_words(rows, self._bits)
        zeros = unpack_bits(
            read(self._zeros, groups, zero_words), self._bits, first + rows[1] - rows[0]
        )
        zeros = zeros[:, first:]
        if self._is_zero_stored_minus_1:
            zeros = zeros + np.uint8(1)
            if self._bits in (2, 4):
                zeros &= (1 << self._bits) - 1
        zeros = zeros.T.astype(np.float32)
        scales = read(self._scales, groups, rows).T.astype(np.float32)
        scale_groups(values, zeros, scales, self._group_numbers(read))
        return values

    def _group_numbers(self, read: MatrixReader) -> np.ndarray:
        """Return the group of each input."""
        if self._input_groups is not None:
            numbers = read_group_numbers(self._input_groups, self._scales.rows, read)
            if numbers is not None:
                return numbers
        if self._group_size is None:
            raise self._group_size_error()
        return consecutive_groups(self.columns, self._group_size)

    def _group_size_error(self) -> PrepError:
        return PrepError(
            f"the groups of {quote_name(self.name)} are unknown",
            f"{self.columns:,} inputs have {self._scales.rows:,} groups of unequal sizes, and the quantisation"
            " config has no group_size",
            f"add group_size to the quantisation settings in {self._settings_file}",
        )
