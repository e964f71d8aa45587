"""Multi-head attention with grouped key and value heads (arXiv:1706.03762, arXiv:2305.13245).

q = rotate(norm(x W_q)), k = rotate(norm(x W_k)), v = x W_v    norm and rotation are optional
attention(x) = attend(q, k, v) W_o

Axes: B rows of the batch, T queries, S keys, H query heads, K key and value heads, E head width,
D model width, R rotated elements of a head.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax import Array

from trainer.distributed.sharding import ShardingContext
from trainer.nn.activation_names import name_activation
from trainer.nn.attention_mask import KV, CosSin
from trainer.nn.context import LayerContext
from trainer.nn.dropout import DropoutSite
from trainer.nn.kernels import attend
from trainer.nn.kv_cache import KVCache
from trainer.nn.linear import linear
from trainer.nn.norms import norm
from trainer.nn.position_encoding import apply_rotary
from trainer.nn.token_chunks import TokenFunction, over_token_chunks

# Key in the weights of a chunk: the norm of the input, not of queries or keys.
INPUT_NORM = "input"


def attention(
    x: Array,
    weights: Mapping[str, Any],
    context: LayerContext,
    *,
    input_norm: Mapping[str, Array] | None = None,
    encoder_states: Array | KV | None = None,
) -> tuple[Array, KVCache | None]:
    """Compute self-attention or cross-attention.

    Projections run in chunks of `context.ffn_chunk_size` tokens. Between them and the kernel only
    queries, keys and values exist for all tokens.

    Args:
        x: Queries' hidden states [B, T, D].
        weights: Projections `q`, `k`, `v`, `o`, the optional norms `q_norm` and `k_norm`, and optional `sinks`.
        context: Mask, sharding, kernel, dropout, and the cache that the keys and values of `x` are
            appended to.
        input_norm: Weights of the norm of `x`. None skips the norm.
        encoder_states: For cross-attention the encoder's hidden states [B, S, D], or the keys and
            values that `project_kv` computed from them. None for self-attention.

    Returns:
        The attention output [B, T, D], and the cache with the keys and values of `x`.
    """
    sharding = context.sharding
    kv_cache = context.kv_cache
    is_self = encoder_states is None
    names = ("q", "k", "v") if is_self else ("q",)
    # q: [B, T, H, E], k and v: [B, T, K, E]
    project = _projection(names, context, num_tokens=x.shape[1])
    q, *own_kv = project(x, _select(weights, names, input_norm), _rotary_tables(context))
    if is_self:
        kv = KV(*own_kv)
    elif isinstance(encoder_states, KV):
        kv = encoder_states
    else:
        kv = project_kv(encoder_states, weights, context)
    # Keys enter the cache normed and rotated, so that no later step rotates them again.
    if kv_cache is not None:
        kv_cache, kv = kv_cache.append(kv, context.mask.window, sharding)
    q, kv = _name_kernel_inputs(q, _repeat_kv(q, kv, sharding))
    mask = context.mask
    if context.dropout is not None:
        site = DropoutSite.ATTENTION if is_self else DropoutSite.CROSS_ATTENTION
        mask = dataclasses.replace(mask, dropout=context.dropout.attention(site, q.shape[2]))
    if "sinks" in weights:
        mask = dataclasses.replace(mask, sinks=weights["sinks"]["bias"])
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

    # [B, T, H, E] -> [B, T, D]
    output = over_token_chunks(
        project_out,
        mixed.shape[1],
        context.ffn_chunk_size,
        num_shards=sharding.sequence_parallel_size,
    )(mixed, weights["o"], None)
    return name_activation(output, "o"), kv_cache


def project_kv(x: Array, weights: Mapping[str, Any], context: LayerContext) -> KV:
    """Project hidden states [B, S, D] to keys and values [B, S, K, E]. Keys are normed and rotated."""
    names = ("k", "v")
    project = _projection(names, context, num_tokens=x.shape[1])
    return KV(*project(x, _select(weights, names, None), _rotary_tables(context)))


def _projection(names: tuple[str, ...], context: LayerContext, *, num_tokens: int) -> TokenFunction:
    """Return a function that projects [B, T, D] to queries, keys or values, in chunks of tokens.

    Args:
        names: The projections, of "q", "k" and "v".
        context: Inputs of the layer.
        num_tokens: T.
    """
    arch_config = context.arch_config
    sharding = context.sharding
    is_interleaved = arch_config.rotary_pairs == "interleaved"

    def project_chunk(x: Array, weights: Mapping[str, Any], cos_sin: CosSin | None) -> list[Array]:
        if INPUT_NORM in weights:
            x = norm(x, weights[INPUT_NORM], arch_config)
        x = sharding.constrain(x, "batch", "seq", "embed")
        projected: list[Array] = []
        for name in names:
            heads = linear(x, weights[name], num_devices=sharding.num_devices)
            head_axis = "heads" if name == "q" else "kv_heads"
            heads = sharding.constrain(heads, "batch", "seq", head_axis, "head_dim")
            if f"{name}_norm" in weights:
                heads = norm(heads, weights[f"{name}_norm"], arch_config)
            if name != "v" and cos_sin is not None:
                heads = apply_rotary(heads, *cos_sin, is_interleaved=is_interleaved)
            projected.append(heads)
        return projected

    return over_token_chunks(
        project_chunk,
        num_tokens,
        context.ffn_chunk_size,
        num_shards=sharding.sequence_parallel_size,
    )


def _select(
    weights: Mapping[str, Any], names: tuple[str, ...], input_norm: Mapping[str, Array] | None
) -> dict[str, Any]:
    """Return the weights of some projections with their norms, and the norm of their input."""
    selected = {
        name: value for name, value in weights.items() if name.removesuffix("_norm") in names
    }
    if input_norm is not None:
        selected[INPUT_NORM] = input_norm
    return selected


def _rotary_tables(context: LayerContext) -> CosSin | None:
    """Return rotary cosine and sine [1 or B, T, R / 2]. None if there is no rotary embedding."""
    if context.mask.cos_sin is None:
        return None
    cosine, sine = context.mask.cos_sin
    if cosine.ndim == 2:
        return cosine[None], sine[None]
    return cosine, sine


def _name_kernel_inputs(q: Array, kv: KV) -> tuple[Array, KV]:
    """Name queries, keys and values, so that a rematerialization policy can save them."""
    q = name_activation(q, "q")
    return q, KV(name_activation(kv.keys, "k"), name_activation(kv.values, "v"))


def _repeat_kv(q: Array, kv: KV, sharding: ShardingContext) -> KV:
    """Repeat keys and values [B, S, K, E] to [B, S, H, E] if the mesh splits H into more shards than K.

    Each device then computes its own query heads without communication.
    """
    num_heads = q.shape[2]
    num_kv_heads = kv.keys.shape[2]
    if sharding.num_shards("heads", num_heads) == sharding.num_shards("kv_heads", num_kv_heads):
        return kv

    def repeat(array: Array) -> Array:
        repeated = jnp.repeat(array, num_heads // num_kv_heads, axis=2)
        return sharding.constrain(repeated, "batch", "seq", "heads", "head_dim")

    return KV(repeat(kv.keys), repeat(kv.values))
