"""What queries see: keys by position, the additions to their scores, and keys and values that are kept for later."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from trainer.distributed.sharding import Shards
from trainer.models.architecture import ALL_BEFORE

Turns = tuple[Array, Array]  # cosine and sine of rotary positions: [T, dim / 2], or [B, T, dim / 2]


class KeysValues(NamedTuple):
    """What queries meet, [B, S, kv_heads, head_dim] each: keys as they are compared, normed and turned."""

    keys: Array
    values: Array


class Cache(NamedTuple):
    """Keys and values of a stack of layers, [layers, B, S, kv_heads, head_dim] each; slots from `filled` on are free.

    Layers come in turn: `layer` is the next one. Both are int32 [], so that one compiled step serves all.
    """

    keys: Array
    values: Array
    filled: Array
    layer: Array

    def extended(self, new: KeysValues, shards: Shards) -> tuple[Cache, KeysValues]:
        """With T more keys and values of the layer in the slots from `filled` on, and all S of that layer."""
        at = (self.layer, 0, self.filled, 0, 0)
        stacks = (
            shards.constrain(lax.dynamic_update_slice(stack, more[None], at), *STACK)
            for stack, more in ((self.keys, new.keys), (self.values, new.values))
        )
        keys, values = stacks
        own = KeysValues(_at(keys, self.layer), _at(values, self.layer))
        return self._replace(keys=keys, values=values, layer=self.layer + 1), own

    def after(self, count: int) -> Cache:
        """For what comes after `count` tokens that all layers have seen."""
        return self._replace(filled=self.filled + count, layer=jnp.zeros_like(self.layer))


STACK = ("layers", "batch", "seq", "kv_heads", "head_dim")


def _at(stack: Array, layer: Array) -> Array:
    return lax.dynamic_index_in_dim(stack, layer, keepdims=False)


def empty(shape: tuple[int, ...], dtype: str, shards: Shards) -> Cache:
    """A cache of this shape, [layers, B, S, kv_heads, head_dim], with nothing in it."""
    stacks = [shards.constrain(jnp.zeros(shape, dtype), *STACK) for _ in range(2)]
    return Cache(stacks[0], stacks[1], jnp.int32(0), jnp.int32(0))


class Memory(NamedTuple):
    """What an encoder made of a source: [B, S, D], and of bool [B, S] false for padding, which no query sees.

    Beside a cache, what all layers make of it: [layers, B, S, kv_heads, head_dim] each.
    """

    states: Array | KeysValues
    present: Array | None = None

    def of(self, layer: Array) -> Memory:
        """What a layer makes of it."""
        assert isinstance(self.states, KeysValues)
        return self._replace(states=KeysValues(*(_at(stack, layer) for stack in self.states)))


@dataclass(frozen=True, slots=True)
class Seen:
    """Which keys a layer's queries see.

    queries, keys: positions, int32 [T] and [S], or [B, T] and [B, S] where rows differ; a query sees keys up to its own
    position, from `window` positions on. Without positions it sees all.
    present: bool [B, S], false for padding, which none sees.
    bias: float32 [heads, T, S], or [B, heads, T, S] where rows differ, added to scores.
    turns: the rotations of queries, and of the keys that are made beside them.
    score_factor: float32 [], by which scores are multiplied besides the scale that all layers have.
    """

    queries: Array | None = None
    keys: Array | None = None
    present: Array | None = None
    bias: Array | None = None
    turns: Turns | None = None
    score_factor: Array | None = None
    window: int = ALL_BEFORE

    def visible(self) -> Array | None:
        """Bool [T, S] or [B, T, S]: whether a query sees a key; None: each sees all."""
        present = None if self.present is None else self.present[:, None, :]
        if self.queries is None or self.keys is None:
            return present
        distance = self.queries[..., :, None] - self.keys[..., None, :]
        seen = distance >= 0
        seen = seen if self.window == ALL_BEFORE else seen & (distance < self.window)
        return seen if present is None else seen & present


def causal(length: int) -> Seen:
    """Whole sequences: each token sees itself and those before."""
    positions = jnp.arange(length)
    return Seen(positions, positions)
