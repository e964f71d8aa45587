"""A transformer layer: attention and MLP around the residual stream, with norms where the family has them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax import Array

from trainer.distributed.sharding import ShardingContext
from trainer.nn.activation_names import name_activation
from trainer.nn.attention import attention
from trainer.nn.attention_mask import KV, AttentionMask, EncoderOutput
from trainer.nn.context import LayerContext
from trainer.nn.dropout import Site
from trainer.nn.kv_cache import KVCache
from trainer.nn.mlp import mlp
from trainer.nn.moe import moe_mlp
from trainer.nn.norms import norm
from trainer.nn.token_chunks import map_token_chunks


def block(x: Array, weights: Mapping[str, Any], context: LayerContext) -> tuple[Array, KVCache | None]:
    """Run one layer: self-attention, cross-attention if there is an encoder, and the MLP.

    Args:
        x: Residual stream [B, T, D].
        weights: Weights of the layer.
        context: Architecture, mask, sharding, cache, encoder output and dropout. `block_type` of the architecture
            selects the order of norms and residual additions.

    Returns:
        The residual stream [B, T, D] after the layer, and the cache with the keys and values of `x`.
    """
    arch_config, sharding, encoder_output = context.arch_config, context.sharding, context.encoder_output

    def norm_weights(name: str) -> Mapping[str, Any]:
        return weights.get(name, {})

    def apply_norm(name: str, x: Array) -> Array:
        return norm(x, norm_weights(name), arch_config)

    def cross_attend(x: Array, encoder_output: EncoderOutput) -> Array:
        cross_context = dataclasses.replace(context, mask=_cross_mask(encoder_output, context), kv_cache=None)
        states, cross_norm = encoder_output.states, norm_weights("cross_norm")
        output = attention(x, weights["cross"], cross_context, input_norm=cross_norm, encoder_states=states)[0]
        return context.drop_residual(output, Site.CROSS_RESIDUAL)

    def feed_forward(x: Array, input_norm: Mapping[str, Any] | None, post_norm: str = "") -> Array:
        output = _feed_forward(x, {"mlp": weights["mlp"], "norm": input_norm}, context)
        return context.drop_residual(apply_norm(post_norm, output) if post_norm else output, Site.MLP_RESIDUAL)

    input_norm = None if arch_config.block_type == "post" else norm_weights("attn_norm")
    attended, kv_cache = attention(x, weights["attn"], context, input_norm=input_norm)
    if arch_config.block_type == "sandwich":
        attended = apply_norm("attn_post_norm", attended)
    attended = context.drop_residual(attended, Site.ATTENTION_RESIDUAL)
    match arch_config.block_type:
        case "pre":
            x = shard_residual(x + attended, sharding)
            if encoder_output is not None:
                x = shard_residual(x + cross_attend(x, encoder_output), sharding)
            x = x + feed_forward(x, norm_weights("mlp_norm"))
        case "post":
            x = shard_residual(apply_norm("attn_norm", x + attended), sharding)
            x = apply_norm("mlp_norm", x + feed_forward(x, None))
        case "parallel":
            x = x + attended + feed_forward(x, norm_weights("mlp_norm"))
        case "parallel_one_norm":
            x = x + attended + feed_forward(x, norm_weights("attn_norm"))
        case "sandwich":
            x = shard_residual(x + attended, sharding)
            x = x + feed_forward(x, norm_weights("mlp_norm"), "mlp_post_norm")
    return shard_residual(x, sharding), kv_cache


def _cross_mask(encoder_output: EncoderOutput, context: LayerContext) -> AttentionMask:
    """Return the mask of cross-attention; it has positions only if dropout needs them."""
    mask = AttentionMask(kv_valid=encoder_output.source_mask, is_causal=False)
    if context.dropout is None or isinstance(encoder_output.states, KV):
        return mask
    kv_positions = jnp.arange(encoder_output.states.shape[1])
    return dataclasses.replace(mask, q_positions=context.mask.q_positions, kv_positions=kv_positions)


def _feed_forward(x: Array, weights: Mapping[str, Any], context: LayerContext) -> Array:
    """Compute the MLP of [B, T, D] in chunks of tokens, after the norm of its input, if `norm` is not None."""
    arch_config, sharding = context.arch_config, context.sharding

    def run_chunk(x: Array, weights: Mapping[str, Any], constants: None) -> Array:
        x = x if weights["norm"] is None else norm(x, weights["norm"], arch_config)
        x = sharding.constrain(x, "batch", "seq", "embed")
        run_mlp = moe_mlp if arch_config.experts_per_token else mlp
        return run_mlp(x, weights["mlp"], arch_config=arch_config, sharding=sharding)

    num_shards = sharding.sequence_parallel_size
    output = map_token_chunks(run_chunk, x, weights, context.ffn_chunk_size, num_shards=num_shards)
    return name_activation(output, "mlp_output")


def shard_residual(x: Array, sharding: ShardingContext) -> Array:
    """Constrain the sharding of the residual stream [B, T, D] between layers."""
    return sharding.constrain(x, "batch", "residual_seq", "embed")
