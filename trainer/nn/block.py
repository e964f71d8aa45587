"""Transformer layers: attention, recurrent mixers and MLP around the residual stream.

`BLOCKS` has a function for each `block_type` of an architecture. They differ in the order of norms
and residual additions. Each reads top to bottom as the formula in its docstring.

Axes: B rows of the batch, T tokens, D model width, F hidden units, P width of the per-layer embedding.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial

import jax.numpy as jnp
from jax import Array, lax

from prepcli.models.architecture import BlockType
from trainer.distributed.sharding import UNSPLIT, ShardingContext
from trainer.nn.attention import attention
from trainer.nn.attention_mask import KV, AttentionMask, EncoderOutput
from trainer.nn.cache import KVCache
from trainer.nn.context import LayerContext
from trainer.nn.dropout import DropoutSite
from trainer.nn.mixers import recurrent_mixer
from trainer.nn.mlp import ACTIVATION_FUNCTIONS, INPUT_NORM, chunk_input, mlp
from trainer.nn.model_spec import name_activation
from trainer.nn.moe import moe_mlp
from trainer.nn.projections import (
    NO_PARAMETERS,
    BlockWeights,
    Leaves,
    MoeWeights,
    Projections,
    linear,
    norm,
)
from trainer.nn.token_chunks import over_token_chunks

# The feed-forward part of a layer: the MLP, or the experts of an MoE layer, after an optional norm.
#
# down(activation(up(x))), or down(activation(gate(x)) * up(x)) if it is gated (arXiv:2002.05202).


def feed_forward(
    x: Array,
    weights: Projections | MoeWeights,
    context: LayerContext,
    *,
    input_norm: Leaves | None = None,
) -> Array:
    """Compute the MLP or the experts of [B, T, D] in chunks of `context.ffn_chunk_size` tokens.

    Args:
        x: Input [B, T, D].
        weights: Projections `up`, `down` and, if it is gated, `gate`. Experts have a `router` too.
        context: Architecture and sharding of the layer.
        input_norm: Weights of the norm of `x`. None skips the norm.

    Returns:
        [B, T, D].
    """
    arch_config = context.arch_config
    sharding = context.sharding

    def run_experts(x: Array, weights: MoeWeights, constants: None) -> Array:
        normed = chunk_input(x, weights, arch_config, sharding)
        router_input = x if arch_config.router.has_own_norm else normed
        return moe_mlp(normed, weights, arch_config, sharding, router_input=router_input)

    # A model with experts may have dense layers too.
    if "router" in weights:
        run_chunk = run_experts
    else:
        run_chunk = partial(mlp, arch_config=arch_config, sharding=sharding)
    chunk_weights: Mapping[str, object] = weights
    if input_norm is not None:
        chunk_weights = {**weights, INPUT_NORM: input_norm}
    run_tokens = over_token_chunks(
        run_chunk,
        x.shape[1],
        context.ffn_chunk_size,
        num_shards=sharding.sequence_parallel_size,
    )
    output = run_tokens(x, chunk_weights, None)
    return name_activation(output, "mlp_output")


# The gated per-layer embedding of Gemma 3n and Gemma 4: an input of each layer beside the residual stream.
#
# update = norm(W_out (activation(W_gate x) * per_layer_embedding))


def input_update(x: Array, weights: Projections, context: LayerContext) -> Array:
    """Compute the update [B, T, D] of the residual stream from the per-layer embeddings of the tokens.

    Args:
        x: Residual stream [B, T, D].
        weights: Projections `gate` [P, D] and `output` [D, P], and the norm `output_norm`.
        context: Architecture and sharding of the layer. `layer_input` has the per-layer embeddings [B, T, P].
    """
    arch_config = context.arch_config
    sharding = context.sharding
    activate = ACTIVATION_FUNCTIONS[arch_config.activation]

    def run_chunk(inputs: list[Array], weights: Projections, constants: None) -> Array:
        x, layer_input = inputs
        x = sharding.constrain(x, "batch", "seq", "embed")
        layer_input = sharding.constrain(layer_input, "batch", "seq", UNSPLIT)
        gate = linear(x, weights["gate"], num_devices=sharding.num_devices)
        hidden = activate(gate) * layer_input
        update = linear(hidden, weights["output"], num_devices=sharding.num_devices)
        return norm(update, weights["output_norm"], arch_config)

    assert context.layer_input is not None
    run_tokens = over_token_chunks(
        run_chunk,
        x.shape[1],
        context.ffn_chunk_size,
        num_shards=sharding.sequence_parallel_size,
    )
    return run_tokens([x, context.layer_input], weights, None)


# (residual stream [B, T, D], weights of the layer, context) -> the stream after the layer, and the
# KV cache with the keys and values of the layer
Block = Callable[[Array, BlockWeights, LayerContext], tuple[Array, KVCache | None]]


def pre_norm_block(
    x: Array, weights: BlockWeights, context: LayerContext
) -> tuple[Array, KVCache | None]:
    """Normalize the input of each sublayer (GPT-2, LLaMA, T5; arXiv:2002.04745, figure 1b).

    x = x + attention(norm(x))          or a recurrent mixer in place of attention, or the sum of both
    x = x + cross_attention(norm(x))    in the decoder of a model with an encoder
    x = x + mlp(norm(x))                if the layer has an MLP

    In Doge x is multiplied elementwise by a learned vector before each addition.
    """
    attn_norm = weights.get("attn_norm", NO_PARAMETERS)
    if "mixer" in weights:
        attended, kv_cache = _mix_tokens(x, weights, context, attn_norm)
    else:
        assert "attn" in weights, "a layer without a recurrent mixer has attention"
        attended, kv_cache = attention(x, weights["attn"], context, input_norm=attn_norm)
    attended = context.residual_update(attended, DropoutSite.ATTENTION_RESIDUAL)
    x = shard_residual(_weighted(x, weights.get("attn_residual")) + attended, context.sharding)
    if context.encoder_output is not None:
        crossed = _cross_attention(x, weights, context, context.encoder_output)
        x = shard_residual(x + crossed, context.sharding)
    if "mlp" not in weights:
        return x, kv_cache
    mlp_norm = weights.get("mlp_norm", NO_PARAMETERS)
    output = feed_forward(x, weights["mlp"], context, input_norm=mlp_norm)
    output = context.residual_update(output, DropoutSite.MLP_RESIDUAL)
    x = _weighted(x, weights.get("mlp_residual"))
    return shard_residual(x + output, context.sharding), kv_cache


def _weighted(x: Array, weights: Leaves | None) -> Array:
    """Multiply the residual stream [B, T, D] by a vector [D], if the layer has one."""
    if weights is None:
        return x
    return x * weights["weight"]


def _mix_tokens(
    x: Array, weights: BlockWeights, context: LayerContext, input_norm: Leaves
) -> tuple[Array, KVCache | None]:
    """Compute a recurrent mixer of [B, T, D], or its sum with attention (Falcon-H1, arXiv:2507.22448)."""
    assert "mixer" in weights
    mixed, kv_cache = recurrent_mixer(x, weights["mixer"], context, input_norm=input_norm)
    if "attn" not in weights:
        return mixed, kv_cache
    attn_context = dataclasses.replace(context, kv_cache=kv_cache)
    attended, kv_cache = attention(x, weights["attn"], attn_context, input_norm=input_norm)
    return mixed + attended, kv_cache


def post_norm_block(
    x: Array, weights: BlockWeights, context: LayerContext
) -> tuple[Array, KVCache | None]:
    """Normalize after each residual addition (OPT-350m; arXiv:1706.03762, section 5.4).

    x = norm(x + attention(x))
    x = norm(x + mlp(x))
    """
    assert "attn" in weights
    assert "mlp" in weights
    arch_config = context.arch_config
    attended, kv_cache = attention(x, weights["attn"], context)
    attended = context.residual_update(attended, DropoutSite.ATTENTION_RESIDUAL)
    x = norm(x + attended, weights.get("attn_norm", NO_PARAMETERS), arch_config)
    x = shard_residual(x, context.sharding)
    output = feed_forward(x, weights["mlp"], context)
    output = context.residual_update(output, DropoutSite.MLP_RESIDUAL)
    x = norm(x + output, weights.get("mlp_norm", NO_PARAMETERS), arch_config)
    return shard_residual(x, context.sharding), kv_cache


def parallel_block(
    x: Array, weights: BlockWeights, context: LayerContext
) -> tuple[Array, KVCache | None]:
    """Run attention and MLP on the same input, each with its own norm (GPT-NeoX, arXiv:2204.06745).

    x = x + attention(norm(x)) + mlp(norm'(x))
    """
    return _parallel_sublayers(x, weights, context, mlp_norm=weights.get("mlp_norm", NO_PARAMETERS))


def parallel_one_norm_block(
    x: Array, weights: BlockWeights, context: LayerContext
) -> tuple[Array, KVCache | None]:
    """Run attention and MLP on the same normalized input (GPT-J).

    x = x + attention(norm(x)) + mlp(norm(x))
    """
    return _parallel_sublayers(
        x, weights, context, mlp_norm=weights.get("attn_norm", NO_PARAMETERS)
    )


def _parallel_sublayers(
    x: Array, weights: BlockWeights, context: LayerContext, *, mlp_norm: Leaves
) -> tuple[Array, KVCache | None]:
    """Add attention and MLP of the same input. `mlp_norm` has the weights of the norm before the MLP."""
    assert "attn" in weights
    assert "mlp" in weights
    attn_norm = weights.get("attn_norm", NO_PARAMETERS)
    attended, kv_cache = attention(x, weights["attn"], context, input_norm=attn_norm)
    attended = context.residual_update(attended, DropoutSite.ATTENTION_RESIDUAL)
    output = feed_forward(x, weights["mlp"], context, input_norm=mlp_norm)
    output = context.residual_update(output, DropoutSite.MLP_RESIDUAL)
    return shard_residual(x + attended + output, context.sharding), kv_cache


def sandwich_block(
    x: Array, weights: BlockWeights, context: LayerContext
) -> tuple[Array, KVCache | None]:
    """Normalize the input and the output of each sublayer (Gemma 2, arXiv:2408.00118, section 2).

    x = x + norm'(attention(norm(x)))
    x = x + norm'(mlp(norm(x)))
    x = x + norm'(norm'(mlp(norm(x))) + norm'(experts(norm(x))))    with experts beside the MLP (Gemma 4)
    """
    assert "attn" in weights
    assert "mlp" in weights
    arch_config = context.arch_config
    attn_norm = weights.get("attn_norm", NO_PARAMETERS)
    attended, kv_cache = attention(x, weights["attn"], context, input_norm=attn_norm)
    attended = norm(attended, weights.get("attn_post_norm", NO_PARAMETERS), arch_config)
    attended = context.residual_update(attended, DropoutSite.ATTENTION_RESIDUAL)
    x = shard_residual(x + attended, context.sharding)
    mlp_norm = weights.get("mlp_norm", NO_PARAMETERS)
    output = feed_forward(x, weights["mlp"], context, input_norm=mlp_norm)
    experts = weights.get("moe")
    if experts is not None:
        output = norm(output, weights.get("mlp_branch_norm", NO_PARAMETERS), arch_config)
        moe_norm = weights.get("moe_norm", NO_PARAMETERS)
        mixed = feed_forward(x, experts, context, input_norm=moe_norm)
        output = output + norm(mixed, weights.get("moe_post_norm", NO_PARAMETERS), arch_config)
    output = norm(output, weights.get("mlp_post_norm", NO_PARAMETERS), arch_config)
    output = context.residual_update(output, DropoutSite.MLP_RESIDUAL)
    return shard_residual(x + output, context.sharding), kv_cache


def sandwich_input_block(
    x: Array, weights: BlockWeights, context: LayerContext
) -> tuple[Array, KVCache | None]:
    """Add an input from the tokens to a sandwich block, and scale its output (Gemma 4).

    x = sandwich_block(x)
    x = x + input_update(x)     if the layer has an input from its tokens
    x = scale * x               with one scale per layer, which is not trained
    """
    x, kv_cache = sandwich_block(x, weights, context)
    if "layer_input_gate" in weights:
        x = x + input_update(x, weights["layer_input_gate"], context)
    output = weights.get("output")
    assert output is not None, "the block scales its output"
    scale = lax.stop_gradient(output["scale"])
    return shard_residual(x * scale, context.sharding), kv_cache


def output_norm_block(
    x: Array, weights: BlockWeights, context: LayerContext
) -> tuple[Array, KVCache | None]:
    """Normalize the output of each sublayer, but not its input (OLMo 2, arXiv:2501.00656, section 2.1).

    x = x + norm(attention(x))
    x = x + norm(mlp(x))
    """
    assert "attn" in weights
    assert "mlp" in weights
    arch_config = context.arch_config
    attended, kv_cache = attention(x, weights["attn"], context)
    attended = norm(attended, weights.get("attn_post_norm", NO_PARAMETERS), arch_config)
    attended = context.residual_update(attended, DropoutSite.ATTENTION_RESIDUAL)
    x = shard_residual(x + attended, context.sharding)
    output = feed_forward(x, weights["mlp"], context)
    output = norm(output, weights.get("mlp_post_norm", NO_PARAMETERS), arch_config)
    output = context.residual_update(output, DropoutSite.MLP_RESIDUAL)
    return shard_residual(x + output, context.sharding), kv_cache


def single_block(
    x: Array, weights: BlockWeights, context: LayerContext
) -> tuple[Array, KVCache | None]:
    """Run one sublayer: attention, a recurrent mixer, or an MLP (Nemotron-H, arXiv:2504.03624).

    x = x + sublayer(norm(x))
    """
    input_norm = weights.get("norm", NO_PARAMETERS)
    if "mlp" in weights:
        output = feed_forward(x, weights["mlp"], context, input_norm=input_norm)
        output = context.residual_update(output, DropoutSite.MLP_RESIDUAL)
        return shard_residual(x + output, context.sharding), context.kv_cache
    if "attn" in weights:
        output, kv_cache = attention(x, weights["attn"], context, input_norm=input_norm)
    else:
        output, kv_cache = _mix_tokens(x, weights, context, input_norm)
    output = context.residual_update(output, DropoutSite.ATTENTION_RESIDUAL)
    return shard_residual(x + output, context.sharding), kv_cache


BLOCKS: Mapping[BlockType, Block] = {
    "pre": pre_norm_block,
    "post": post_norm_block,
    "parallel": parallel_block,
    "parallel_one_norm": parallel_one_norm_block,
    "sandwich": sandwich_block,
    "sandwich_input": sandwich_input_block,
    "output_norm": output_norm_block,
    "single": single_block,
}


def _cross_attention(
    x: Array, weights: BlockWeights, context: LayerContext, encoder_output: EncoderOutput
) -> Array:
    """Attend from the normed residual stream [B, T, D] to the encoder's output, with dropout."""
    cross = weights.get("cross")
    assert cross is not None, "a decoder with an encoder has cross-attention"
    # Cross-attention writes no cache: its keys and values do not grow with the new tokens.
    cross_context = dataclasses.replace(
        context, mask=_cross_mask(encoder_output, context), kv_cache=None
    )
    output, _ = attention(
        x,
        cross,
        cross_context,
        input_norm=weights.get("cross_norm", NO_PARAMETERS),
        encoder_states=encoder_output.states,
    )
    return context.residual_update(output, DropoutSite.CROSS_RESIDUAL)


def _cross_mask(encoder_output: EncoderOutput, context: LayerContext) -> AttentionMask:
    """Return the mask of cross-attention. It has positions only if dropout needs them."""
    mask = AttentionMask(kv_valid=encoder_output.source_mask, is_causal=False)
    if context.dropout is None or isinstance(encoder_output.states, KV):
        return mask
    kv_positions = jnp.arange(encoder_output.states.shape[1])
    return dataclasses.replace(
        mask, q_positions=context.mask.q_positions, kv_positions=kv_positions
    )


def shard_residual(x: Array, sharding: ShardingContext) -> Array:
    """Constrain the sharding of the residual stream [B, T, D] between layers."""
    return sharding.constrain(x, "batch", "residual_seq", "embed")
