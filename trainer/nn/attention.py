"""Attention with grouped key and value heads, to the same tokens, to kept ones, or to a memory; scores in float32."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax import Array, nn

from trainer.distributed.sharding import ShardingContext
from trainer.models.architecture import NO_SOFTCAP, ArchConfig
from trainer.nn.attention_mask import KV, AttentionMask, KVCache
from trainer.nn.norms import norm
from trainer.nn.position_encoding import apply_rotary

MASKED_SCORE = -1e30  # finite: a difference of two of them is 0, not nan


def attention(
    x: Array,
    weights: Mapping[str, Any],
    arch_config: ArchConfig,
    mask: AttentionMask,
    sharding: ShardingContext,
    kv_cache: KVCache | None = None,
    encoder_states: Array | KV | None = None,
) -> tuple[Array, KVCache | None]:
    """[B, T, D] -> [B, T, D], and the cache with what `x` adds to it.

    Keys and values are those of `x`; with a cache those of all its slots; with a memory its own, which is [B, S, D], or
    what `keys_values` makes of that. Queries and keys have a norm where there are weights for it.
    """
    q = _rotate_heads(_project_heads(x, weights, "q", arch_config, sharding), mask, arch_config)
    if isinstance(encoder_states, KV):
        met = encoder_states
    else:
        met = project_kv(x if encoder_states is None else encoder_states, weights, arch_config, mask, sharding)
    if kv_cache is not None:
        kv_cache, met = kv_cache.append(met, sharding)
    mixed = _dot_product_attention(q, _repeat_kv(q, met, sharding), arch_config, mask)
    mixed = sharding.constrain(mixed, "batch", "seq", "heads", "head_dim")
    out = weights["o"]
    return _add_bias(jnp.einsum("bthe,dhe->btd", mixed, out["weight"]), out), kv_cache


def project_kv(
    x: Array, weights: Mapping[str, Any], arch_config: ArchConfig, mask: AttentionMask, sharding: ShardingContext
) -> KV:
    """What [B, S, D] is to queries."""
    keys = _rotate_heads(_project_heads(x, weights, "k", arch_config, sharding), mask, arch_config)
    return KV(keys, _project_heads(x, weights, "v", arch_config, sharding))


def _project_heads(
    x: Array, weights: Mapping[str, Any], name: str, arch_config: ArchConfig, sharding: ShardingContext
) -> Array:
    """[B, T, D] -> [B, T, H, E]: queries, keys or values, normed where there is a norm for them."""
    own = weights[name]
    heads = _add_bias(jnp.einsum("btd,hed->bthe", x, own["weight"]), own)
    heads = sharding.constrain(heads, "batch", "seq", "heads" if name == "q" else "kv_heads", "head_dim")
    return norm(heads, weights[f"{name}_norm"], arch_config) if f"{name}_norm" in weights else heads


def _rotate_heads(heads: Array, mask: AttentionMask, arch_config: ArchConfig) -> Array:
    return (
        heads if mask.cos_sin is None else apply_rotary(heads, *mask.cos_sin, arch_config.rotary_pairs == "interleaved")
    )


def _add_bias(x: Array, weights: Mapping[str, Array]) -> Array:
    return x + weights["bias"] if "bias" in weights else x


def _repeat_kv(q: Array, kv: KV, sharding: ShardingContext) -> KV:
    """Keys and values for each head of q where a mesh splits those, but is too wide for the grouped ones: each device
    then works on its own heads alone."""
    heads, groups = q.shape[2], kv.keys.shape[2]
    if sharding.num_shards("heads", heads) == sharding.num_shards("kv_heads", groups):
        return kv
    wide = (jnp.repeat(each, heads // groups, axis=2) for each in kv)
    return KV(*(sharding.constrain(each, "batch", "seq", "heads", "head_dim") for each in wide))


def _dot_product_attention(q: Array, kv: KV, arch_config: ArchConfig, mask: AttentionMask) -> Array:
    """[B, T, H, E]: of each query head the values of its group's head, weighted by softmax."""
    b, t, heads, dim = q.shape
    k, v = kv
    groups = q.reshape(b, t, k.shape[2], heads // k.shape[2], dim)
    scores = jnp.einsum("btkge,bske->bkgts", groups, k, preferred_element_type=jnp.float32) * arch_config.attn_scale
    if mask.layer_score_scale is not None:
        scores = scores * mask.layer_score_scale
    if arch_config.attn_logit_softcap != NO_SOFTCAP:
        scores = arch_config.attn_logit_softcap * jnp.tanh(scores / arch_config.attn_logit_softcap)
    if mask.bias is not None:
        scores = scores + mask.bias.reshape(-1, *scores.shape[1:])
    if (visible := mask.materialize()) is not None:
        scores = jnp.where(visible if visible.ndim == 2 else visible[:, None, None], scores, MASKED_SCORE)
    shares = nn.softmax(scores, axis=-1).astype(v.dtype)
    return jnp.einsum("bkgts,bske->btkge", shares, v).reshape(b, t, heads, dim)
