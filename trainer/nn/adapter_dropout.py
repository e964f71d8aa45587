"""Dropout of the inputs of adapters (LoRA): each adapted module drops elements of its own copy of its input.

The mask of an element depends on the seed, the step, the stack, the layer, the module, the row, the token and the
feature. Projections in one tensor, such as GPT-2's queries, keys and values, are one module and have one mask.

Axes: B rows of the batch, T tokens, S source tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from prepcli.models.lora import LORA_B
from prepcli.models.param_tree import Tree
from trainer.distributed.zigzag_order import order_tokens
from trainer.nn.attention_mask import KV
from trainer.nn.context import LayerContext
from trainer.nn.dropout import drop
from trainer.nn.linear import LORA_DROPOUT
from trainer.nn.random_bits import RandomKey

# Projections of the encoder's output, which has other tokens than the decoder's layers.
SOURCE_PROJECTIONS = ("cross.k", "cross.v")


@partial(jax.tree_util.register_dataclass, data_fields=["keys"], meta_fields=["rate"])
@dataclass(frozen=True, slots=True)
class AdapterDropout:
    """The random masks of the input of one adapter in one layer.

    Attributes:
        keys: Key of each token [B, T].
        rate: Fraction of the elements to drop.
    """

    keys: RandomKey
    rate: float

    def apply(self, x: Array) -> Array:
        """Drop elements of an input [B, T, *in], and scale the rest by 1 / (1 - rate)."""
        features = x.shape[2:]
        index = jnp.arange(math.prod(features)).reshape(features)
        keys = self.keys.reshape(*x.shape[:2], *(1 for _ in features))
        return drop(x, keys, index, self.rate)


def with_adapter_dropout(
    weights: Tree, context: LayerContext, sites: Mapping[str, int], name: str = ""
) -> Tree:
    """Return the weights of a layer, with the masks of each adapter next to its matrices.

    Args:
        weights: Weights of a layer, or of a part of it.
        context: Inputs of the layer, with its random masks.
        sites: Number of the module of each projection.
        name: Name of the part, e.g. `attn.q`. Empty for the layer.
    """
    if context.dropout is None or not context.dropout.config.adapters:
        return weights
    changed: dict[str, Any] = {}
    for key, value in weights.items():
        changed[key] = value
        if isinstance(value, dict):
            part = f"{name}.{key}" if name else key
            changed[key] = with_adapter_dropout(value, context, sites, part)
    if LORA_B in weights and name in sites:
        positions = context.dropout.positions
        if name in SOURCE_PROJECTIONS and context.encoder_output is not None:
            states = context.encoder_output.states
            assert not isinstance(states, KV)
            positions = order_tokens(jnp.arange(states.shape[1]), context.sharding)
        keys = context.dropout.adapter_keys(sites[name], positions)
        changed[LORA_DROPOUT] = AdapterDropout(keys, context.dropout.config.adapters)
    return changed
