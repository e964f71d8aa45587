"""The inputs of a stack of layers and of one of its layers, in addition to weights and the residual stream.

Axes: B rows of the batch, T tokens, S source tokens, D model width.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from prepcli.models.architecture import ArchConfig, KeyValueRole, LayerKind
from prepcli.models.layer_config import Alibi, RelativePositionBias
from prepcli.models.lora import LORA_B
from prepcli.models.param_tree import Tree
from prepcli.models.rope_config import Rope
from trainer.distributed.sharding import ShardingContext, order_tokens
from trainer.nn.attention_mask import KV, AttentionMask, CosSin, EncoderOutput, ScoreBias
from trainer.nn.cache import KVCache
from trainer.nn.dropout import Dropout, DropoutSite, LayerDropout, RandomKey, drop
from trainer.nn.model_spec import AttentionOptions, ForwardConfig, ModelSpec
from trainer.nn.projections import LORA_DROPOUT, scale_by

# Entries in a layer's weights that are not parameters. They differ between layers, so a scan over
# layers has to slice them as it slices the weights.
LAYER_SCORE_SCALE = "layer_score_scale"
LAYER_DROPOUT_KEYS = "layer_dropout_keys"
LAYER_INPUT = "layer_input"
LAYER_INITIAL_LAMBDA = "layer_initial_lambda"
# Key of the table of T5's biases in the weights of a stack, or of a layer.
RELATIVE_POSITIONS = "relative_positions"


@dataclass(frozen=True, slots=True)
class LayerContext:
    """The context in which a layer runs."""

    arch_config: ArchConfig  # The choices of the layers
    mask: AttentionMask  # Visible keys, rotary embedding and score bias of self-attention
    # The device mesh and its rules
    sharding: ShardingContext = field(default_factory=ShardingContext)
    # Cache that keys and values are appended to. Without one, the layer attends to its own input.
    kv_cache: KVCache | None = None
    # Input of cross-attention, if the model has an encoder
    encoder_output: EncoderOutput | None = None
    # The kernel that computes attention, and its tiles
    attention_options: AttentionOptions = field(default_factory=AttentionOptions)
    # Tokens of a device per row of a chunk of the MLP and of attention's projections. -1 means all.
    ffn_chunk_size: int = -1
    # int32 [B, T], the position of each token in its document, for recurrent mixers. None if each row is one
    # document.
    document_positions: Array | None = None
    dropout: LayerDropout | None = None  # Random masks of the layer. None means no dropout.
    key_values: KeyValueRole = "own"  # Whether the layer has its own keys and values
    # [B, T, P], the input of the layer from its tokens. None if it has none.
    layer_input: Array | None = None
    # float32 [], the initial lambda of differential attention. None for other attention.
    initial_lambda: Array | None = None

    def residual_update(self, output: Array, site: DropoutSite) -> Array:
        """Scale the output [B, T, D] of attention or MLP, and drop elements of it, if there is dropout."""
        output = scale_by(output, self.arch_config.residual_scale)
        if self.dropout is None:
            return output
        return self.dropout.drop_residual(output, site)


@dataclass(frozen=True, slots=True)
class StackContext:
    """The context in which all layers of the encoder or decoder run."""

    # Key of the stack in the parameters: "encoder" or "decoder" in a model with both. Empty in a decoder-only
    # model, where the stack is the whole tree.
    name: str
    model: ModelSpec
    arch_config: ArchConfig  # The choices of the layers of this stack
    forward_config: ForwardConfig  # Execution options
    # Positions of queries and keys, and the score bias. `for_layer` sets the window, the rotary embedding and the
    # score scale of each layer.
    mask: AttentionMask
    # Rotary cosine and sine for each of the architecture's `ropes`
    cos_sin_by_rope: Mapping[Rope, CosSin] = field(default_factory=dict[Rope, CosSin])
    # Input of cross-attention in all layers, if the model has an encoder
    encoder_output: EncoderOutput | None = None
    # int32 [B, T], the position of each token in its document. None if each row is one document.
    document_positions: Array | None = None
    dropout: Dropout | None = None  # Random masks of the stack. None means no dropout.
    # [layers, B, T, P], the inputs of each layer from its tokens. None if it has none.
    layer_inputs: Array | None = None

    def for_layer(self, kind: LayerKind, weights: Tree, kv_cache: KVCache | None) -> LayerContext:
        """Return the context of one layer.

        Args:
            kind: Window, rotary embedding, and role of the keys and values of the layer.
            weights: Weights of the layer, with its score scale, dropout keys, input and initial lambda if it has them.
            kv_cache: Cache that the layer appends to.
        """
        encoder_output = self.encoder_output
        if encoder_output is not None and kv_cache is not None:
            encoder_output = encoder_output.for_layer(kv_cache.layer)
        cos_sin = None
        if kind.rope is not None:
            cos_sin = self.cos_sin_by_rope[kind.rope]
        dropout = None
        if self.dropout is not None:
            layer_keys = weights.get(LAYER_DROPOUT_KEYS)
            dropout = self.dropout.for_layer(layer_keys, self.mask.q_positions)
        mask = self.mask.for_layer(kind, cos_sin, weights.get(LAYER_SCORE_SCALE))
        return LayerContext(
            self.arch_config,
            with_score_bias(mask, weights, self.arch_config, self.forward_config),
            self.forward_config.sharding,
            kv_cache=kv_cache,
            encoder_output=encoder_output,
            attention_options=self.forward_config.attention_options,
            ffn_chunk_size=self.forward_config.ffn_chunk_size,
            document_positions=self.document_positions,
            dropout=dropout,
            key_values=kind.key_values,
            layer_input=weights.get(LAYER_INPUT),
            initial_lambda=weights.get(LAYER_INITIAL_LAMBDA),
        )


def with_score_bias(
    mask: AttentionMask, weights: Tree, arch_config: ArchConfig, forward_config: ForwardConfig
) -> AttentionMask:
    """Return a mask with the bias that relative positions add to attention scores.

    The mask is returned unchanged if it already has a bias, if the architecture has none, or if these weights do not
    contain the table of a learned bias (T5).

    Args:
        mask: Positions of queries and keys.
        weights: Parameters of a stack with one bias for all layers, or of a layer with its own.
        arch_config: The choices of its layers.
        forward_config: Execution options.
    """
    if mask.bias is not None:
        return mask
    match arch_config.score_bias:
        case None:
            return mask
        case Alibi(slopes):
            table = jnp.asarray([slopes], jnp.float32)
        case RelativePositionBias():
            if RELATIVE_POSITIONS not in weights:
                return mask
            table = weights[RELATIVE_POSITIONS]["weight"]
    bias = ScoreBias(table, arch_config.score_bias, forward_config.sharding)
    mask = dataclasses.replace(mask, bias=bias)
    if forward_config.attention_options.kernel != "reference":
        return mask
    # The reference kernel adds the bias of all queries and keys in every layer: compute it once.
    return dataclasses.replace(mask, bias=dataclasses.replace(bias, precomputed=mask.score_bias()))


# Dropout of the inputs of adapters (LoRA): each adapted module drops elements of its own copy of its input.
#
# The mask of an element depends on the seed, the step, the stack, the layer, the module, the row, the token and the
# feature. Projections in one tensor, such as GPT-2's queries, keys and values, are one module and have one mask.

# Projections of the encoder's output, which has other tokens than the decoder's layers.
SOURCE_PROJECTIONS = ("cross.k", "cross.v")


@partial(jax.tree_util.register_dataclass, data_fields=["keys"], meta_fields=["rate"])
@dataclass(frozen=True, slots=True)
class AdapterDropout:
    """The random masks of the input of one adapter in one layer."""

    keys: RandomKey  # Key of each token [B, T]
    rate: float  # Fraction of the elements to drop

    def apply(self, x: Array) -> Array:
        """Drop elements of an input [B, T, *in], and scale the rest by 1 / (1 - rate)."""
        features = x.shape[2:]
        index = jnp.arange(math.prod(features)).reshape(features)
        keys = self.keys.reshape(*x.shape[:2], *(1 for _ in features))
        return drop(x, keys, index, self.rate)


def with_adapter_dropout(
    weights: Tree, context: LayerContext, sites: Mapping[str, int], name: str = ""
) -> Tree:
    """Return the weights of a layer, with the masks of each adapter next to its matrices.

    Args:
        weights: Weights of a layer, or of a part of it.
        context: Inputs of the layer, with its random masks.
        sites: Number of the module of each projection.
        name: Name of the part, e.g. `attn.q`. Empty for the layer.
    """
    if context.dropout is None or not context.dropout.config.adapters:
        return weights
    changed: dict[str, Any] = {}
    for key, value in weights.items():
        changed[key] = value
        if isinstance(value, dict):
            part = f"{name}.{key}" if name else key
            changed[key] = with_adapter_dropout(value, context, sites, part)
    if LORA_B in weights and name in sites:
        positions = context.dropout.positions
        if name in SOURCE_PROJECTIONS and context.encoder_output is not None:
            states = context.encoder_output.states
            assert not isinstance(states, KV)
            positions = order_tokens(jnp.arange(states.shape[1]), context.sharding)
        keys = context.dropout.adapter_keys(sites[name], positions)
        changed[LORA_DROPOUT] = AdapterDropout(keys, context.dropout.config.adapters)
    return changed
