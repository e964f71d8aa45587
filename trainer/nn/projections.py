"""The weights of one layer, and the functions that apply one of them: projections, norms and learned activations.

`trainer.nn.layer_stack` takes the weights of a layer from the parameter tree.

Axes: B rows of the batch, T tokens, F hidden units.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NotRequired, TypedDict

import jax.numpy as jnp
from jax import Array, lax, nn

from prepcli.models.architecture import ArchConfig
from prepcli.models.lora import LORA_A, LORA_B

# Leaves of a projection (`weight`, `bias`, `lora_a`, `lora_b`) or of a norm (`scale`, `bias`).
Leaves = Mapping[str, Array]
# The leaves of a norm without parameters, e.g. of OPT with `layer_norm_elementwise_affine` false.
NO_PARAMETERS: Leaves = {}
# Projections and norms of attention or of an MLP, by name, e.g. `q`, `o` and `q_norm`.
Projections = Mapping[str, Leaves]


class RouterWeights(TypedDict):
    """The weights of a router. A correction shifts the choice of the experts, not their weights."""

    weight: Array
    bias: NotRequired[Array]
    correction: NotRequired[Leaves]
    input_scale: NotRequired[Leaves]
    expert_scale: NotRequired[Leaves]


class MoeWeights(TypedDict):
    """The weights of an MoE layer. The projections are stacked over its experts. Some experts have no `gate`."""

    router: RouterWeights
    gate: Leaves
    up: Leaves
    down: Leaves
    shared: NotRequired[Projections]
    shared_gate: NotRequired[Leaves]
    input_norm: NotRequired[Leaves]


class BlockWeights(TypedDict):
    """The weights of a layer. A norm without parameters is absent.

    A layer with experts and an MLP has `moe`. A layer with a recurrent mixer has `mixer` in place of `attn` or
    beside it. A layer of the family mamba2 has no `mlp` either. A layer of one sublayer has `norm` and one of
    `attn`, `mixer` and `mlp`. Layers of other block types have `attn` and `mlp`. The residual connections of Doge have
    weights.
    """

    attn: NotRequired[Projections]
    mixer: NotRequired[Projections]
    cross: NotRequired[Projections]
    mlp: NotRequired[Projections | MoeWeights]
    norm: NotRequired[Leaves]
    attn_norm: NotRequired[Leaves]
    attn_residual: NotRequired[Leaves]
    mlp_residual: NotRequired[Leaves]
    attn_post_norm: NotRequired[Leaves]
    cross_norm: NotRequired[Leaves]
    mlp_norm: NotRequired[Leaves]
    mlp_post_norm: NotRequired[Leaves]
    moe: NotRequired[MoeWeights]
    moe_norm: NotRequired[Leaves]
    moe_post_norm: NotRequired[Leaves]
    mlp_branch_norm: NotRequired[Leaves]
    layer_input_gate: NotRequired[Projections]
    output: NotRequired[Leaves]


# Linear projection with an optional low-rank update (LoRA, arXiv:2106.09685) and an optional bias.
#
# y = W x + scaling * B (A x) + b, where A or B holds the scaling already. With dropout A multiplies dropout(x)

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


# Layer norm and RMS norm, computed in float32.

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
    return _norm(_without_row_axis(x), weights, arch_config, axes).reshape(x.shape)


def _norm(
    x: Array, weights: Mapping[str, Array], arch_config: ArchConfig, axes: tuple[int, ...]
) -> Array:
    """Normalize [..., D], without an axis of one row. See `norm`."""
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
    return _rms_normalize(_without_row_axis(x), eps, axes).astype(x.dtype).reshape(x.shape)


def _layer_norm(
    x: Array, scale: Array | float, bias: Array | float, *, eps: float, axes: tuple[int, ...]
) -> Array:
    """Compute (x - mean) / sqrt(var + eps) * scale + bias (arXiv:1607.06450), as torch's LayerNorm."""
    # The variance is the biased one: the mean of the squared differences.
    x_float32 = x.astype(jnp.float32)
    centered = x_float32 - x_float32.mean(axes, keepdims=True)
    normalized = centered * lax.rsqrt(jnp.square(centered).mean(axes, keepdims=True) + eps)
    return (normalized * scale + bias).astype(x.dtype)


def _rms_normalize(x: Array, eps: float, axes: tuple[int, ...]) -> Array:
    """Compute x / sqrt(mean(x^2) + eps) in float32 (RMSNorm, arXiv:1910.07467)."""
    x_float32 = x.astype(jnp.float32)
    return x_float32 * lax.rsqrt(jnp.square(x_float32).mean(axes, keepdims=True) + eps)


def _without_row_axis(x: Array) -> Array:
    """Remove the first axis of an array with one row, [1, T, ...] -> [T, ...]."""
    # Next to an axis of size 1, XLA on CPUs sums the products of the gradient 10 times slower.
    if x.ndim > 2 and x.shape[0] == 1:
        return x.reshape(x.shape[1:])
    return x


# xIELU, an activation with learned factors (arXiv:2411.13010).

# Key of a factor among the weights of an MLP. An MLP with it has all parameters of xIELU.
ALPHA_P = "xielu_alpha_p"


def xielu(x: Array, weights: Projections) -> Array:
    """Compute xIELU of [B, T, F].

    a_p x^2 + beta x                            if x > 0
    a_n (exp(min(x, eps)) - 1 - x) + beta x     otherwise

    Args:
        x: Input [B, T, F].
        weights: Weights of an MLP. `xielu_alpha_p` and `xielu_alpha_n` are learned: a_p = softplus(alpha_p) and
            a_n = beta + softplus(alpha_n). `xielu_beta` and `xielu_eps` are constants.

    Returns:
        [B, T, F].
    """
    beta = lax.stop_gradient(weights["xielu_beta"]["scale"])
    eps = lax.stop_gradient(weights["xielu_eps"]["scale"])
    positive_factor = nn.softplus(weights[ALPHA_P]["weight"])
    negative_factor = beta + nn.softplus(weights["xielu_alpha_n"]["weight"])
    # The exponential of a large x would be infinite, and its gradient in the unused branch NaN.
    exponential = jnp.expm1(jnp.minimum(x, eps))
    branch = jnp.where(x > 0, positive_factor * x * x, negative_factor * (exponential - x))
    return branch + beta * x
