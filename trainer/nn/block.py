"""A transformer layer: attention and MLP around the residual stream, with norms where the family has them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any

from jax import Array

from trainer.distributed.sharding import ShardingContext
from trainer.nn.attention import attention
from trainer.nn.attention_mask import AttentionMask, EncoderOutput, KVCache
from trainer.nn.context import LayerContext
from trainer.nn.mlp import mlp
from trainer.nn.moe import moe_mlp
from trainer.nn.norms import norm
from trainer.nn.token_chunks import map_token_chunks


def block(x: Array, weights: Mapping[str, Any], context: LayerContext) -> tuple[Array, KVCache | None]:
    """Run one layer: self-attention, cross-attention if there is an encoder, and the MLP.

    Args:
        x: Residual stream [B, T, D].
        weights: Weights of the layer.
        context: Architecture, mask, sharding, cache and encoder output. `block_type` of the architecture selects the
            order of norms and residual additions.

    Returns:
        The residual stream [B, T, D] after the layer, and the cache with the keys and values of `x`.
    """
    arch_config, sharding, encoder_output = context.arch_config, context.sharding, context.encoder_output

    def self_attend(x: Array) -> tuple[Array, KVCache | None]:
        return attention(sharding.constrain(x, "batch", "seq", "embed"), weights["attn"], context)

    def cross_attend(x: Array, encoder_output: EncoderOutput) -> Array:
        mask = AttentionMask(kv_valid=encoder_output.source_mask)
        cross_context = dataclasses.replace(context, mask=mask, kv_cache=None)
        x = sharding.constrain(x, "batch", "seq", "embed")
        return attention(x, weights["cross"], cross_context, encoder_output.states)[0]

    def feed_forward(x: Array) -> Array:
        x = sharding.constrain(x, "batch", "seq", "embed")
        run_mlp = partial(moe_mlp if arch_config.experts_per_token else mlp, arch_config=arch_config, sharding=sharding)
        return map_token_chunks(run_mlp, x, weights["mlp"], context.ffn_chunk_size)

    def apply_norm(name: str, x: Array) -> Array:
        return norm(x, weights.get(name, {}), arch_config)

    attn_input = x if arch_config.block_type == "post" else apply_norm("attn_norm", x)
    attended, kv_cache = self_attend(attn_input)
    match arch_config.block_type:
        case "pre":
            x = shard_residual(x + attended, sharding)
            if encoder_output is not None:
                x = shard_residual(x + cross_attend(apply_norm("cross_norm", x), encoder_output), sharding)
            x = x + feed_forward(apply_norm("mlp_norm", x))
        case "post":
            x = shard_residual(apply_norm("attn_norm", x + attended), sharding)
            x = apply_norm("mlp_norm", x + feed_forward(x))
        case "parallel":
            x = x + attended + feed_forward(apply_norm("mlp_norm", x))
        case "parallel_one_norm":
            x = x + attended + feed_forward(attn_input)
        case "sandwich":
            x = shard_residual(x + apply_norm("attn_post_norm", attended), sharding)
            x = x + apply_norm("mlp_post_norm", feed_forward(apply_norm("mlp_norm", x)))
    return shard_residual(x, sharding), kv_cache


def shard_residual(x: Array, sharding: ShardingContext) -> Array:
    """Constrain the sharding of the residual stream [B, T, D] between layers."""
    return sharding.constrain(x, "batch", "residual_seq", "embed")
