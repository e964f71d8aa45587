"""Scales of a layout: the values of a stream are multiplied by a root or get a sum, and the way back is checked.

The formulas are those of MaxText 0.2.5 (the hooks in checkpoint_conversion/utils/param_mapping.py), in float32:

- `scale_query_layer` multiplies by `1 / sqrt(n)`, and by `sqrt(n)` on the way back.
- `pad_hf_embedding_layer` and `pad_and_scale_embedding` multiply by a rounded root, and divide by it on the way back.
- `scale_rmsnorm_layer` adds 1, and subtracts it on the way back.

A product is rounded once. It is exact both ways if n is a power of 4.
"""

from __future__ import annotations

import math

import numpy as np
import xxhash

from prepcli.engine.casts import BLOCK_VALUES, StreamDigest, ValueTransform, count_changes
from prepcli.engine.fills import numpy_dtype, round_to_dtype
from prepcli.planning.libraries import LayoutScale


def scale_values(values: np.ndarray, scale: LayoutScale) -> np.ndarray:
    """Apply a scale: divide values by a power of a square root, and add the offset. They keep their dtype.

    >>> scale_values(np.array([1, 8], np.float32), LayoutScale(16))
    array([0.25, 2.  ], dtype=float32)
    """
    wide = _divide(_widen(values), scale, scale.power)
    # -0.0 + 0 is 0.0. Without an offset, zeros keep their sign.
    if scale.offset:
        wide = wide + wide.dtype.type(scale.offset)
    return round_to_dtype(wide, values.dtype)


def unscale_values(values: np.ndarray, scale: LayoutScale) -> np.ndarray:
    """Undo a scale: subtract the offset, and multiply values by the root.

    If the dtype of the layout is wider, values are rounded to their own dtype, `scale.significant`.

    Args:
        values: Values of a tensor in the layout with the scale.
        scale: The scale.

    Returns:
        The values before the scale, in the dtype of `values`.
    """
    wide = _widen(values)
    unscaled = _divide(wide - wide.dtype.type(scale.offset), scale, -scale.power)
    unscaled = round_to_dtype(unscaled, values.dtype)
    if not scale.significant:
        return unscaled
    rounded = round_to_dtype(_widen(unscaled), numpy_dtype(scale.significant))
    return rounded.astype(values.dtype)


def _divide(wide: np.ndarray, scale: LayoutScale, power: int) -> np.ndarray:
    """Divide values by a power of the root of a scale."""
    if scale.root_dtype and power > 0:
        return wide / wide.dtype.type(_root(scale) ** power)
    return wide * wide.dtype.type(_root_power(scale, -power))


def _root_power(scale: LayoutScale, power: int) -> float:
    """Return a power of the root of a scale."""
    if scale.root_dtype:
        return _root(scale) ** power
    if power % 2 == 0:
        return float(scale.number) ** (power // 2)
    if power < 0:
        return 1 / math.sqrt(scale.number) ** -power
    return math.sqrt(scale.number) ** power


def _root(scale: LayoutScale) -> float:
    """Return the root of a scale, rounded to its dtype."""
    return float(numpy_dtype(scale.root_dtype).type(math.sqrt(scale.number)))


def _widen(values: np.ndarray) -> np.ndarray:
    """Return values in float32, or in float64 if they are float64."""
    wide_dtype = np.float64 if values.dtype == np.float64 else np.float32
    return values.astype(wide_dtype, copy=False)


class StreamScale(ValueTransform):
    """Cast of a stream of values and their scale in a layout.

    `counts` compares the values read with the values after the scale is undone.
    """

    def __init__(self, source: str, target: str, scale: LayoutScale) -> None:
        super().__init__(source, target)
        self._scale = scale
        self._unscaled_state = xxhash.xxh3_128()
        self._lost = 0

    def stream_digest(self, read: str) -> StreamDigest:
        """Return the digests of a completed stream. `read` is the digest of the bytes read."""
        unscaled = self._unscaled_state.hexdigest()
        return StreamDigest(read, self.digest(), self.counts, unscaled, self._lost)

    def _change_values(self, values: np.ndarray, out: np.ndarray) -> None:
        for start in range(0, values.size, BLOCK_VALUES):
            block = slice(start, start + BLOCK_VALUES)
            self._scale_block(values[block], out[block])

    def _scale_block(self, values: np.ndarray, out: np.ndarray) -> None:
        """Scale one block of values into `out`, and count differences after the scale is undone."""
        wide = values.astype(self._wide, copy=False)
        cast = round_to_dtype(wide, self._target)
        self._unscaled_state.update(cast.view(np.uint8).data)
        out[...] = scale_values(cast, self._scale)
        restored = unscale_values(out, self._scale)
        bits = f"u{self._target.itemsize}"
        self._lost += int(np.count_nonzero(cast.view(bits) != restored.view(bits)))
        self.counts += count_changes(wide, restored.astype(self._wide))
