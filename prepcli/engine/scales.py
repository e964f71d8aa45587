"""Scales of a layout: the values of a stream are divided by a square root, and the way back is checked.

The formulas are those of MaxText 0.2.5 (`scale_query_layer` in checkpoint_conversion/utils/param_mapping.py), which
multiplies by `1 / sqrt(n)` in float32, and by `sqrt(n)` on the way back. A product is rounded once. Both are exact if n
is a power of 4.
"""

from __future__ import annotations

import math

import numpy as np
import xxhash

from prepcli.engine.casts import BLOCK_VALUES, StreamDigest, ValueTransform, count_changes
from prepcli.engine.fills import numpy_dtype, round_to_dtype
from prepcli.planning.plan import RootScale


def scale_values(values: np.ndarray, number: int, power: int = 1) -> np.ndarray:
    """Divide values by a power of the square root of a number. They keep their dtype.

    >>> scale_values(np.array([1, 8], np.float32), 16)
    array([0.25, 2.  ], dtype=float32)
    """
    return _multiply(values, _root_power(number, -power))


def unscale_values(values: np.ndarray, scale: RootScale) -> np.ndarray:
    """Undo a scale: multiply values by `sqrt(scale.number)`.

    Values that were stored in a wider dtype are rounded to their dtype before, `scale.significant`.

    Args:
        values: Values of a tensor in the layout with the scale.
        scale: The scale.

    Returns:
        The values before the scale, in the dtype of `values`.
    """
    products = _multiply(values, _root_power(scale.number, scale.power))
    if not scale.significant:
        return products
    rounded = round_to_dtype(_widen(products), numpy_dtype(scale.significant))
    return rounded.astype(values.dtype)


def _root_power(number: int, power: int) -> float:
    """Return a power of the square root of a number."""
    if power % 2 == 0:
        return float(number) ** (power // 2)
    if power < 0:
        return 1 / math.sqrt(number) ** -power
    return math.sqrt(number) ** power


def _multiply(values: np.ndarray, factor: float) -> np.ndarray:
    """Multiply values by a factor in float32, or in float64 for float64 values, and round to their dtype."""
    wide = _widen(values)
    return round_to_dtype(wide * wide.dtype.type(factor), values.dtype)


def _widen(values: np.ndarray) -> np.ndarray:
    """Return values in float32, or in float64 if they are float64."""
    wide_dtype = np.float64 if values.dtype == np.float64 else np.float32
    return values.astype(wide_dtype, copy=False)


class StreamScale(ValueTransform):
    """Cast of a stream of values and their division by a square root.

    `counts` compares the values read with the values after the scale is undone.
    """

    def __init__(self, source: str, target: str, scale: RootScale) -> None:
        super().__init__(source, target)
        self._scale = scale
        self._unscaled_state = xxhash.xxh3_128()
        self._lost = 0

    def stream_digest(self, read: str) -> StreamDigest:
        """Return the digests of a completed stream. `read` is the digest of the bytes that were read."""
        unscaled = self._unscaled_state.hexdigest()
        return StreamDigest(read, self.digest(), self.counts, unscaled, self._lost)

    def _change_values(self, values: np.ndarray, out: np.ndarray) -> None:
        for start in range(0, values.size, BLOCK_VALUES):
            block = slice(start, start + BLOCK_VALUES)
            self._scale_block(values[block], out[block])

    def _scale_block(self, values: np.ndarray, out: np.ndarray) -> None:
        """Scale one block of values into `out`, and count the values that differ after the scale is undone."""
        wide = values.astype(self._wide, copy=False)
        cast = round_to_dtype(wide, self._target)
        self._unscaled_state.update(cast.view(np.uint8).data)
        out[...] = scale_values(cast, self._scale.number, self._scale.power)
        restored = unscale_values(out, self._scale)
        bits = f"u{self._target.itemsize}"
        self._lost += int(np.count_nonzero(cast.view(bits) != restored.view(bits)))
        self.counts += count_changes(wide, restored.astype(self._wide))
