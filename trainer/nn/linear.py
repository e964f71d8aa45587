"""Linear projection with an optional low-rank update (LoRA, arXiv:2106.09685) and an optional bias.

y = W x + scaling * B (A x) + b, where A or B holds the scaling already. With dropout A multiplies dropout(x)

Axes: B rows of the batch, T tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from prepcli.models.lora import LORA_A, LORA_B

# Entry of the weights with the random masks of the input of an adapter, an `AdapterDropout`.
LORA_DROPOUT = "lora_dropout"


def linear(x: Array, weights: Mapping[str, Any], *, num_devices: int = 1) -> Array:
    """Multiply by a weight, and add its low-rank update and its bias, if it has them.

    Args:
        x: Input [B, T, *in].
        weights: `weight` [*out, *in], and optionally `bias` [*out], and `lora_a` [rank, *in] with `lora_b`
            [*out, rank], one of them scaled, and LORA_DROPOUT with the random masks of x.
        num_devices: Devices of the mesh. On one, rows and tokens are merged into one axis, because XLA on CPUs would
            copy the output's gradient to merge them.

    Returns:
        [B, T, *out].
    """
    out = _multiply(x, weights["weight"], num_devices)
    if LORA_B in weights:
        adapter_input = x
        if LORA_DROPOUT in weights:
            adapter_input = weights[LORA_DROPOUT].apply(x)
        hidden = _multiply(adapter_input, weights[LORA_A], num_devices)
        out = out + _multiply(hidden, weights[LORA_B], num_devices)
    if "bias" in weights:
        out = out + weights["bias"]
    return out


def scale_by(x: Array, factor: float) -> Array:
    """Multiply by a constant factor, in the dtype of the array."""
    if factor == 1.0:
        return x
    return x * jnp.asarray(factor, x.dtype)


def _multiply(x: Array, weight: Array, num_devices: int) -> Array:
    """Multiply [B, T, *in] by a weight [*out, *in]."""
    # e.g. [B, T, 8] by [2, 4, 8]: one axis of inputs, and two axes of outputs
    out_shape = weight.shape[: weight.ndim - x.ndim + 2]
    in_size = math.prod(x.shape[2:])
    if num_devices > 1:
        x_axes = tuple(range(2, x.ndim))
        weight_axes = tuple(range(len(out_shape), weight.ndim))
        return lax.dot_general(x, weight, ((x_axes, weight_axes), ((), ())))
    product = jnp.einsum("ni,oi->no", x.reshape(-1, in_size), weight.reshape(-1, in_size))
    return product.reshape(*x.shape[:2], *out_shape)
