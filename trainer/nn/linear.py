"""Linear projection: multiply by a weight and add the optional bias.

Axes: B rows of the batch, T tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import jax.numpy as jnp
from jax import Array, lax


def linear(x: Array, weights: Mapping[str, Array], *, num_devices: int = 1) -> Array:
    """Multiply by a weight and add its bias, if it has one.

    Args:
        x: Input [B, T, *in].
        weights: `weight` [*out, *in], and optionally `bias` [*out].
        num_devices: Devices of the mesh. On one, rows and tokens are merged into one axis, because XLA on CPUs would
            copy the output's gradient to merge them.

    Returns:
        [B, T, *out].
    """
    weight = weights["weight"]
    out_shape, in_size = weight.shape[: weight.ndim - x.ndim + 2], math.prod(x.shape[2:])
    if num_devices > 1:
        x_axes, weight_axes = range(2, x.ndim), range(len(out_shape), weight.ndim)
        out = lax.dot_general(x, weight, ((tuple(x_axes), tuple(weight_axes)), ((), ())))
    else:
        product = jnp.einsum("ni,oi->no", x.reshape(-1, in_size), weight.reshape(-1, in_size))
        out = product.reshape(*x.shape[:2], *out_shape)
    return out + weights["bias"] if "bias" in weights else out
