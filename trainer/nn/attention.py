"""Multi-head attention with grouped key and value heads; scores and softmax are computed in float32.

Axes: B rows of the batch, T queries, S keys, H query heads, K key and value heads, E head width, D model width.
"""

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

MASKED_SCORE = -1e30  # finite, so that the softmax of a row without any visible key is not nan


def attention(
    x: Array,
    weights: Mapping[str, Any],
    arch_config: ArchConfig,
    mask: AttentionMask,
    sharding: ShardingContext,
    kv_cache: KVCache | None = None,
    encoder_states: Array | KV | None = None,
) -> tuple[Array, KVCache | None]:
    """Compute self-attention or cross-attention.

    Args:
        x: Queries' hidden states [B, T, D].
        weights: Projections `q`, `k`, `v`, `o`, and the optional norms `q_norm` and `k_norm`.
        arch_config: The choices of the layers.
        mask: Visible keys, rotary embedding and score bias.
        sharding: The device mesh and its rules.
        kv_cache: Cache that the keys and values of `x` are appended to; None to attend to `x` alone.
        encoder_states: For cross-attention the encoder's hidden states [B, S, D], or the keys and values that
            `project_kv` computed from them; None for self-attention.

    Returns:
        The attention output [B, T, D], and the cache with the keys and values of `x`.
    """
    q = _rotate_heads(_project_heads(x, weights, "q", arch_config, sharding), mask, arch_config)  # [B, T, H, E]
    if isinstance(encoder_states, KV):
        kv = encoder_states
    else:
        kv = project_kv(x if encoder_states is None else encoder_states, weights, arch_config, mask, sharding)
    if kv_cache is not None:
        kv_cache, kv = kv_cache.append(kv, sharding)
    mixed = _dot_product_attention(q, _repeat_kv(q, kv, sharding), arch_config, mask)
    mixed = sharding.constrain(mixed, "batch", "seq", "heads", "head_dim")
    out = weights["o"]
    return _add_bias(jnp.einsum("bthe,dhe->btd", mixed, out["weight"]), out), kv_cache


def project_kv(
    x: Array, weights: Mapping[str, Any], arch_config: ArchConfig, mask: AttentionMask, sharding: ShardingContext
) -> KV:
    """Project hidden states [B, S, D] to keys and values [B, S, K, E]; keys are normed and rotated."""
    keys = _rotate_heads(_project_heads(x, weights, "k", arch_config, sharding), mask, arch_config)
    return KV(keys, _project_heads(x, weights, "v", arch_config, sharding))


def _project_heads(
    x: Array, weights: Mapping[str, Any], name: str, arch_config: ArchConfig, sharding: ShardingContext
) -> Array:
    """Project [B, T, D] to queries, keys or values [B, T, H, E] and apply their norm, if there is one."""
    projection = weights[name]
    heads = _add_bias(jnp.einsum("btd,hed->bthe", x, projection["weight"]), projection)
    heads = sharding.constrain(heads, "batch", "seq", "heads" if name == "q" else "kv_heads", "head_dim")
    return norm(heads, weights[f"{name}_norm"], arch_config) if f"{name}_norm" in weights else heads


def _rotate_heads(heads: Array, mask: AttentionMask, arch_config: ArchConfig) -> Array:
    """Apply the rotary embedding to [B, T, H, E], if the layer has one."""
    if mask.cos_sin is None:
        return heads
    return apply_rotary(heads, *mask.cos_sin, is_interleaved=arch_config.rotary_pairs == "interleaved")


def _add_bias(x: Array, weights: Mapping[str, Array]) -> Array:
    """Add the projection's bias, if it has one."""
    return x + weights["bias"] if "bias" in weights else x


def _repeat_kv(q: Array, kv: KV, sharding: ShardingContext) -> KV:
    """Repeat keys and values [B, S, K, E] to [B, S, H, E] if the mesh splits query heads into more shards.

    Each device then computes its own query heads without communication.
    """
    num_heads, num_kv_heads = q.shape[2], kv.keys.shape[2]
    if sharding.num_shards("heads", num_heads) == sharding.num_shards("kv_heads", num_kv_heads):
        return kv
    repeated = (jnp.repeat(array, num_heads // num_kv_heads, axis=2) for array in kv)
    return KV(*(sharding.constrain(array, "batch", "seq", "heads", "head_dim") for array in repeated))


def _dot_product_attention(q: Array, kv: KV, arch_config: ArchConfig, mask: AttentionMask) -> Array:
    """Compute softmax(q k^T * scale) v in float32, as [B, T, H, E].

    In einsum subscripts `k` is a key and value head and `g` a query head of its group.
    """
    b, t, num_heads, head_dim = q.shape
    k, v = kv
    grouped_q = q.reshape(b, t, k.shape[2], num_heads // k.shape[2], head_dim)
    scores = jnp.einsum("btkge,bske->bkgts", grouped_q, k, preferred_element_type=jnp.float32)
    scores = scores * arch_config.attn_scale
    if mask.layer_score_scale is not None:
        scores = scores * mask.layer_score_scale
    if arch_config.attn_logit_softcap != NO_SOFTCAP:
        scores = arch_config.attn_logit_softcap * jnp.tanh(scores / arch_config.attn_logit_softcap)
    if mask.bias is not None:
        scores = scores + mask.bias.reshape(-1, *scores.shape[1:])
    if (visible := mask.materialize()) is not None:
        scores = jnp.where(visible if visible.ndim == 2 else visible[:, None, None], scores, MASKED_SCORE)
    probabilities = nn.softmax(scores, axis=-1).astype(v.dtype)
    return jnp.einsum("bkgts,bske->btkge", probabilities, v).reshape(b, t, num_heads, head_dim)
