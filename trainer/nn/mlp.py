"""The feed-forward network (MLP) of a layer.

down(activation(up(x))), or down(activation(gate(x)) * up(x)) if it is gated (arXiv:2002.05202).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from jax import Array, nn

from trainer.distributed.sharding import ShardingContext
from trainer.models.architecture import ArchConfig
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
    """Compute the hidden units [B, T, F]: activation(up), or activation(gate) * up if the MLP is gated."""
    # up: [B, T, D] -> [B, T, F]. The gated form is GLU with any activation (arXiv:2002.05202).
    activate = ACTIVATION_FUNCTIONS[arch_config.activation]
    project = partial(linear, num_devices=num_devices)
    up = name_activation(project(x, weights["up"]), "mlp_hidden")
    if not arch_config.has_gated_mlp:
        return activate(up)
    return activate(name_activation(project(x, weights["gate"]), "mlp_hidden")) * up
