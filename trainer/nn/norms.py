"""Norms over the last axis, in float32 whatever comes in."""

from __future__ import annotations

from collections.abc import Mapping

import jax.numpy as jnp
from jax import Array, lax

from trainer.models.architecture import ArchConfig


def norm(x: Array, weights: Mapping[str, Array], arch_config: ArchConfig) -> Array:
    """[..., D] -> [..., D] by the family's norm, in the dtype of `x`; a layer norm may lack its weights."""
    match arch_config.norm:
        case "layer":
            return _layer_norm(x, weights.get("scale", 1.0), weights.get("bias", 0.0), arch_config.norm_eps)
        case "rms":
            return (
                _rms_normalize(x, arch_config.norm_eps).astype(x.dtype) * weights["scale"]
            )  # LLaMA's: rounded before it is scaled
        case "rms_offset":
            return (_rms_normalize(x, arch_config.norm_eps) * (1.0 + weights["scale"].astype(jnp.float32))).astype(
                x.dtype
            )


def _layer_norm(x: Array, scale: Array | float, bias: Array | float, eps: float) -> Array:
    """torch's LayerNorm: the biased variance."""
    wide = x.astype(jnp.float32)
    centred = wide - wide.mean(-1, keepdims=True)
    unit = centred * lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + eps)
    return (unit * scale + bias).astype(x.dtype)


def _rms_normalize(x: Array, eps: float) -> Array:
    """Of root mean square 1, in float32."""
    wide = x.astype(jnp.float32)
    return wide * lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + eps)
