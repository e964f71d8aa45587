"""Multi-head attention with grouped key and value heads.

Axes: B rows of the batch, T queries, S keys, H query heads, K key and value heads, E head width, D model width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax import Array

from trainer.distributed.sharding import ShardingContext
from trainer.nn.attention_mask import KV, KVCache
from trainer.nn.context import LayerContext
from trainer.nn.kernels import KERNELS
from trainer.nn.linear import linear
from trainer.nn.norms import norm
from trainer.nn.position_encoding import apply_rotary


def attention(
    x: Array, weights: Mapping[str, Any], context: LayerContext, encoder_states: Array | KV | None = None
) -> tuple[Array, KVCache | None]:
    """Compute self-attention or cross-attention.

    Args:
        x: Queries' hidden states [B, T, D].
        weights: Projections `q`, `k`, `v`, `o`, and the optional norms `q_norm` and `k_norm`.
        context: Mask, sharding, kernel, and the cache that the keys and values of `x` are appended to.
        encoder_states: For cross-attention the encoder's hidden states [B, S, D], or the keys and values that
            `project_kv` computed from them; None for self-attention.

    Returns:
        The attention output [B, T, D], and the cache with the keys and values of `x`.
    """
    sharding, kv_cache = context.sharding, context.kv_cache
    q = _rotate_heads(_project_heads(x, weights, "q", context), context)  # [B, T, H, E]
    if isinstance(encoder_states, KV):
        kv = encoder_states
    else:
        kv = project_kv(x if encoder_states is None else encoder_states, weights, context)
    if kv_cache is not None:
        kv_cache, kv = kv_cache.append(kv, sharding)
    kernel = KERNELS[context.attention_options.kernel]
    kv = _repeat_kv(q, kv, sharding)
    mixed = kernel(q, kv, context.arch_config, context.mask, context.attention_options)
    mixed = sharding.constrain(mixed, "batch", "seq", "heads", "head_dim")
    return linear(mixed, weights["o"], "bthe,dhe->btd"), kv_cache


def project_kv(x: Array, weights: Mapping[str, Any], context: LayerContext) -> KV:
    """Project hidden states [B, S, D] to keys and values [B, S, K, E]; keys are normed and rotated."""
    keys = _rotate_heads(_project_heads(x, weights, "k", context), context)
    return KV(keys, _project_heads(x, weights, "v", context))


def _project_heads(x: Array, weights: Mapping[str, Any], name: str, context: LayerContext) -> Array:
    """Project [B, T, D] to queries, keys or values [B, T, H, E] and apply their norm, if there is one."""
    heads = linear(x, weights[name], "btd,hed->bthe")
    heads = context.sharding.constrain(heads, "batch", "seq", "heads" if name == "q" else "kv_heads", "head_dim")
    return norm(heads, weights[f"{name}_norm"], context.arch_config) if f"{name}_norm" in weights else heads


def _rotate_heads(heads: Array, context: LayerContext) -> Array:
    """Apply the rotary embedding to [B, T, H, E], if the layer has one."""
    if context.mask.cos_sin is None:
        return heads
    return apply_rotary(heads, *context.mask.cos_sin, is_interleaved=context.arch_config.rotary_pairs == "interleaved")


def _repeat_kv(q: Array, kv: KV, sharding: ShardingContext) -> KV:
    """Repeat keys and values [B, S, K, E] to [B, S, H, E] if the mesh splits query heads into more shards.

    Each device then computes its own query heads without communication.
    """
    num_heads, num_kv_heads = q.shape[2], kv.keys.shape[2]
    if sharding.num_shards("heads", num_heads) == sharding.num_shards("kv_heads", num_kv_heads):
        return kv
    repeated = (jnp.repeat(array, num_heads // num_kv_heads, axis=2) for array in kv)
    return KV(*(sharding.constrain(array, "batch", "seq", "heads", "head_dim") for array in repeated))
