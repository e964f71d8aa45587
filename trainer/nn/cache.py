"""The cache of decoding: keys and values of earlier tokens, and the states of recurrent layers.

A layer with full attention has a slot for each token. A layer with a sliding window of W tokens has a ring of W slots:
the token of slot i of the batch is in slot i % W of the ring, where it replaces a token that no later query attends to.

Some layers attend to the keys and values of an earlier layer. The cache passes them on within a step, in training too.
A cache without slots keeps nothing for later tokens.

Multi-head latent attention has one head here: its latent takes the place of keys, and its shared part of the keys the
place of values.

A recurrent layer keeps the last inputs of its convolution, and a state of fixed size.

Axes: B rows of the batch, T new tokens, S slots, K key and value heads, E head width. Of recurrent layers: L taps,
G groups of heads with the same queries and keys, R heads of a group, N width of keys, P width of values.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from prepcli.models.architecture import FULL_ATTENTION
from trainer.distributed.sharding import UNSPLIT, ShardingContext
from trainer.nn.attention_mask import KV, KV_CACHE_DIMS, take_layer

# Name of the matrix state. Other names are those of convolutions.
STATE = "state"


class RecurrentCache(NamedTuple):
    """The states of all recurrent layers.

    `layer` is an array, so that one compiled step serves all layers.
    """

    # Name -> [layers, B, ...]: the inputs of a convolution [layers, B, L - 1, channels], and STATE, float32
    # [layers, B, G, R, N, P], or [layers, B, channels, N] in Mamba
    states: Mapping[str, Array]
    layer: Array  # int32 [], the layer that is read and written next

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


class KVStack(NamedTuple):
    """Keys and values of layers with the same number of slots.

    `layer` is an array, so that one compiled step serves all layers.
    """

    keys: Array  # [layers, B, S, K, E]
    values: Array  # Like `keys`, in latent attention of another width
    layer: Array  # int32 [], the layer of the stack that is written next

    def write(self, new: KV, slot: Array, sharding: ShardingContext) -> tuple[KVStack, KV]:
        """Write keys and values [B, T, K, E] into the next layer, starting at `slot`.

        Returns:
            The updated stack, which points at the following layer, and all keys and values of the
            layer just written.
        """
        start = (self.layer, 0, slot, 0, 0)

        def update(stack: Array, new: Array) -> Array:
            updated = lax.dynamic_update_slice(stack, new[None], start)
            return sharding.constrain(updated, *KV_CACHE_DIMS)

        keys = update(self.keys, new.keys)
        values = update(self.values, new.values)
        layer_kv = KV(take_layer(keys, self.layer), take_layer(values, self.layer))
        return KVStack(keys, values, self.layer + 1), layer_kv


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["stacks", "length", "recurrent", "shared"],
    meta_fields=["num_slots"],
)
@dataclass(frozen=True, slots=True)
class KVCache:
    """Keys and values of all layers. Layers are appended to in order.

    `length` is an array, so that one compiled step serves all slots.
    """

    # The layers by their sliding window. Each has `num_slots` slots, or as many as a shorter window.
    stacks: Mapping[int, KVStack]
    length: Array  # int32 [], the number of tokens per row so far
    # Maximum number of tokens per row. 0 if keys and values are not kept for later tokens.
    num_slots: int
    # States of layers with a recurrent mixer. None if the model has no such layers.
    recurrent: RecurrentCache | None = None
    # Sliding window -> keys and values of an earlier layer of the step that layers with the window reuse
    shared: Mapping[int, KV] = field(default_factory=dict[int, KV])

    @property
    def layer(self) -> Array:
        """Number of layers with keys and values written in this step, int32 []."""
        return sum((stack.layer for stack in self.stacks.values()), jnp.int32(0))

    def append(self, new: KV, window: int, sharding: ShardingContext) -> tuple[KVCache, KV]:
        """Write the keys and values of T tokens to the next layer.

        Args:
            new: Keys and values of one token, or of T tokens if the cache is empty.
            window: Sliding window of the layer.
            sharding: The device mesh and its rules.

        Returns:
            The cache with its next layer advanced, and the keys and values that the queries of the tokens attend to:
            `new` itself in an empty cache, else all slots of the layer. `key_slots` has their slots.
        """
        if not self.num_slots:
            return self, new
        slots = layer_slots(window, self.num_slots)
        count = new.keys.shape[1]
        kept = new
        if count > slots:
            kept = KV(_last_slots(new.keys, slots), _last_slots(new.values, slots))
        # Several tokens are a prefill of an empty cache, whose first slot is 0. A single token goes
        # to its place in the ring, e.g. token 9 of a ring of 4 slots to slot 1.
        if count == 1:
            slot = self.length % slots
        else:
            slot = jnp.int32(0)
        stack, layer_kv = self.stacks[window].write(kept, slot, sharding)
        cache = dataclasses.replace(self, stacks={**self.stacks, window: stack})
        if count == 1:
            return cache, layer_kv
        return cache, new

    def share(self, window: int, kv: KV) -> KVCache:
        """Pass the keys and values of a layer on to later layers with the same window."""
        return dataclasses.replace(self, shared={**self.shared, window: kv})

    def write_states(self, new: Mapping[str, Array], sharding: ShardingContext) -> KVCache:
        """Replace the states of the next recurrent layer."""
        assert self.recurrent is not None
        return dataclasses.replace(self, recurrent=self.recurrent.write(new, sharding))

    def key_slots(self, window: int, count: int) -> Array:
        """Return the position of the token of each key that `append` returns for `count` tokens.

        Positions count the slots of a row of the batch from 0, padding included.

        Returns:
            int32 [S]. Negative for a slot of a ring that has no token yet.
        """
        if count > 1:
            return jnp.arange(count)
        slots = layer_slots(window, self.num_slots)
        if slots == self.num_slots:
            return jnp.arange(slots)
        # The slot's latest token of the same residue, e.g. with length 9 and 4 slots:
        # slots 0 to 3 hold tokens 8, 9, 6, 7. With length 1: 0, 1, -2, -1.
        return self.length - (self.length - jnp.arange(slots)) % slots

    def advance(self, count: int) -> KVCache:
        """Count `count` more tokens, reset the next layer to the first one, and share nothing."""
        stacks = {
            window: stack._replace(layer=jnp.zeros_like(stack.layer))
            for window, stack in self.stacks.items()
        }
        recurrent = self.recurrent
        if recurrent is not None:
            recurrent = recurrent.first_layer()
        return KVCache(stacks, self.length + count, self.num_slots, recurrent)


def empty_kv_cache(
    windows: Sequence[int],
    shape: tuple[int, int, int, int],
    dtype: str,
    sharding: ShardingContext,
    *,
    value_dim: int | None = None,
    head_shapes: Mapping[int, tuple[int, int]] | None = None,
) -> KVCache:
    """Allocate an empty cache.

    Args:
        windows: Sliding window of each layer with keys and values.
        shape: [B, S, K, E] of a layer with full attention.
        dtype: Dtype of keys and values.
        sharding: The device mesh and its rules.
        value_dim: Width of values, if it differs from E.
        head_shapes: Window -> [K, E] of its layers, where they differ from those of `shape`.
    """
    rows, num_slots, *default_shape = shape

    def allocate(window: int) -> KVStack:
        num_heads, key_dim = (head_shapes or {}).get(window, default_shape)
        stack_shape = (windows.count(window), rows, layer_slots(window, num_slots), num_heads)

        def zeros(width: int) -> Array:
            return sharding.constrain(jnp.zeros((*stack_shape, width), dtype), *KV_CACHE_DIMS)

        return KVStack(zeros(key_dim), zeros(value_dim or key_dim), layer=jnp.int32(0))

    stacks = {window: allocate(window) for window in sorted({*windows})}
    return KVCache(stacks, jnp.int32(0), num_slots)


def layer_slots(window: int, num_slots: int) -> int:
    """Return the number of slots of a layer, for at most `num_slots` tokens per row."""
    if window == FULL_ATTENTION:
        return num_slots
    return min(window, num_slots)


def _last_slots(array: Array, slots: int) -> Array:
    """Return the last tokens of [B, T, K, E] in the order of a ring: token i in slot i % `slots`."""
    # e.g. 6 tokens and 4 slots: tokens 2 3 4 5, rolled by 6 % 4 = 2, are 4 5 2 3
    count = array.shape[1]
    return jnp.roll(array[:, count - slots :], count % slots, axis=1)
