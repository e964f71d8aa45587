"""Causal self-attention with grouped key and value heads and windows; scores in float32."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax import Array, nn

from trainer.layers.norms import norm
from trainer.layers.positions import rotate
from trainer.sharding import Shards
from trainer.traits import ALL_BEFORE, NO_CAP, Traits

MASKED = -1e30  # finite: a difference of two of them is 0, not nan


def attention(
    x: Array, weights: Mapping[str, Any], traits: Traits, window: int, turns: tuple[Array, Array] | None, shards: Shards
) -> Array:
    """[B, T, D] -> [B, T, D]. `turns`: cosine and sine of rotary positions. Queries and keys have a norm where there
    are weights for it."""
    q, k, v = (_heads(x, weights[name], shards, name) for name in ("q", "k", "v"))
    if "q_norm" in weights:
        q, k = norm(q, weights["q_norm"], traits), norm(k, weights["k_norm"], traits)
    if turns is not None:
        q, k = (rotate(each, *turns, traits.rotary_pairs == "neighbours") for each in (q, k))
    mixed = _mix(q, *_matched(q, k, v, shards), traits, window)
    mixed = shards.constrain(mixed, "batch", "seq", "heads", "head_dim")
    out = weights["o"]
    return _with_bias(jnp.einsum("bthe,dhe->btd", mixed, out["weight"]), out)


def _heads(x: Array, weights: Mapping[str, Array], shards: Shards, name: str) -> Array:
    heads = _with_bias(jnp.einsum("btd,hed->bthe", x, weights["weight"]), weights)
    return shards.constrain(heads, "batch", "seq", "heads" if name == "q" else "kv_heads", "head_dim")


def _with_bias(x: Array, weights: Mapping[str, Array]) -> Array:
    return x + weights["bias"] if "bias" in weights else x


def _matched(q: Array, k: Array, v: Array, shards: Shards) -> tuple[Array, Array]:
    """k and v for each head of q where a mesh splits those, but is too wide for the grouped ones: each device then
    works on its own heads alone."""
    if shards.parts("heads", q.shape[2]) == shards.parts("kv_heads", k.shape[2]):
        return k, v
    times = q.shape[2] // k.shape[2]
    k, v = (shards.constrain(jnp.repeat(each, times, axis=2), "batch", "seq", "heads", "head_dim") for each in (k, v))
    return k, v


def _mix(q: Array, k: Array, v: Array, traits: Traits, window: int) -> Array:
    """[B, T, H, E]: of each query head the values of its group's head, weighted by softmax."""
    b, t, heads, dim = q.shape
    groups = q.reshape(b, t, k.shape[2], heads // k.shape[2], dim)
    scores = jnp.einsum("btkge,bske->bkgts", groups, k, preferred_element_type=jnp.float32) * traits.score_scale
    if traits.score_cap != NO_CAP:
        scores = traits.score_cap * jnp.tanh(scores / traits.score_cap)
    scores = jnp.where(_visible(t, window), scores, MASKED)
    shares = nn.softmax(scores, axis=-1).astype(v.dtype)
    return jnp.einsum("bkgts,bske->btkge", shares, v).reshape(b, t, heads, dim)


def _visible(length: int, window: int) -> Array:
    """[T, T]: whether a query sees a key, both by position."""
    distance = jnp.arange(length)[:, None] - jnp.arange(length)[None, :]
    seen = distance >= 0
    return seen if window == ALL_BEFORE else seen & (distance < window)
