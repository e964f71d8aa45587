"""A layer: attention and feed-forward part around the residual stream, with norms where the family has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jax import Array

from trainer.distributed.sharding import ShardingContext
from trainer.models.architecture import ArchConfig
from trainer.nn.attention import attention
from trainer.nn.attention_mask import AttentionMask, EncoderOutput, KVCache
from trainer.nn.mlp import mlp
from trainer.nn.moe import moe_mlp
from trainer.nn.norms import norm


def block(
    x: Array,
    weights: Mapping[str, Any],
    arch_config: ArchConfig,
    mask: AttentionMask,
    sharding: ShardingContext,
    kv_cache: KVCache | None = None,
    encoder_output: EncoderOutput | None = None,
) -> tuple[Array, KVCache | None]:
    """[B, T, D] -> [B, T, D], and the cache with the keys and values of these tokens; they look at the memory too."""

    def attend(x: Array) -> tuple[Array, KVCache | None]:
        whole = sharding.constrain(x, "batch", "seq", "embed")
        return attention(whole, weights["attn"], arch_config, mask, sharding, kv_cache)

    def look(x: Array, memory: EncoderOutput) -> Array:
        whole, all_of_it = sharding.constrain(x, "batch", "seq", "embed"), AttentionMask(kv_valid=memory.source_mask)
        return attention(whole, weights["cross"], arch_config, all_of_it, sharding, encoder_states=memory.states)[0]

    def feed(x: Array) -> Array:
        whole = sharding.constrain(x, "batch", "seq", "embed")
        part = moe_mlp if arch_config.experts_per_token else mlp
        return part(whole, weights["mlp"], arch_config, sharding)

    def normed(name: str, x: Array) -> Array:
        return norm(x, weights.get(name, {}), arch_config)

    taken = x if arch_config.block_type == "post" else normed("attn_norm", x)
    attended, kv_cache = attend(taken)
    match arch_config.block_type:
        case "pre":
            x = shard_residual(x + attended, sharding)
            if encoder_output is not None:
                x = shard_residual(x + look(normed("cross_norm", x), encoder_output), sharding)
            x = x + feed(normed("mlp_norm", x))
        case "post":
            x = shard_residual(normed("attn_norm", x + attended), sharding)
            x = normed("mlp_norm", x + feed(x))
        case "parallel":
            x = x + attended + feed(normed("mlp_norm", x))
        case "parallel_one_norm":
            x = x + attended + feed(taken)
        case "sandwich":
            x = shard_residual(x + normed("attn_post_norm", attended), sharding)
            x = x + normed("mlp_post_norm", feed(normed("mlp_norm", x)))
    return shard_residual(x, sharding), kv_cache


def shard_residual(x: Array, sharding: ShardingContext) -> Array:
    """The residual stream between blocks, told how to lie on the mesh."""
    return sharding.constrain(x, "batch", "residual_seq", "embed")
