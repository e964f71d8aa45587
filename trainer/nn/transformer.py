"""Forward pass and loss of any supported family, as pure functions of its parameters.

Axes: B rows of the batch, T tokens, S source tokens or key slots, H query heads, D model width, V vocabulary rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from prepcli.algebra.axis_map import LAYERS
from prepcli.core.errors import PrepError, usage_error
from prepcli.models.param_tree import Tree, flatten_tree, unflatten_tree
from prepcli.models.parameters import DECODER, ENCODER
from prepcli.models.rope_config import Rope
from trainer.distributed.sharding import UNSPLIT, order_tokens
from trainer.nn import lm_head
from trainer.nn.attention import project_kv
from trainer.nn.attention_mask import (
    KV,
    KV_CACHE_DIMS,
    AttentionMask,
    CosSin,
    EncoderOutput,
    Segments,
    causal_mask,
    rotary_cos_sin,
)
from trainer.nn.context import LayerContext, StackContext, with_score_bias
from trainer.nn.dropout import Dropout, Stack
from trainer.nn.embedding import embed_tokens, layer_inputs, project_width
from trainer.nn.layer_stack import layer_outputs, layer_weights, run_stack
from trainer.nn.lm_head import (
    NO_LOSS_TERMS,
    LMHead,
    LossSums,
    LossTerms,
    TokenMetrics,
    TrainingSums,
)
from trainer.nn.model_spec import ForwardConfig, ModelSpec


def encode(
    params: Tree,
    source_tokens: Array,
    model: ModelSpec,
    forward_config: ForwardConfig,
    source_mask: Array | None = None,
    *,
    dropout: Dropout | None = None,
) -> EncoderOutput:
    """Run the encoder on source tokens.

    Args:
        params: Parameters of the model.
        source_tokens: int32 [B, S], in the `zigzag_order` of the mesh.
        model: A model with an encoder.
        forward_config: Execution options.
        source_mask: bool [B, S], false for padding. None if no token is padding.
        dropout: Random masks of the step. None means no dropout.

    Returns:
        Hidden states [B, S, D] in the dtype of the computation, with the mask.

    Raises:
        PrepError: The model has no encoder.
    """
    params, x, context = _encoder_inputs(
        params, source_tokens, model, forward_config, source_mask, dropout=dropout
    )
    x, _ = run_stack(x, params, context)
    x = forward_config.sharding.constrain(x, "batch", "seq", "embed")
    return EncoderOutput(x, source_mask)


def encoder_states_by_layer(
    params: Tree, source_tokens: Array, model: ModelSpec, forward_config: ForwardConfig
) -> Iterator[Array]:
    """Run the encoder on source tokens, one layer at a time. The function is not compiled as a whole.

    Args:
        params: Parameters of the model.
        source_tokens: int32 [B, S].
        model: A model with an encoder.
        forward_config: Execution options.

    Yields:
        The residual stream [B, S, D] before the first layer and after each layer. The last one is after the final norm,
        and is the state of an `EncoderOutput`.

    Raises:
        PrepError: The model has no encoder.
    """
    params, x, context = _encoder_inputs(params, source_tokens, model, forward_config)
    yield x
    yield from layer_outputs(x, params, context)


def _encoder_inputs(
    params: Tree,
    source_tokens: Array,
    model: ModelSpec,
    forward_config: ForwardConfig,
    source_mask: Array | None = None,
    *,
    dropout: Dropout | None = None,
) -> tuple[Tree, Array, StackContext]:
    """Return the inputs of the encoder layers. The arguments and errors are those of `encode`."""
    arch_config = model.arch_config.encoder
    sharding = forward_config.sharding
    if arch_config is None:
        why = "it is a decoder-only model"
        raise PrepError(f"{model.family.name} has no encoder", why, "tokens without a source")
    params = computed_params(params, model, forward_config)
    positions = order_tokens(jnp.arange(source_tokens.shape[1]), sharding)
    mask = AttentionMask(
        q_positions=positions, kv_positions=positions, kv_valid=source_mask, is_causal=False
    )
    mask = with_score_bias(mask, params[ENCODER], arch_config, forward_config)
    x = embed_tokens(params, source_tokens, model, forward_config)
    if dropout is not None:
        dropout = dropout.for_stack(Stack.ENCODER)
        x = dropout.drop_embedding(x, positions)
    context = StackContext(ENCODER, model, arch_config, forward_config, mask, dropout=dropout)
    return params, x, context


def precompute_cross_kv(
    params: Tree, encoder_output: EncoderOutput, model: ModelSpec, forward_config: ForwardConfig
) -> EncoderOutput:
    """Project the encoder's hidden states to the keys and values of each decoder layer, for decoding with a cache.

    Args:
        params: Parameters in the dtype of the computation.
        encoder_output: Hidden states [B, S, D] of the encoder.
        model: A model with an encoder.
        forward_config: Execution options.

    Returns:
        The output with stacked keys and values, [layers, B, S, kv_heads, head_dim] each, as its states.
    """
    states = encoder_output.states
    sharding = forward_config.sharding
    assert not isinstance(states, KV)

    def project_layer(weights: Tree) -> KV:
        return project_kv(
            states, weights["cross"], LayerContext(model.arch_config, AttentionMask(), sharding)
        )

    layers = layer_weights(params[DECODER], DECODER, model.arch_config, model, forward_config)
    if isinstance(layers, list):
        stacks = jax.tree.map(lambda *arrays: jnp.stack(arrays), *map(project_layer, layers))
    else:
        stacks = lax.map(project_layer, layers[LAYERS])
    return encoder_output._replace(
        states=KV(*(sharding.constrain(stack, *KV_CACHE_DIMS) for stack in stacks))
    )


def hidden_states(
    params: Tree,
    tokens: Array,
    model: ModelSpec,
    forward_config: ForwardConfig,
    encoder_output: EncoderOutput | None = None,
    *,
    segments: Segments | None = None,
    dropout: Dropout | None = None,
) -> Array:
    """Run the decoder on whole sequences with a causal mask.

    Args:
        params: Parameters of the model.
        tokens: int32 [B, T], in the `zigzag_order` of the mesh.
        model: The model.
        forward_config: Execution options.
        encoder_output: Hidden states of the source. Required if the model has an encoder.
        segments: The documents of packed rows, in the same order as `tokens`. None if a row is one document.
        dropout: Random masks of the step. None means no dropout and no forgetful causal masking.

    Returns:
        The LM head's input [B, T, D] in the dtype of the computation.

    Raises:
        UsageError: The sequences exceed the limited positions of the model, or the mesh does not divide them.
    """
    params = computed_params(params, model, forward_config)
    x, context = decoder_inputs(
        params,
        tokens,
        model,
        forward_config,
        encoder_output,
        segments=segments,
        dropout=dropout,
    )
    x, _ = run_stack(x, params, context)
    return lm_head_input(params, x, model, forward_config)


def hidden_states_by_layer(
    params: Tree,
    tokens: Array,
    model: ModelSpec,
    forward_config: ForwardConfig,
    encoder_output: EncoderOutput | None = None,
) -> Iterator[Array]:
    """Run the decoder on whole sequences, one layer at a time. The function is not compiled as a whole.

    Args:
        params: Parameters of the model.
        tokens: int32 [B, T].
        model: The model.
        forward_config: Execution options.
        encoder_output: Hidden states of the source. Required if the model has an encoder.

    Yields:
        The residual stream [B, T, D] before the first layer and after each layer. The last one is after the final norm.
    """
    params = computed_params(params, model, forward_config)
    x, context = decoder_inputs(params, tokens, model, forward_config, encoder_output)
    yield x
    yield from layer_outputs(x, params, context)


def decoder_inputs(
    params: Tree,
    tokens: Array,
    model: ModelSpec,
    forward_config: ForwardConfig,
    encoder_output: EncoderOutput | None = None,
    *,
    segments: Segments | None = None,
    dropout: Dropout | None = None,
) -> tuple[Array, StackContext]:
    """Return the residual stream [B, T, D] before the first decoder layer, and the inputs of all layers.

    The arguments and errors are those of `hidden_states`, with parameters in the dtype of the computation.
    """
    arch_config = model.arch_config
    length = tokens.shape[1]
    if arch_config.has_limited_positions and length > arch_config.max_positions:
        why = f"the model has {arch_config.max_positions} positions"
        raise usage_error(f"{length} tokens per sequence", why, "set a smaller `data.seq_length`")
    positions = order_tokens(jnp.arange(length), forward_config.sharding)
    segment_positions = None if segments is None else segments.positions
    x = embed_tokens(params, tokens, model, forward_config, segment_positions)
    inputs = layer_inputs(params, tokens, x, model, forward_config)
    mask = causal_mask(positions, segments)
    rotary_positions = positions if segment_positions is None else segment_positions
    if dropout is not None:
        dropout = dropout.for_stack(Stack.DECODER)
        x = dropout.drop_embedding(x, positions)
        mask = dataclasses.replace(
            mask, kv_valid=dropout.remembered_keys(positions, segment_positions)
        )
    cos_sin_by_rope = {rope: rotary_cos_sin(rope, rotary_positions) for rope in arch_config.ropes}
    context = decoder_context(
        params,
        model,
        forward_config,
        mask=mask,
        cos_sin_by_rope=cos_sin_by_rope,
        encoder_output=encoder_output,
        document_positions=segment_positions,
        dropout=dropout,
        layer_inputs=inputs,
    )
    return x, context


def computed_params(params: Tree, model: ModelSpec, forward_config: ForwardConfig) -> Tree:
    """Cast all parameters to the dtype of the computation, and reshard parameters stored by rules of leaves.

    The matrices A of adapters are scaled, in float32, and copied to the projections that share them.
    """
    constrain = forward_config.sharding.constrain_param
    dtype = forward_config.dtype
    leaves = scale_adapters(flatten_tree(params), model)
    computed = {
        path: constrain(leaf.astype(dtype), model.leaves[path]) for path, leaf in leaves.items()
    }
    return unflatten_tree(share_adapters(computed, model))


def scale_adapters(leaves: Mapping[str, Array], model: ModelSpec) -> dict[str, Array]:
    """Return leaves by path, with the matrices A of adapters scaled in float32."""
    if model.adapters is None:
        return {**leaves}
    scaled = {**leaves}
    for path, scaling in model.adapters.scalings.items():
        scaled[path] = leaves[path].astype(jnp.float32) * scaling
    return scaled


def share_adapters(leaves: Mapping[str, Array], model: ModelSpec) -> dict[str, Array]:
    """Return leaves by path, with the matrices A of adapters copied to the projections that share them."""
    if model.adapters is None:
        return {**leaves}
    return {**leaves, **{path: leaves[owner] for path, owner in model.adapters.shared.items()}}


def decoder_context(
    params: Tree,
    model: ModelSpec,
    forward_config: ForwardConfig,
    *,
    mask: AttentionMask,
    cos_sin_by_rope: Mapping[Rope, CosSin],
    encoder_output: EncoderOutput | None = None,
    document_positions: Array | None = None,
    dropout: Dropout | None = None,
    layer_inputs: Array | None = None,
) -> StackContext:
    """Return the inputs of all decoder layers.

    Args:
        params: Parameters in the dtype of the computation.
        model: The model.
        forward_config: Execution options.
        mask: Positions of queries and keys.
        cos_sin_by_rope: Rotary cosine and sine for each of the architecture's `ropes`.
        encoder_output: Output of the encoder. Required if the model has an encoder.
        document_positions: int32 [B, T], the position of each token in its document. None if each row is one
            document.
        dropout: Random masks of the decoder. None means no dropout.
        layer_inputs: [layers, B, T, P], the inputs of each layer from its tokens. None if it has none.

    Raises:
        ValueError: `encoder_output` is missing for a model with an encoder, or passed to one without.
    """
    arch_config = model.arch_config
    if (encoder_output is None) != (arch_config.encoder is None):
        has = "no encoder" if arch_config.encoder is None else "an encoder"
        passed = "missing" if encoder_output is None else "passed"
        raise ValueError(f"{model.family.name} has {has}, but encoder_output is {passed}")
    name = DECODER if DECODER in params else ""
    stack = params[name] if name else params
    return StackContext(
        name,
        model,
        arch_config,
        forward_config,
        with_score_bias(mask, stack, arch_config, forward_config),
        cos_sin_by_rope,
        encoder_output,
        document_positions,
        dropout,
        layer_inputs,
    )


def lm_head_input(params: Tree, x: Array, model: ModelSpec, forward_config: ForwardConfig) -> Array:
    """Compute the LM head's input [B, T, D] from the output [B, T, layer width] of the decoder."""
    x = project_width(x, params, "project_out", forward_config=forward_config)
    scale = model.arch_config.lm_head_input_scale
    if scale == 1.0:
        return x
    # In float32: T5's d_model ** -0.5 rounded to bfloat16 would change all logits.
    return (x.astype(jnp.float32) * scale).astype(x.dtype)


