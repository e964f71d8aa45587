"""The MLP of a layer: down(activation(up(x))), or down(activation(gate(x)) * up(x)) if it is gated (arXiv:2002.05202).

Axes: B rows of the batch, T tokens, D model width, F hidden units.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import jax.numpy as jnp
from jax import Array, nn

from prepcli.models.architecture import ArchConfig
from prepcli.models.layer_config import ClampedSwiglu
from trainer.distributed.sharding import ShardingContext
from trainer.nn.model_spec import name_activation
from trainer.nn.projections import ALPHA_P, MoeWeights, Projections, linear, norm, scale_by, xielu

# Key of the norm of the input among the weights of an MLP.
INPUT_NORM = "input_norm"
# 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) (arXiv:1606.08415, section 2)
_TANH_GELU = partial(nn.gelu, approximate=True)
ACTIVATION_FUNCTIONS: Mapping[str, Callable[[Array], Array]] = {
    "gelu": partial(nn.gelu, approximate=False),
    "gelu_new": _TANH_GELU,
    "gelu_pytorch_tanh": _TANH_GELU,
    "gelu_fast": _TANH_GELU,
    # The approximation x * sigmoid(1.702 x) of GELU (arXiv:1606.08415, section 2).
    "quick_gelu": lambda x: x * nn.sigmoid(1.702 * x),
    "silu": nn.silu,
    "swish": nn.silu,
    "relu": nn.relu,
    # max(x, 0)^2 (Primer, arXiv:2109.08668, section 4.2).
    "relu2": lambda x: jnp.square(nn.relu(x)),
}


def mlp(
    x: Array,
    weights: Projections,
    constants: None = None,
    *,
    arch_config: ArchConfig,
    sharding: ShardingContext,
) -> Array:
    """Compute the MLP of [B, T, D]: down(activation(up(x))), or down(activation(gate(x)) * up(x)) if it is gated.

    `over_token_chunks` calls it directly, so it takes `constants`.

    Args:
        x: Input [B, T, D].
        weights: Projections `up`, `down` and, if it is gated, `gate`. Optionally INPUT_NORM, the norm of `x`, and
            `down_norm`, the norm of the hidden units (BitNet), or the parameters of xIELU (Apertus).
        constants: Unused. An MLP needs none.
        arch_config: The choices of the layers.
        sharding: The device mesh and its rules.

    Returns:
        [B, T, D].
    """
    x = chunk_input(x, weights, arch_config, sharding)
    num_devices = sharding.num_devices
    # [B, T, D] -> [B, T, F]
    up = linear(x, weights["up"], num_devices=num_devices)
    gate = None
    if arch_config.has_gated_mlp:
        gate = linear(x, weights["gate"], num_devices=num_devices)
    if ALPHA_P in weights:
        hidden = xielu(name_activation(up, "mlp_hidden"), weights)
    else:
        hidden = hidden_units(up, gate, arch_config)
    hidden = sharding.constrain(hidden, "batch", "seq", "mlp")
    if "down_norm" in weights:
        hidden = norm(hidden, weights["down_norm"], arch_config)
    output = linear(hidden, weights["down"], num_devices=num_devices)
    return scale_by(output, arch_config.mlp_output_scale)


def chunk_input(
    x: Array, weights: Projections | MoeWeights, arch_config: ArchConfig, sharding: ShardingContext
) -> Array:
    """Normalize the input [B, T, D] of an MLP or of experts, if it has a norm, and constrain its sharding."""
    if INPUT_NORM in weights:
        x = norm(x, weights[INPUT_NORM], arch_config)
    return sharding.constrain(x, "batch", "seq", "embed")


def hidden_units(up: Array, gate: Array | None, arch_config: ArchConfig) -> Array:
    """Compute activation(up), or activation(gate) * up if there is a gate, from projections [B, T, F].

    The gated form is GLU with any activation (arXiv:2002.05202). `ClampedSwiglu` has the equation of another gating.
    """
    activate = ACTIVATION_FUNCTIONS[arch_config.activation]
    up = name_activation(up, "mlp_hidden")
    if gate is None:
        return activate(up)
    gate = scale_by(name_activation(gate, "mlp_hidden"), arch_config.gate_scale)
    if arch_config.clamped_swiglu is not None:
        return _clamped_swiglu(gate, up, arch_config.clamped_swiglu)
    return activate(gate) * up


def mlp_hidden(x: Array, weights: Projections, arch_config: ArchConfig) -> Array:
    """Project [B, T, D] to the hidden units [B, T, F] of one expert."""
    gate = None
    if arch_config.has_gated_mlp:
        gate = linear(x, weights["gate"])
    return hidden_units(linear(x, weights["up"]), gate, arch_config)


def _clamped_swiglu(gate: Array, up: Array, swiglu: ClampedSwiglu) -> Array:
    """Compute (clip(up) + 1) * g * sigmoid(alpha * g) of [B, T, F] with g = min(gate, limit)."""
    bounded_gate = jnp.minimum(gate, swiglu.limit)
    bounded_up = jnp.clip(up, -swiglu.limit, swiglu.limit)
    return (bounded_up + 1) * bounded_gate * nn.sigmoid(swiglu.alpha * bounded_gate)
