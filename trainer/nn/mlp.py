"""The hidden units of an MLP: activation(up), or activation(gate) * up if it is gated (arXiv:2002.05202).

Axes: B rows of the batch, T tokens, D model width, F hidden units.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import Array, nn

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
    # max(x, 0)^2 (Primer, arXiv:2109.08668, section 4.2).
    "relu2": lambda x: jnp.square(nn.relu(x)),
}


def hidden_units(up: Array, gate: Array | None, arch_config: ArchConfig) -> Array:
    """Compute activation(up), or activation(gate) * up if there is a gate, from projections [B, T, F]."""
    activate = ACTIVATION_FUNCTIONS[arch_config.activation]
    up = name_activation(up, "mlp_hidden")
    if gate is None:
        return activate(up)
    return activate(name_activation(gate, "mlp_hidden")) * up


def mlp_hidden(x: Array, weights: Mapping[str, Any], arch_config: ArchConfig) -> Array:
    """Project [B, T, D] to the hidden units [B, T, F] of one expert."""
    gate = None
    if arch_config.has_gated_mlp:
        gate = linear(x, weights["gate"])
    return hidden_units(linear(x, weights["up"]), gate, arch_config)
