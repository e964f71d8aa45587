"""Linear projection: multiply by a weight and add the optional bias."""

from __future__ import annotations

from collections.abc import Mapping

import jax.numpy as jnp
from jax import Array


def linear(x: Array, weights: Mapping[str, Array], equation: str = "bti,oi->bto") -> Array:
    """Multiply by a weight and add its bias, if it has one.

    Args:
        x: Input, [B, T, in] by default.
        weights: `weight`, [out, in] by default, and optionally `bias` of the output's trailing axes.
        equation: einsum subscripts of `x`, the weight and the output.

    Returns:
        [B, T, out] by default.
    """
    out = jnp.einsum(equation, x, weights["weight"])
    return out + weights["bias"] if "bias" in weights else out
