"""Encoders of quantised formats: a decoder loses nothing if the codes can be computed from its bfloat16 values."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from prepcli.engine.fills import numpy_dtype
from prepcli.quantized.decoder import CodeArray, FloatArray
from prepcli.quantized.mxfp4 import BLOCK_VALUES, E2M1, EXPONENT_BIAS


def encode_scaled(
    values: FloatArray, scales: npt.NDArray[np.float32], *, block: tuple[int, int], dtype: str
) -> CodeArray:
    """Return the codes of decoded values [R, C] with one scale per block of rows and columns."""
    rows, columns = values.shape
    spread = np.repeat(np.repeat(scales, block[0], axis=0), block[1], axis=1)[:rows, :columns]
    with np.errstate(all="ignore"):
        quotients = values / spread
        if dtype == "int8":
            return np.rint(quotients).astype(np.int8).view(np.uint8)
        return quotients.astype(numpy_dtype(dtype)).view(np.uint8)


def encode_mxfp4(values: FloatArray, exponents: CodeArray) -> CodeArray:
    """Return the blocks [R, 16 G] of decoded values [R, 32 G] (not transposed) with exponents [R, G]."""
    groups = values.reshape(len(values), -1, BLOCK_VALUES)
    codes = np.ldexp(groups, EXPONENT_BIAS - exponents.astype(np.int32)[:, :, None])
    magnitudes = np.searchsorted(np.array(E2M1[:8], np.float32), np.abs(codes)).astype(np.uint8)
    nibbles = magnitudes + np.uint8(8) * np.signbit(codes).astype(np.uint8)
    octets = nibbles[..., 0::2] + np.uint8(16) * nibbles[..., 1::2]
    return octets.reshape(len(values), -1)
