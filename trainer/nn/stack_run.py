"""One stack of layers: the score bias that its layers share, the run of each layer, and the final norm.

Axes: B rows of the batch, T tokens, D model width.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from trainer.models.architecture import ArchConfig
from trainer.models.axis_map import LAYERS
from trainer.models.param_tree import Tree
from trainer.models.rope_config import Rope
from trainer.nn import layer_stack
from trainer.nn.attention_mask import AttentionMask, CosSin, EncoderOutput
from trainer.nn.block import block
from trainer.nn.context import LayerContext
from trainer.nn.dropout import Dropout
from trainer.nn.layer_stack import LayerCarry, layer_weights
from trainer.nn.model_spec import ForwardConfig, ModelSpec
from trainer.nn.norms import norm
from trainer.nn.score_bias import ScoreBias


def run_stack(
    carry: LayerCarry,
    params: Tree,
    stack_name: str,
    model: ModelSpec,
    arch_config: ArchConfig,
    forward_config: ForwardConfig,
    run_layer: Callable[..., LayerCarry],
    dropout: Dropout | None,
) -> LayerCarry:
    """Run all layers and the final norm of the encoder or decoder; `stack_name` is empty in decoder-only models."""
    stack = params[stack_name] if stack_name else params
    num_layers = len(arch_config.sliding_windows)
    layers = layer_weights(stack[LAYERS], stack_name, num_layers, model, forward_config)
    layers = layer_stack.with_layer_inputs(layers, arch_config, dropout)
    x, kv_cache = layer_stack.run_layers(carry, layers, run_layer, forward_config, arch_config)
    return norm(x, stack.get("final_norm", {}), arch_config) if arch_config.has_final_norm else x, kv_cache


def with_score_bias(
    mask: AttentionMask, params: Tree, arch_config: ArchConfig, forward_config: ForwardConfig
) -> AttentionMask:
    """Add the bias of scores by relative position, if the family has one.

    The reference kernel needs all of it in every layer, so it is computed once.
    """
    if arch_config.relative_position_bias is None:
        return mask
    table = params["relative_positions"]["weight"]
    bias = ScoreBias(table, arch_config.relative_position_bias, forward_config.sharding)
    mask = dataclasses.replace(mask, bias=bias)
    if forward_config.attention_options.kernel != "reference":
        return mask
    return dataclasses.replace(mask, bias=dataclasses.replace(bias, precomputed=mask.score_bias()))


def run_layer(
    arch_config: ArchConfig,
    forward_config: ForwardConfig,
    mask: AttentionMask,
    cos_sin_by_rope: Mapping[Rope, CosSin],
    encoder_output: EncoderOutput | None,
    dropout: Dropout | None,
    window: int,
    carry: LayerCarry,
    weights: Tree,
) -> LayerCarry:
    """Run one layer with its window, rotary embedding, score scale and random masks."""
    x, kv_cache = carry
    if encoder_output is not None and kv_cache is not None:
        encoder_output = encoder_output.for_layer(kv_cache.layer)
    rope = arch_config.rope_for(window)
    cos_sin = cos_sin_by_rope[rope] if rope else None
    layer_mask = mask.for_layer(window, cos_sin, weights.get(layer_stack.LAYER_SCORE_SCALE))
    return block(
        x,
        weights,
        LayerContext(
            arch_config,
            layer_mask,
            forward_config.sharding,
            kv_cache=kv_cache,
            encoder_output=encoder_output,
            attention_options=forward_config.attention_options,
            ffn_chunk_size=forward_config.ffn_chunk_size,
            dropout=dropout and dropout.for_layer(weights.get(layer_stack.LAYER_DROPOUT_KEYS), mask.q_positions),
        ),
    )
