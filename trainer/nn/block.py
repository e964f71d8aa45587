"""A transformer layer: attention and MLP around the residual stream, with norms where the family has them."""

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
    """Run one layer: self-attention, cross-attention if there is an encoder, and the MLP.

    Args:
        x: Residual stream [B, T, D].
        weights: Weights of the layer.
        arch_config: The choices of the layers; `block_type` selects the order of norms and residual additions.
        mask: Mask of self-attention.
        sharding: The device mesh and its rules.
        kv_cache: Cache that keys and values are appended to; None to attend to `x` alone.
        encoder_output: Input of cross-attention; None without an encoder.

    Returns:
        The residual stream [B, T, D] after the layer, and the cache with the keys and values of `x`.
    """

    def self_attend(x: Array) -> tuple[Array, KVCache | None]:
        x = sharding.constrain(x, "batch", "seq", "embed")
        return attention(x, weights["attn"], arch_config, mask, sharding, kv_cache)

    def cross_attend(x: Array, encoder_output: EncoderOutput) -> Array:
        x = sharding.constrain(x, "batch", "seq", "embed")
        cross_mask = AttentionMask(kv_valid=encoder_output.source_mask)
        states = encoder_output.states
        return attention(x, weights["cross"], arch_config, cross_mask, sharding, encoder_states=states)[0]

    def feed_forward(x: Array) -> Array:
        x = sharding.constrain(x, "batch", "seq", "embed")
        run_mlp = moe_mlp if arch_config.experts_per_token else mlp
        return run_mlp(x, weights["mlp"], arch_config, sharding)

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
