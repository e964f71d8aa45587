"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1, equations 9 to 19).

c = norm(x W_kv_down)                        the latent of keys and values, one per token for all heads
r = rotate(x W_k_rope)                       the rotated part of the keys, shared by all heads
[k_h, v_h] = c W_kv_up,h                     per head h
q_h = norm(x W_q_down) W_q_up,h              or x W_q,h without a latent of queries
score_h = [q_h, rotate(q'_h)] . [k_h, r]     q'_h is the last part of each query
output = [p_1 v_1, ..., p_H v_H] W_o

The KV cache holds c and r only. Each step computes the keys and values of all tokens from them.

Axes: B rows of the batch, T queries, S keys, H heads, E width of queries and keys, V width of values, P rotated
elements, C width of the latent, D model width.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax.numpy as jnp
from jax import Array

from prepcli.models.architecture import ArchConfig
from trainer.distributed.sharding import UNSPLIT
from trainer.nn.attention_mask import KV
from trainer.nn.attention_steps import INPUT_NORM, attend_and_project, rotary_tables
from trainer.nn.context import LayerContext
from trainer.nn.kv_cache import KVCache
from trainer.nn.layer_weights import Leaves, Projections
from trainer.nn.linear import linear
from trainer.nn.norms import norm
from trainer.nn.position_encoding import CosSin, apply_rotary
from trainer.nn.token_chunks import TokenFunction, over_token_chunks

PROJECTIONS = ("q", "q_down", "q_latent_norm", "q_up", "kv_down", "kv_latent_norm", "k_rope")


def latent_attention(
    x: Array,
    weights: Projections,
    context: LayerContext,
    *,
    input_norm: Leaves | None = None,
) -> tuple[Array, KVCache | None]:
    """Compute self-attention whose keys and values come from a latent.

    Args:
        x: Hidden states [B, T, D].
        weights: PROJECTIONS, `kv_up` and `o`. Either `q`, or `q_down`, `q_latent_norm` and `q_up`.
        context: Mask, sharding, kernel, dropout, and the cache that the latents of `x` are appended to.
        input_norm: Weights of the norm of `x`. None skips the norm.

    Returns:
        The attention output [B, T, D], and the cache with the latents of `x`.
    """
    sharding = context.sharding
    kv_cache = context.kv_cache
    selected = {name: weights[name] for name in PROJECTIONS if name in weights}
    if input_norm is not None:
        selected[INPUT_NORM] = input_norm
    # q: [B, T, H, E], latent: [B, T, 1, C], k_rope: [B, T, 1, P]
    q, latent, k_rope = _projection(context, num_tokens=x.shape[1])(
        x, selected, rotary_tables(context)
    )
    compressed = KV(latent, k_rope)
    if kv_cache is not None:
        kv_cache, compressed = kv_cache.append(compressed, context.mask.window, sharding)
    expand = over_token_chunks(
        _expansion(context),
        compressed.keys.shape[1],
        context.ffn_chunk_size,
        num_shards=sharding.sequence_parallel_size,
    )
    kv = KV(*expand(compressed, weights["kv_up"], None))
    return attend_and_project(q, kv, weights, context), kv_cache


def _projection(context: LayerContext, *, num_tokens: int) -> TokenFunction:
    """Return a function that projects [B, T, D] to queries, latents and shared keys, in chunks of tokens."""
    arch_config = context.arch_config
    sharding = context.sharding
    num_devices = sharding.num_devices
    is_interleaved = arch_config.rotary_pairs == "interleaved"
    latent_norm = dataclasses.replace(arch_config, norm_eps=arch_config.latent_norm_eps)

    def project_chunk(x: Array, weights: Projections, cos_sin: CosSin | None) -> list[Array]:
        assert cos_sin is not None
        if INPUT_NORM in weights:
            x = norm(x, weights[INPUT_NORM], arch_config)
        x = sharding.constrain(x, "batch", "seq", "embed")
        latent = linear(x, weights["kv_down"], num_devices=num_devices)
        latent = norm(latent, weights["kv_latent_norm"], latent_norm)
        latent = sharding.constrain(latent, "batch", "seq", UNSPLIT)[:, :, None]
        k_rope = linear(x, weights["k_rope"], num_devices=num_devices)
        k_rope = sharding.constrain(k_rope, "batch", "seq", UNSPLIT)[:, :, None]
        k_rope = apply_rotary(k_rope, cos_sin.cosine, cos_sin.sine, is_interleaved=is_interleaved)
        q = _queries(x, weights, latent_norm, num_devices)
        q = sharding.constrain(q, "batch", "seq", "heads", "head_dim")
        plain, rotated = jnp.split(q, [q.shape[-1] - k_rope.shape[-1]], axis=-1)
        rotated = apply_rotary(rotated, cos_sin.cosine, cos_sin.sine, is_interleaved=is_interleaved)
        q = jnp.concatenate([plain, rotated], axis=-1)
        if cos_sin.query_scale is not None:
            q = q * cos_sin.query_scale[..., None].astype(q.dtype)
        return [q, latent, k_rope]

    return over_token_chunks(
        project_chunk,
        num_tokens,
        context.ffn_chunk_size,
        num_shards=sharding.sequence_parallel_size,
    )


def _queries(x: Array, weights: Projections, latent_norm: ArchConfig, num_devices: int) -> Array:
    """Project [B, T, D] to queries [B, T, H, E], directly or by a latent."""
    if "q" in weights:
        return linear(x, weights["q"], num_devices=num_devices)
    latent = linear(x, weights["q_down"], num_devices=num_devices)
    latent = norm(latent, weights["q_latent_norm"], latent_norm)
    return linear(latent, weights["q_up"], num_devices=num_devices)


def _expansion(context: LayerContext) -> TokenFunction:
    """Return a function that computes keys [B, S, H, E] and values [B, S, H, V] of latents and shared keys."""
    sharding = context.sharding

    def expand_chunk(
        compressed: KV, kv_up: Mapping[str, Array], constants: None
    ) -> tuple[Array, Array]:
        latent, k_rope = compressed
        expanded = linear(latent[:, :, 0], kv_up, num_devices=sharding.num_devices)
        expanded = sharding.constrain(expanded, "batch", "seq", "heads", "head_dim")
        # The last V of [B, S, H, E - P + V] are values.
        keys, values = jnp.split(expanded, [context.arch_config.latent_key_dim], axis=-1)
        shared = jnp.broadcast_to(k_rope, (*keys.shape[:-1], k_rope.shape[-1]))
        return jnp.concatenate([keys, shared], axis=-1), values

    return expand_chunk
