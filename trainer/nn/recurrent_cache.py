"""The cache of recurrent layers in decoding: the last inputs of convolutions, and states of fixed size.

Axes: B rows of the batch, L taps, G groups of heads with the same queries and keys, R heads of a group, N width of
keys, P width of values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from trainer.distributed.sharding import UNSPLIT, ShardingContext
from trainer.nn.attention_mask import take_layer

# Name of the matrix state. Other names are those of convolutions.
STATE = "state"


class RecurrentCache(NamedTuple):
    """The states of all recurrent layers.

    `layer` is an array, so that one compiled step serves all layers.

    Attributes:
        states: Name -> [layers, B, ...]: the inputs of a convolution [layers, B, L - 1, channels], and STATE, float32
            [layers, B, G, R, N, P], or [layers, B, channels, N] in Mamba.
        layer: int32 [], the layer that is read and written next.
    """

    states: Mapping[str, Array]
    layer: Array

    def read(self) -> dict[str, Array]:
        """Return the states of the next layer."""
        return {name: take_layer(stack, self.layer) for name, stack in self.states.items()}

    def write(self, new: Mapping[str, Array], sharding: ShardingContext) -> RecurrentCache:
        """Replace the states of the next layer, and point at the following one."""
        states: dict[str, Array] = {}
        for name, stack in self.states.items():
            layer_state = new[name].astype(stack.dtype)[None]
            start = (self.layer, *(0 for _ in stack.shape[1:]))
            states[name] = _constrain_stack(
                lax.dynamic_update_slice(stack, layer_state, start), sharding
            )
        return RecurrentCache(states, self.layer + 1)

    def first_layer(self) -> RecurrentCache:
        """Point at the first layer."""
        return self._replace(layer=jnp.zeros_like(self.layer))


def empty_recurrent_cache(
    shapes: Mapping[str, tuple[int, ...]], dtype: str, sharding: ShardingContext
) -> RecurrentCache:
    """Allocate the states of rows without earlier tokens.

    Args:
        shapes: Name -> shape of all layers, as in `RecurrentCache.states`.
        dtype: Dtype of the inputs of convolutions.
        sharding: The device mesh and its rules.
    """
    states: dict[str, Array] = {}
    for name, shape in shapes.items():
        # A sum of many terms: each step adds one.
        state_dtype = "float32" if name == STATE else dtype
        states[name] = _constrain_stack(jnp.zeros(shape, state_dtype), sharding)
    return RecurrentCache(states, jnp.int32(0))


def _constrain_stack(stack: Array, sharding: ShardingContext) -> Array:
    """Split a stack [layers, B, ...] along its rows."""
    return sharding.constrain(stack, "layers", "batch", *(UNSPLIT for _ in stack.shape[2:]))
