"""The feed-forward network (MLP) of a layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import Array, nn

from trainer.distributed.sharding import ShardingContext
from trainer.models.architecture import ArchConfig

_TANH_GELU = partial(nn.gelu, approximate=True)
ACTIVATION_FUNCTIONS: Mapping[str, Callable[[Array], Array]] = {
    "gelu": partial(nn.gelu, approximate=False),
    "gelu_new": _TANH_GELU,
    "gelu_pytorch_tanh": _TANH_GELU,
    "gelu_fast": _TANH_GELU,
    "quick_gelu": lambda x: x * nn.sigmoid(1.702 * x),
    "silu": nn.silu,
    "swish": nn.silu,
    "relu": nn.relu,
}


def mlp(x: Array, weights: Mapping[str, Any], arch_config: ArchConfig, sharding: ShardingContext) -> Array:
    """Compute the MLP of [B, T, D]: down(activation(up)), or down(activation(gate) * up) if it is gated."""
    activate = ACTIVATION_FUNCTIONS[arch_config.activation]
    up = _linear(x, weights["up"])
    hidden = activate(_linear(x, weights["gate"])) * up if arch_config.has_gated_mlp else activate(up)
    return _linear(sharding.constrain(hidden, "batch", "seq", "mlp"), weights["down"])


def _linear(x: Array, weights: Mapping[str, Array]) -> Array:
    """Multiply [B, T, in] by a weight [out, in] and add the bias, if there is one."""
    out = jnp.einsum("bti,oi->bto", x, weights["weight"])
    return out + weights["bias"] if "bias" in weights else out
