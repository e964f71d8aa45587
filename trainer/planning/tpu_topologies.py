"""Slices of TPUs by number of chips, as data from their vendor.

A slice of v5e or v6e is a rectangle of at most one pod. A slice of v4 or v5p is a box A x B x C with A <= B <= C; of
several boxes with the same number of chips, Google Cloud names the one that is closest to a cube.

Source: Google Cloud, "TPU v4", "TPU v5e", "TPU v5p", "TPU v6e": supported configurations
    (https://docs.cloud.google.com/tpu/docs/v5p and the pages beside it).
"""

from __future__ import annotations

import math

from trainer.models.errors import PrepError, usage_error

_RECTANGLES = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_BOXES = ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8", "8x8x16", "8x16x16", "16x16x16")
SLICES = {"v4": _BOXES, "v5e": _RECTANGLES, "v5p": (*_BOXES, "16x16x24"), "v6e": _RECTANGLES}


def find_topology(kind: str, num_chips: int) -> str:
    """Return the topology with a number of chips, such as `v5p:4x8x8` for 256.

    Args:
        kind: A TPU generation of SLICES.
        num_chips: Number of chips; each is one device.

    Raises:
        UsageError: No slice has this number of chips.
    """
    slices = {math.prod(map(int, shape.split("x"))): shape for shape in SLICES[kind]}
    if num_chips not in slices:
        raise _size_error(kind, num_chips, sorted(slices))
    return f"{kind}:{slices[num_chips]}"


def _size_error(kind: str, num_chips: int, sizes: list[int]) -> PrepError:
    """Return the error for a number of chips that no slice has; it names the next smaller and larger slice."""
    below = [size for size in sizes if size < num_chips][-1:]
    above = [size for size in sizes if size > num_chips][:1]
    nearest = " or ".join(f"{size:,}" for size in (*below, *above))
    why = f"slices have {', '.join(f'{size:,}' for size in sizes[:-1])} or {sizes[-1]:,} chips"
    return usage_error(f"no slice of {kind} has {num_chips:,} chips", why, f"a mesh of {nearest} devices")
