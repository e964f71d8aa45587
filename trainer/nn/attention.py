"""Attention with grouped key and value heads, to the same tokens, to kept ones, or to a memory; scores in float32."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax import Array, nn

from trainer.distributed.sharding import Shards
from trainer.models.architecture import NO_CAP, Traits
from trainer.nn.attention_mask import Cache, KeysValues, Seen
from trainer.nn.norms import norm
from trainer.nn.rotary import rotate

MASKED = -1e30  # finite: a difference of two of them is 0, not nan


def attention(
    x: Array,
    weights: Mapping[str, Any],
    traits: Traits,
    seen: Seen,
    shards: Shards,
    cache: Cache | None = None,
    memory: Array | KeysValues | None = None,
) -> tuple[Array, Cache | None]:
    """[B, T, D] -> [B, T, D], and the cache with what `x` adds to it.

    Keys and values are those of `x`; with a cache those of all its slots; with a memory its own, which is [B, S, D], or
    what `keys_values` makes of that. Queries and keys have a norm where there are weights for it.
    """
    q = _turned(_heads(x, weights, "q", traits, shards), seen, traits)
    if isinstance(memory, KeysValues):
        met = memory
    else:
        met = keys_values(x if memory is None else memory, weights, traits, seen, shards)
    if cache is not None:
        cache, met = cache.extended(met, shards)
    mixed = _mix(q, _matched(q, met, shards), traits, seen)
    mixed = shards.constrain(mixed, "batch", "seq", "heads", "head_dim")
    out = weights["o"]
    return _with_bias(jnp.einsum("bthe,dhe->btd", mixed, out["weight"]), out), cache


def keys_values(x: Array, weights: Mapping[str, Any], traits: Traits, seen: Seen, shards: Shards) -> KeysValues:
    """What [B, S, D] is to queries."""
    keys = _turned(_heads(x, weights, "k", traits, shards), seen, traits)
    return KeysValues(keys, _heads(x, weights, "v", traits, shards))


def _heads(x: Array, weights: Mapping[str, Any], name: str, traits: Traits, shards: Shards) -> Array:
    """[B, T, D] -> [B, T, H, E]: queries, keys or values, normed where there is a norm for them."""
    own = weights[name]
    heads = _with_bias(jnp.einsum("btd,hed->bthe", x, own["weight"]), own)
    heads = shards.constrain(heads, "batch", "seq", "heads" if name == "q" else "kv_heads", "head_dim")
    return norm(heads, weights[f"{name}_norm"], traits) if f"{name}_norm" in weights else heads


def _turned(heads: Array, seen: Seen, traits: Traits) -> Array:
    return heads if seen.turns is None else rotate(heads, *seen.turns, traits.rotary_pairs == "neighbours")


def _with_bias(x: Array, weights: Mapping[str, Array]) -> Array:
    return x + weights["bias"] if "bias" in weights else x


def _matched(q: Array, met: KeysValues, shards: Shards) -> KeysValues:
    """Keys and values for each head of q where a mesh splits those, but is too wide for the grouped ones: each device
    then works on its own heads alone."""
    heads, groups = q.shape[2], met.keys.shape[2]
    if shards.parts("heads", heads) == shards.parts("kv_heads", groups):
        return met
    wide = (jnp.repeat(each, heads // groups, axis=2) for each in met)
    return KeysValues(*(shards.constrain(each, "batch", "seq", "heads", "head_dim") for each in wide))


def _mix(q: Array, met: KeysValues, traits: Traits, seen: Seen) -> Array:
    """[B, T, H, E]: of each query head the values of its group's head, weighted by softmax."""
    b, t, heads, dim = q.shape
    k, v = met
    groups = q.reshape(b, t, k.shape[2], heads // k.shape[2], dim)
    scores = jnp.einsum("btkge,bske->bkgts", groups, k, preferred_element_type=jnp.float32) * traits.score_scale
    if seen.score_factor is not None:
        scores = scores * seen.score_factor
    if traits.score_cap != NO_CAP:
        scores = traits.score_cap * jnp.tanh(scores / traits.score_cap)
    if seen.bias is not None:
        scores = scores + seen.bias.reshape(-1, *scores.shape[1:])
    if (visible := seen.visible()) is not None:
        scores = jnp.where(visible if visible.ndim == 2 else visible[:, None, None], scores, MASKED)
    shares = nn.softmax(scores, axis=-1).astype(v.dtype)
    return jnp.einsum("bkgts,bske->btkge", shares, v).reshape(b, t, heads, dim)
