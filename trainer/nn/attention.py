"""Multi-head attention with grouped key and value heads.

Axes: B rows of the batch, T queries, S keys, H query heads, K key and value heads, E head width, D model width.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax import Array

from trainer.distributed.sharding import ShardingContext
from trainer.models.architecture import ArchConfig
from trainer.nn.activation_names import name_activation
from trainer.nn.attention_mask import KV, CosSin
from trainer.nn.context import LayerContext
from trainer.nn.dropout import Site
from trainer.nn.kernels import attend
from trainer.nn.kv_cache import KVCache
from trainer.nn.linear import linear
from trainer.nn.norms import norm
from trainer.nn.position_encoding import apply_rotary
from trainer.nn.token_chunks import map_token_chunks

INPUT_NORM = "input"  # in the weights of a chunk: the norm of the input, not of queries or keys


def attention(
    x: Array,
    weights: Mapping[str, Any],
    context: LayerContext,
    *,
    input_norm: Mapping[str, Array] | None = None,
    encoder_states: Array | KV | None = None,
) -> tuple[Array, KVCache | None]:
    """Compute self-attention or cross-attention.

    Projections run in chunks of `context.ffn_chunk_size` tokens: between them and the kernel only queries, keys and
    values exist for all tokens.

    Args:
        x: Queries' hidden states [B, T, D].
        weights: Projections `q`, `k`, `v`, `o`, and the optional norms `q_norm` and `k_norm`.
        context: Mask, sharding, kernel, dropout, and the cache that the keys and values of `x` are appended to.
        input_norm: Weights of the norm of `x`; None if `x` is not to be normed.
        encoder_states: For cross-attention the encoder's hidden states [B, S, D], or the keys and values that
            `project_kv` computed from them; None for self-attention.

    Returns:
        The attention output [B, T, D], and the cache with the keys and values of `x`.
    """
    sharding, kv_cache = context.sharding, context.kv_cache
    if encoder_states is None:
        q, *own_kv = _project(x, weights, context, ("q", "k", "v"), input_norm=input_norm)
        kv = KV(*own_kv)
    else:
        (q,) = _project(x, weights, context, ("q",), input_norm=input_norm)
        kv = encoder_states if isinstance(encoder_states, KV) else project_kv(encoder_states, weights, context)
    if kv_cache is not None:
        kv_cache, kv = kv_cache.append(kv, context.mask.window, sharding)
    q, kv = _name_kernel_inputs(q, _repeat_kv(q, kv, sharding))
    mask = context.mask
    if context.dropout is not None:
        site = Site.ATTENTION if encoder_states is None else Site.CROSS_ATTENTION
        mask = dataclasses.replace(mask, dropout=context.dropout.attention(site, q.shape[2]))
    mixed = attend(
        q,
        kv,
        arch_config=context.arch_config,
        mask=mask,
        options=context.attention_options,
        sharding=sharding,
    )
    mixed = sharding.constrain(mixed, "batch", "seq", "heads", "head_dim")

    def project_out(mixed: Array, weights: Mapping[str, Array], constants: None) -> Array:
        return linear(mixed, weights, num_devices=sharding.num_devices)

    num_shards = sharding.sequence_parallel_size
    output = map_token_chunks(project_out, mixed, weights["o"], context.ffn_chunk_size, num_shards=num_shards)
    return name_activation(output, "o"), kv_cache


def project_kv(x: Array, weights: Mapping[str, Any], context: LayerContext) -> KV:
    """Project hidden states [B, S, D] to keys and values [B, S, K, E]; keys are normed and rotated."""
    return KV(*_project(x, weights, context, ("k", "v")))


def _project(
    x: Array,
    weights: Mapping[str, Any],
    context: LayerContext,
    names: tuple[str, ...],
    *,
    input_norm: Mapping[str, Array] | None = None,
) -> list[Array]:
    """Project [B, T, D] to queries, keys or values [B, T, H, E] by their names, in chunks of tokens."""
    arch_config, sharding = context.arch_config, context.sharding

    def project_chunk(x: Array, weights: Mapping[str, Any], cos_sin: CosSin | None) -> list[Array]:
        if INPUT_NORM in weights:
            x = norm(x, weights[INPUT_NORM], arch_config)
        x = sharding.constrain(x, "batch", "seq", "embed")
        return [_project_heads(x, weights, name, cos_sin, arch_config, sharding) for name in names]

    used = {name: value for name, value in weights.items() if name.removesuffix("_norm") in names}
    if input_norm is not None:
        used[INPUT_NORM] = input_norm
    cos_sin = context.mask.cos_sin  # of all rows together or of each row -> [1 or B, T, R / 2]
    if cos_sin is not None:
        cos_sin = tuple(table if table.ndim == 3 else table[None] for table in cos_sin)
    num_shards = sharding.sequence_parallel_size
    return map_token_chunks(project_chunk, x, used, context.ffn_chunk_size, cos_sin, num_shards=num_shards)


def _project_heads(
    x: Array,
    weights: Mapping[str, Any],
    name: str,
    cos_sin: CosSin | None,
    arch_config: ArchConfig,
    sharding: ShardingContext,
) -> Array:
    """Project [B, T, D] to queries, keys or values [B, T, H, E], norm them if they have a norm, and rotate them."""
    heads = linear(x, weights[name], num_devices=sharding.num_devices)
    heads = sharding.constrain(heads, "batch", "seq", "heads" if name == "q" else "kv_heads", "head_dim")
    if f"{name}_norm" in weights:
        heads = norm(heads, weights[f"{name}_norm"], arch_config)
    if name == "v" or cos_sin is None:
        return heads
    return apply_rotary(heads, *cos_sin, is_interleaved=arch_config.rotary_pairs == "interleaved")


def _name_kernel_inputs(q: Array, kv: KV) -> tuple[Array, KV]:
    """Name queries, keys and values, so that a rematerialization policy can save them."""
    return name_activation(q, "q"), KV(name_activation(kv.keys, "k"), name_activation(kv.values, "v"))


def _repeat_kv(q: Array, kv: KV, sharding: ShardingContext) -> KV:
    """Repeat keys and values [B, S, K, E] to [B, S, H, E] if the mesh splits query heads into more shards.

    Each device then computes its own query heads without communication.
    """
    num_heads, num_kv_heads = q.shape[2], kv.keys.shape[2]
    if sharding.num_shards("heads", num_heads) == sharding.num_shards("kv_heads", num_kv_heads):
        return kv
    repeated = (jnp.repeat(array, num_heads // num_kv_heads, axis=2) for array in kv)
    return KV(*(sharding.constrain(array, "batch", "seq", "heads", "head_dim") for array in repeated))