def compute_logits(
    params: Tree,
    tokens: Array,
    model: ModelSpec,
    forward_config: ForwardConfig,
    encoder_output: EncoderOutput | None = None,
) -> Array:
    """Compute the logits of whole sequences.

    Args:
        params: Parameters of the model.
        tokens: int32 [B, T], in the `zigzag_order` of the mesh.
        model: The model.
        forward_config: Execution options.
        encoder_output: Hidden states of the source. Required if the model has an encoder.

    Returns:
        float32 [B, T, V]. Padded rows of the vocabulary have large negative logits.
    """
    x = hidden_states(params, tokens, model, forward_config, encoder_output)
    return logits_from_hidden(params, x, model, forward_config)


def logits_from_hidden(
    params: Tree, x: Array, model: ModelSpec, forward_config: ForwardConfig
) -> Array:
    """Compute float32 logits [B, T, V] from the LM head's input [B, T, D]."""
    head = _lm_head(model, forward_config, chunk_size=-1)
    weight = _lm_head_weight(params, model, forward_config)
    return lm_head.project_logits(x, weight, head, _lm_head_bias(params))


def loss_sums(
    params: Tree,
    batch: Mapping[str, Array],
    model: ModelSpec,
    forward_config: ForwardConfig,
    loss_terms: LossTerms = NO_LOSS_TERMS,
    *,
    dropout: Dropout | None = None,
) -> LossSums:
    """Compute the summed loss of a batch.

    Args:
        params: Parameters of the model.
        batch: `tokens` and `targets` int32 [B, T] and `weights` float32 [B, T], 0 for a token without a target. For
            a model with an encoder also `source` int32 [B, S] and `present` [B, S], 0 for padding. For packed
            documents also `segment_ids` and `positions`, as in `Segments`. Columns are in the `zigzag_order` of the
            mesh.
        model: The model.
        forward_config: Execution options.
        loss_terms: Terms of the loss in addition to the cross entropy.
        dropout: Random masks of the step. None means no dropout and no forgetful causal masking.

    Returns:
        float32 sums over the tokens of the batch. The loss has all terms.
    """
    sums = training_sums(params, batch, model, forward_config, loss_terms, dropout=dropout)
    return LossSums(loss=sums.total, weight=sums.weight, correct=sums.correct)


