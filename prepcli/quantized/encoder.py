"""`InvertibleDecoder`: a quantised tensor with codes that follow from its bfloat16 values and its scales.

A code is the inverse of decoding: all codes are decoded with the scale of a block, and each value of the block is
looked up among the results. Two codes with one bfloat16 value, for example because a large scale makes both infinite,
cannot be told apart. Such a tensor is an error, so that an encoded tensor always has its original codes.
"""

from __future__ import annotations

import math
from abc import abstractmethod

import numpy as np
import numpy.typing as npt

from prepcli.algebra.boxes import Range
from prepcli.core.errors import Option, PrepError, text
from prepcli.formats.untrusted import quote_name
from prepcli.quantized.decoder import CodeArray, Decoder, MatrixReader

# Bits of bfloat16 values.
BitArray = npt.NDArray[np.uint16]
CODES = np.arange(256, dtype=np.uint8)
# Marks in a table from bfloat16 bits to codes.
_NO_CODE = -1
_SEVERAL_CODES = -2


class InvertibleDecoder(Decoder):
    """A quantised tensor with an encoder.

    Attributes:
        are_codes_transposed: Whether the rows of the codes are columns of the decoded tensor.
    """

    are_codes_transposed = False

    @property
    def code_rows(self) -> int:
        """Number of rows of the codes."""
        if self.are_codes_transposed:
            return math.prod(self.shape[:-2]) * self.columns
        return self.rows

    @abstractmethod
    def encode(self, rows: Range, values: BitArray, read: MatrixReader) -> CodeArray:
        """Return the codes of decoded rows, in the order of the stored tensor.

        Args:
            rows: Range of rows. If the codes are transposed, they are whole blocks of one matrix.
            values: bfloat16 values of the rows.
            read: Reads the scales.

        Raises:
            PrepError: The values do not determine the codes.
        """


def find_codes(name: str, decoded: BitArray, values: BitArray) -> CodeArray:
    """Return the codes of values with one scale.

    Args:
        name: Name of the weight.
        decoded: Decoded values of the 256 codes.
        values: The values.

    Raises:
        PrepError: Several codes have one of the values, or none has it.
    """
    table = np.full(1 << 16, _NO_CODE, np.int16)
    table[decoded] = CODES
    is_shared = table[decoded] != CODES
    table[decoded[is_shared]] = _SEVERAL_CODES
    codes = table[values]
    least = codes.min(initial=0)
    if least == _SEVERAL_CODES:
        raise not_invertible_error(name, "several of its codes have one value in bfloat16")
    if least == _NO_CODE:
        raise not_invertible_error(name, "no code decodes to one of its values")
    return codes.astype(np.uint8)


def not_invertible_error(name: str, why: str, *, is_written: bool = True) -> PrepError:
    """Return the error for a weight with codes that cannot be computed from its values.

    Args:
        name: Name of the weight.
        why: The reason.
        is_written: Whether a part of the output is written. A command with other options cannot continue it, so the
            hint adds `--restart`.
    """
    hint = text(
        "{} copies them from the original checkpoint, {} writes bfloat16 values",
        Option("quantized_source", "SOURCE"),
        Option("quantized", "dequantize"),
    )
    if is_written:
        hint = text("{}. Add {} to either", hint, Option("restart", True))
    return PrepError(f"the quantised bytes of {quote_name(name)} cannot be computed", why, hint)
