"""Layer norm and RMS norm, computed in float32."""

from __future__ import annotations

from collections.abc import Mapping

import jax.numpy as jnp
from jax import Array, lax

from prepcli.models.architecture import ArchConfig

LAST_AXIS = (-1,)


def norm(
    x: Array,
    weights: Mapping[str, Array],
    arch_config: ArchConfig,
    axes: tuple[int, ...] = LAST_AXIS,
) -> Array:
    """Normalize [..., D] by the family's norm, in the dtype of `x`.

    Args:
        x: [..., D].
        weights: `scale` and `bias`, both [D] or of other last axes of `x`. A layer norm may have neither.
        arch_config: Selects the norm and its epsilon.
        axes: Axes of the mean.

    Returns:
        [..., D] in the dtype of `x`.
    """
    eps = arch_config.norm_eps
    match arch_config.norm:
        case "layer":
            scale = weights.get("scale", 1.0)
            return _layer_norm(x, scale, weights.get("bias", 0.0), eps=eps, axes=axes)
        case "layer_offset":
            # As in transformers' NemotronLayerNorm1P.
            scale = 1.0 + weights["scale"].astype(jnp.float32)
            return _layer_norm(x, scale, weights.get("bias", 0.0), eps=eps, axes=axes)
        case "rms":
            # Rounded to the dtype of `x` before the scale, as in transformers' LlamaRMSNorm.
            return plain_rms_norm(x, eps, axes) * weights["scale"]
        case "rms_offset":
            # Scaled by 1 + scale in float32 before rounding, as in transformers' GemmaRMSNorm.
            scale = 1.0 + weights["scale"].astype(jnp.float32)
            return (_rms_normalize(x, eps, axes) * scale).astype(x.dtype)
        case "rms_plain":
            return plain_rms_norm(x, eps, axes)


def plain_rms_norm(x: Array, eps: float, axes: tuple[int, ...] = LAST_AXIS) -> Array:
    """Normalize [..., D] by an RMS norm without parameters, in the dtype of `x`."""
    return _rms_normalize(x, eps, axes).astype(x.dtype)


def _layer_norm(
    x: Array, scale: Array | float, bias: Array | float, *, eps: float, axes: tuple[int, ...]
) -> Array:
    """Compute (x - mean) / sqrt(var + eps) * scale + bias (arXiv:1607.06450), as torch's LayerNorm.

    The variance is the biased one: the mean of the squared differences.
    """
    x_float32 = x.astype(jnp.float32)
    centered = x_float32 - x_float32.mean(axes, keepdims=True)
    normalized = centered * lax.rsqrt(jnp.square(centered).mean(axes, keepdims=True) + eps)
    return (normalized * scale + bias).astype(x.dtype)


def _rms_normalize(x: Array, eps: float, axes: tuple[int, ...]) -> Array:
    """Compute x / sqrt(mean(x^2) + eps) in float32 (RMSNorm, arXiv:1910.07467)."""
    x_float32 = x.astype(jnp.float32)
    return x_float32 * lax.rsqrt(jnp.square(x_float32).mean(axes, keepdims=True) + eps)