def training_sums(
    params: Tree,
    batch: Mapping[str, Array],
    model: ModelSpec,
    forward_config: ForwardConfig,
    loss_terms: LossTerms,
    *,
    dropout: Dropout | None = None,
) -> TrainingSums:
    """Compute the summed loss and z-loss of a batch, from the arguments of `loss_sums`."""
    inputs = _head_inputs(params, batch, model, forward_config, dropout)
    head = inputs.head._replace(loss_terms=loss_terms)
    return lm_head.training_sums(*inputs._replace(head=head))


def evaluation_sums(
    params: Tree,
    batch: Mapping[str, Array],
    model: ModelSpec,
    forward_config: ForwardConfig,
    metric_fn: TokenMetrics | None = None,
) -> tuple[LossSums, dict[str, Array]]:
    """Compute the summed cross entropy of a batch, and the sums of the user's metrics by name.

    It takes the arguments of `loss_sums`, and `metric_fn` to compute the values.
    """
    inputs = _head_inputs(params, batch, model, forward_config)
    metrics: dict[str, Array] = {}
    if metric_fn is not None:
        metrics = lm_head.metric_sums(*inputs, metric_fn=metric_fn)
    return lm_head.loss_sums(*inputs), metrics


def row_loss_sums(
    params: Tree, batch: Mapping[str, Array], model: ModelSpec, forward_config: ForwardConfig
) -> LossSums:
    """Compute the summed cross entropy of each row of a batch, float32 [B]. It takes the arguments of `loss_sums`."""
    return lm_head.row_loss_sums(*_head_inputs(params, batch, model, forward_config))


