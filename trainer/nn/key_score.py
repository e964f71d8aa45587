"""Scores of keys from their values, added to attention scores (dynamic mask attention, arXiv:2412.11834).

    score_ts = scale q_t . k_s + exp(a_j softplus(v_s W_j + b_j))     for the keys and values of head j

`v_s` has the values of all heads. The score of a key does not depend on the query, so the kernel gets it as one more
element of the key, which meets a 1 in each query:

    q_t' = [q_t, 1]        k_s' = [k_s, exp(...) / scale]

With more keys than `keep_window_size`, Doge drops those with the smallest scores. Such lengths are not supported.
Source: `DogeAttention` of transformers.

Axes: B rows of the batch, T queries, S keys, H query heads, K key and value heads, E head width.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, nn

from trainer.nn.attention_mask import KV
from trainer.nn.context import LayerContext
from trainer.nn.layer_weights import Projections
from trainer.nn.linear import linear

# Keys of the projection W, b and of the rates a among the weights of attention.
SCORE_STEP = "score_step"
SCORE_RATE = "score_rate"


def append_key_scores(
    q: Array, kv: KV, weights: Projections, context: LayerContext
) -> tuple[Array, KV]:
    """Append an element to queries and keys, so that their products include the scores of keys.

    Args:
        q: Queries [B, T, H, E].
        kv: Keys and values [B, S, K, E].
        weights: Weights of attention with SCORE_STEP and SCORE_RATE.
        context: Scale of attention, and sharding.

    Returns:
        Queries [B, T, H, E + 1], and keys [B, S, K, E + 1] with the same values.
    """
    sharding = context.sharding
    steps = nn.softplus(linear(kv.values, weights[SCORE_STEP], num_devices=sharding.num_devices))
    scores = jnp.exp(weights[SCORE_RATE]["weight"] * steps)
    scores = scores / jnp.asarray(context.arch_config.attn_scale, scores.dtype)
    keys = jnp.concatenate([kv.keys, scores[..., None]], axis=-1)
    ones = jnp.ones((*q.shape[:-1], 1), q.dtype)
    q = jnp.concatenate([q, ones], axis=-1)
    return (
        sharding.constrain(q, "batch", "seq", "heads", "head_dim"),
        KV(sharding.constrain(keys, "batch", "seq", "kv_heads", "head_dim"), kv.values),
    )
