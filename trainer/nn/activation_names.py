"""Names of activations, by which rematerialization policies save them (`jax.ad_checkpoint.checkpoint_name`).

In the forward pass of a `jax.custom_vjp` a name saves an array only if the backward pass reads it. Blockwise attention
therefore names its output and its normalizers there. An MLP in chunks of tokens computes hidden units again, whatever
the policy.
"""

from __future__ import annotations

from typing import Literal

from jax import Array
from jax.ad_checkpoint import checkpoint_name

from prepcli.models.remat import ActivationName

# The residual stream before a layer. Every policy saves it.
LAYER_INPUT = "layer_input"


def name_activation(x: Array, name: ActivationName | Literal["layer_input"]) -> Array:
    """Name an activation. Its values do not change."""
    return checkpoint_name(x, name)
