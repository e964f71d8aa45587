"""Norms over the last axis, in float32 whatever comes in."""

from __future__ import annotations

from collections.abc import Mapping

import jax.numpy as jnp
from jax import Array, lax

from trainer.traits import Traits


def norm(x: Array, weights: Mapping[str, Array], traits: Traits) -> Array:
    """[..., D] -> [..., D] by the family's norm, in the dtype of `x`."""
    if traits.norm == "layer":
        return _layer_norm(x, weights["scale"], weights["bias"], traits.norm_eps)
    return _rms_norm(x, weights["scale"], traits.norm_eps)


def _layer_norm(x: Array, scale: Array, bias: Array, eps: float) -> Array:
    """torch's LayerNorm: the biased variance."""
    wide = x.astype(jnp.float32)
    centred = wide - wide.mean(-1, keepdims=True)
    unit = centred * lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + eps)
    return (unit * scale + bias).astype(x.dtype)


def _rms_norm(x: Array, scale: Array, eps: float) -> Array:
    """LLaMA's: rounded to the dtype of `x` before it is scaled."""
    wide = x.astype(jnp.float32)
    unit = wide * lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + eps)
    return unit.astype(x.dtype) * scale