class _HeadInputs(NamedTuple):
    """The arguments of the sums of `trainer.nn.lm_head`, in their order."""

    hidden: Array
    weight: Array
    targets: Array
    token_weights: Array
    head: LMHead
    bias: Array | None


def _head_inputs(
    params: Tree,
    batch: Mapping[str, Array],
    model: ModelSpec,
    forward_config: ForwardConfig,
    dropout: Dropout | None = None,
) -> _HeadInputs:
    """Run the model up to the LM head's input [B, T, D] for a batch."""
    encoder_output = None
    if model.arch_config.encoder is not None:
        source_mask = batch["present"] != 0
        encoder_output = encode(
            params, batch["source"], model, forward_config, source_mask, dropout=dropout
        )
    segments = None
    if "segment_ids" in batch:
        segments = Segments(batch["segment_ids"], batch["positions"])
    x = hidden_states(
        params,
        batch["tokens"],
        model,
        forward_config,
        encoder_output,
        segments=segments,
        dropout=dropout,
    )
    # The width is unsplit, because the product with the head is split along the vocabulary.
    hidden = forward_config.sharding.constrain(x, "batch", "seq", UNSPLIT)
    return _HeadInputs(
        hidden,
        _lm_head_weight(params, model, forward_config),
        batch["targets"],
        batch["weights"],
        _lm_head(model, forward_config, chunk_size=forward_config.head_chunk_size),
        _lm_head_bias(params),
    )


def _lm_head(model: ModelSpec, forward_config: ForwardConfig, *, chunk_size: int) -> LMHead:
    """Return the static options of the LM head."""
    return LMHead(
        true_vocab_size=model.true_vocab_size,
        chunk_size=chunk_size,
        sharding=forward_config.sharding,
        logit_softcap=model.arch_config.final_logit_softcap,
    )


def _lm_head_weight(params: Tree, model: ModelSpec, forward_config: ForwardConfig) -> Array:
    """Return the head's weight [V, D] in the dtype of the computation."""
    path = ("embed", "tokens") if model.is_tied else ("head", "weight")
    weight = params[path[0]][path[1]].astype(forward_config.dtype)
    return forward_config.sharding.constrain_param(weight, model.leaves[".".join(path)])


def _lm_head_bias(params: Tree) -> Array | None:
    """Return the head's bias [V]. None if the head has none."""
    return params.get("head", {}).get("bias")
