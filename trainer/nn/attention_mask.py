"""What queries see: keys by position, the additions to their scores, and keys and values that are kept for later."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from trainer.distributed.sharding import ShardingContext
from trainer.models.architecture import FULL_ATTENTION

CosSin = tuple[Array, Array]  # cosine and sine of rotary positions: [T, dim / 2], or [B, T, dim / 2]


class KV(NamedTuple):
    """What queries meet, [B, S, kv_heads, head_dim] each: keys as they are compared, normed and turned."""

    keys: Array
    values: Array


class KVCache(NamedTuple):
    """Keys and values of a stack of layers, [layers, B, S, kv_heads, head_dim] each; slots from `filled` on are free.

    Layers come in turn: `layer` is the next one. Both are int32 [], so that one compiled step serves all.
    """

    keys: Array
    values: Array
    length: Array
    layer: Array

    def append(self, new: KV, sharding: ShardingContext) -> tuple[KVCache, KV]:
        """With T more keys and values of the layer in the slots from `filled` on, and all S of that layer."""
        at = (self.layer, 0, self.length, 0, 0)
        stacks = (
            sharding.constrain(lax.dynamic_update_slice(stack, more[None], at), *KV_CACHE_DIMS)
            for stack, more in ((self.keys, new.keys), (self.values, new.values))
        )
        keys, values = stacks
        own = KV(_take_layer(keys, self.layer), _take_layer(values, self.layer))
        return self._replace(keys=keys, values=values, layer=self.layer + 1), own

    def advance(self, count: int) -> KVCache:
        """For what comes after `count` tokens that all layers have seen."""
        return self._replace(length=self.length + count, layer=jnp.zeros_like(self.layer))


KV_CACHE_DIMS = ("layers", "batch", "seq", "kv_heads", "head_dim")


def _take_layer(stack: Array, layer: Array) -> Array:
    return lax.dynamic_index_in_dim(stack, layer, keepdims=False)


def empty_kv_cache(shape: tuple[int, ...], dtype: str, sharding: ShardingContext) -> KVCache:
    """A cache of this shape, [layers, B, S, kv_heads, head_dim], with nothing in it."""
    stacks = [sharding.constrain(jnp.zeros(shape, dtype), *KV_CACHE_DIMS) for _ in range(2)]
    return KVCache(stacks[0], stacks[1], jnp.int32(0), jnp.int32(0))


class EncoderOutput(NamedTuple):
    """What an encoder made of a source: [B, S, D], and of bool [B, S] false for padding, which no query sees.

    Beside a cache, what all layers make of it: [layers, B, S, kv_heads, head_dim] each.
    """

    states: Array | KV
    source_mask: Array | None = None

    def for_layer(self, layer: Array) -> EncoderOutput:
        """What a layer makes of it."""
        assert isinstance(self.states, KV)
        return self._replace(states=KV(*(_take_layer(stack, layer) for stack in self.states)))


@dataclass(frozen=True, slots=True)
class AttentionMask:
    """Which keys a layer's queries see.

    queries, keys: positions, int32 [T] and [S], or [B, T] and [B, S] where rows differ; a query sees keys up to its own
    position, from `window` positions on. Without positions it sees all.
    present: bool [B, S], false for padding, which none sees.
    bias: float32 [heads, T, S], or [B, heads, T, S] where rows differ, added to scores.
    turns: the rotations of queries, and of the keys that are made beside them.
    score_factor: float32 [], by which scores are multiplied besides the scale that all layers have.
    """

    q_positions: Array | None = None
    kv_positions: Array | None = None
    kv_valid: Array | None = None
    bias: Array | None = None
    cos_sin: CosSin | None = None
    layer_score_scale: Array | None = None
    window: int = FULL_ATTENTION

    def materialize(self) -> Array | None:
        """Bool [T, S] or [B, T, S]: whether a query sees a key; None: each sees all."""
        present = None if self.kv_valid is None else self.kv_valid[:, None, :]
        if self.q_positions is None or self.kv_positions is None:
            return present
        distance = self.q_positions[..., :, None] - self.kv_positions[..., None, :]
        seen = distance >= 0
        seen = seen if self.window == FULL_ATTENTION else seen & (distance < self.window)
        return seen if present is None else seen & present


def causal_mask(length: int) -> AttentionMask:
    """Whole sequences: each token sees itself and those before."""
    positions = jnp.arange(length)
    return AttentionMask(positions, positions)
