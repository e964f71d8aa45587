"""The feed-forward network (MLP) of a layer.

down(activation(up(x))), or down(activation(gate(x)) * up(x)) if it is gated (arXiv:2002.05202).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import Array, nn

from trainer.distributed.sharding import ShardingContext
from trainer.models.architecture import ArchConfig
from trainer.models.moe_config import ClampedSwiglu
from trainer.nn.activation_names import name_activation
from trainer.nn.linear import linear

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
}


def mlp(
    x: Array, weights: Mapping[str, Any], arch_config: ArchConfig, sharding: ShardingContext
) -> Array:
    """Compute the MLP of [B, T, D]: the product of its hidden units and `down`."""
    hidden = mlp_hidden(x, weights, arch_config, num_devices=sharding.num_devices)
    hidden = sharding.constrain(hidden, "batch", "seq", "mlp")
    return linear(hidden, weights["down"], num_devices=sharding.num_devices)


def mlp_hidden(
    x: Array, weights: Mapping[str, Any], arch_config: ArchConfig, *, num_devices: int = 1
) -> Array:
    """Compute the hidden units [B, T, F]: activation(up), or activation(gate) * up if the MLP is gated.

    `ClampedSwiglu` has the equation of the other gating.
    """
    # up: [B, T, D] -> [B, T, F]. The gated form is GLU with any activation (arXiv:2002.05202).
    activate = ACTIVATION_FUNCTIONS[arch_config.activation]
    project = partial(linear, num_devices=num_devices)
    up = name_activation(project(x, weights["up"]), "mlp_hidden")
    if not arch_config.has_gated_mlp:
        return activate(up)
    gate = name_activation(project(x, weights["gate"]), "mlp_hidden")
    if arch_config.clamped_swiglu is not None:
        return _clamped_swiglu(gate, up, arch_config.clamped_swiglu)
    return activate(gate) * up


def _clamped_swiglu(gate: Array, up: Array, swiglu: ClampedSwiglu) -> Array:
    """Compute (clip(up) + 1) * g * sigmoid(alpha * g) of [B, T, F] with g = min(gate, limit)."""
    bounded_gate = jnp.minimum(gate, swiglu.limit)
    bounded_up = jnp.clip(up, -swiglu.limit, swiglu.limit)
    return (bounded_up + 1) * bounded_gate * nn.sigmoid(swiglu.alpha * bounded_gate)
