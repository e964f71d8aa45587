"""Compiled generation functions: prefill of prompts, then one token at a time with a KV cache.

A slot is a position of the KV cache. The prompts of a batch end in the same slot and start in
different slots. Positions count from the first token of a row, and the slots before it are masked,
so that a prompt's output does not depend on the rest of the batch.

Axes: B rows of the batch, T new tokens, S slots of tokens and of the KV cache, V true vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from prepcli.core.errors import Option, text, usage_error
from prepcli.models.architecture import FULL_ATTENTION
from prepcli.models.attention_kernels import MAX_DENSE_LENGTH
from prepcli.models.param_tree import Tree, flatten_tree, unflatten_tree
from prepcli.models.parameters import ENCODER
from prepcli.sources.generation_config import NO_RULES, TokenRules
from trainer.generation.sampling import DecodedTokens, Sampling, apply_token_rules, sample_tokens
from trainer.nn import transformer
from trainer.nn.attention_mask import AttentionMask, EncoderOutput, rotary_cos_sin_at
from trainer.nn.cache import STATE, KVCache, empty_kv_cache, empty_recurrent_cache
from trainer.nn.embedding import embed_tokens, layer_inputs
from trainer.nn.layer_stack import run_stack
from trainer.nn.model_spec import AttentionOptions, ForwardConfig, ModelSpec

# End of the path of the projection of keys.
KEYS = "attn.k.weight"


@dataclass(frozen=True, slots=True)
class GenerationConfig:
    """The options of generation.

    Raises:
        UsageError: `max_new_tokens` is less than 1.
    """

    max_new_tokens: int  # Maximum number of new tokens per row
    # Tokens that end a row. The token itself is part of the output.
    eos_token_ids: tuple[int, ...] = ()
    sampling: Sampling = field(default_factory=Sampling)  # How tokens are sampled
    rules: TokenRules = NO_RULES  # Rules of the model that change logits before sampling

    def __post_init__(self) -> None:
        """Check the number of new tokens."""
        if self.max_new_tokens < 1:
            what = f"max_new_tokens {self.max_new_tokens} is out of range"
            hint = text("{}", Option("max_new_tokens", 64))
            raise usage_error(what, "it must be at least 1", hint)


class PromptBatch(NamedTuple):
    """Prompts and new tokens in slots, the positions of the axis S."""

    tokens: Array  # int32 [B, S]
    start_slots: Array  # int32 [B], the slot of each row's first token
    row_numbers: Array  # int32 [B]. The sampled tokens of a row depend on its number.
    is_finished: Array  # bool [B], true for finished rows
    first_new_slot: Array  # int32 [], the slot of the first new tokens
    # Keys and values of the sources for all decoder layers
    encoder_output: EncoderOutput | None = None


class DecodeState(NamedTuple):
    """A batch during generation.

    The latest tokens are in slot `kv_cache.length`. The keys and values of all earlier tokens are in the cache.
    """

    batch: PromptBatch
    kv_cache: KVCache


def cast_for_inference(params: Tree, model: ModelSpec, *, forward_config: ForwardConfig) -> Tree:
    """Cast and reshard parameters for `inference_model`.

    Matrices A of adapters are scaled. Any other leaf is copied only if its dtype or its sharding changes.
    """
    cast: dict[str, Array] = {}
    for path, leaf in transformer.scale_adapters(flatten_tree(params), model).items():
        dtype = jnp.dtype(inference_dtype(path, forward_config.dtype))
        if leaf.dtype != dtype:
            leaf = leaf.astype(dtype)
        cast[path] = forward_config.sharding.constrain_param(leaf, model.leaves[path])
    return unflatten_tree(transformer.share_adapters(cast, model))


def inference_model(model: ModelSpec) -> ModelSpec:
    """Return the spec for the parameters that `cast_for_inference` returns.

    It has no adapters config: the parameters are scaled already, and shared adapters are copied to each path.
    """
    if model.adapters is None:
        return model
    shared = {path: model.leaves[owner] for path, owner in model.adapters.shared.items()}
    return replace(model, leaves={**model.leaves, **shared}, adapters=None)


def inference_dtype(path: str, compute_dtype: str) -> str:
    """Return the dtype of a parameter in inference."""
    # Logits are float32, and the LM head's bias is added to them.
    if path == "head.bias":
        return "float32"
    return compute_dtype


def encode_sources(
    params: Tree,
    sources: Array,
    source_mask: Array,
    model: ModelSpec,
    forward_config: ForwardConfig,
) -> EncoderOutput:
    """Run the encoder and project its output to the keys and values of all decoder layers.

    Args:
        params: Parameters from `cast_for_inference`.
        sources: int32 [B, S].
        source_mask: bool [B, S], false for padding.
        model: A model with an encoder.
        forward_config: Execution options.
    """
    forward_config = _config_for_length(forward_config, sources.shape[1])
    encoder_output = transformer.encode(params, sources, model, forward_config, source_mask)
    return transformer.precompute_cross_kv(params, encoder_output, model, forward_config)


def prefill(
    params: Tree,
    batch: PromptBatch,
    *,
    count: int,
    model: ModelSpec,
    forward_config: ForwardConfig,
    generation_config: GenerationConfig,
) -> DecodeState:
    """Compute the keys and values of the first `count` slots at once and sample the next tokens.

    Args:
        params: Parameters from `cast_for_inference`.
        batch: The prompts.
        count: Number of slots, static.
        model: The model.
        forward_config: Execution options.
        generation_config: End tokens and sampling.

    Returns:
        The state with `count` slots in its cache and the next tokens in slot `count`.
    """
    forward_config = _config_for_length(forward_config, count)
    state = DecodeState(batch, init_kv_cache(model, batch.tokens.shape, forward_config))
    return _decode_and_sample(
        params, state, batch.tokens[:, :count], model, forward_config, generation_config
    )


def _config_for_length(forward_config: ForwardConfig, length: int) -> ForwardConfig:
    """Return the options of a pass over `length` tokens at once: blockwise attention for long ones."""
    # Its memory is linear in the length.
    if length <= MAX_DENSE_LENGTH or forward_config.attention_options.kernel != "reference":
        return forward_config
    return replace(forward_config, attention_options=AttentionOptions("blockwise"))


def init_kv_cache(
    model: ModelSpec, shape: tuple[int, ...], forward_config: ForwardConfig
) -> KVCache:
    """Allocate an empty KV cache for tokens of shape [B, S]."""
    rows, slots = shape
    arch_config = model.arch_config
    windows = [arch_config.sliding_windows[layer] for layer in arch_config.caching_layers]
    options = (forward_config.dtype, forward_config.sharding)
    if model.arch_config.latent_key_dim:
        # The weights of the latent and of the shared keys are [C, D] and [P, D].
        latent_dim, _ = _layer_shape(model, "attn.kv_down.weight")
        rope_dim, _ = _layer_shape(model, "attn.k_rope.weight")
        return empty_kv_cache(windows, (rows, slots, 1, latent_dim), *options, value_dim=rope_dim)
    if not windows:
        cache = KVCache({}, jnp.int32(0), slots)
    else:
        kv_heads, head_dim, _ = _layer_shape(model, KEYS)
        cache = empty_kv_cache(
            windows,
            (rows, slots, kv_heads, head_dim),
            *options,
            head_shapes=_head_shapes(model),
        )
    if arch_config.mixer is None:
        return cache
    shapes = _recurrent_shapes(model, rows)
    return replace(cache, recurrent=empty_recurrent_cache(shapes, *options))


def _head_shapes(model: ModelSpec) -> dict[int, tuple[int, int]]:
    """Return window -> [K, E] of the keys of each group of layers with heads of another shape, and one window."""
    arch_config = model.arch_config
    shapes: dict[int, tuple[int, int]] = {}
    for group, layers in arch_config.shape_groups:
        if any(path.startswith(f"{group}.") and path.endswith(KEYS) for path in model.leaves):
            kv_heads, head_dim, _ = _layer_shape(model, KEYS, group)
            shapes[arch_config.sliding_windows[layers[0]]] = (kv_heads, head_dim)
    return shapes


def _recurrent_shapes(model: ModelSpec, rows: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the states of recurrent layers, by name."""
    mixer = model.arch_config.mixer
    assert mixer is not None
    layers = len(model.arch_config.mixer_layers)
    shapes: dict[str, tuple[int, ...]] = {}
    for name in mixer.convolutions:
        *channels, taps = _layer_shape(model, f"mixer.{name}.weight")
        shapes[name] = (layers, rows, taps - 1, *channels)
    if mixer.kind == "mamba":
        shapes[STATE] = (layers, rows, *_layer_shape(model, "mixer.a_log.weight"))
    elif mixer.has_state:
        _, key_dim, _ = _layer_shape(model, "mixer.k_conv.weight")
        groups, heads, value_dim, _ = _layer_shape(model, "mixer.v_conv.weight")
        shapes[STATE] = (layers, rows, groups, heads, key_dim, value_dim)
    return shapes


def _layer_shape(model: ModelSpec, suffix: str, group: str = "") -> list[int]:
    """Return the shape of a parameter in one decoder layer, by its group of layers and the end of its path."""
    leaf = next(
        leaf
        for leaf in model.leaves.values()
        if leaf.path_pattern.endswith(suffix)
        and leaf.path_pattern.startswith(group)
        and ENCODER not in leaf.path_pattern
    )
    # An axis of layers is somewhere in the leaf if it is stacked.
    extents = [*leaf.shape]
    if leaf.stack_axis is not None:
        del extents[leaf.stack_axis]
    return extents


def decode_loop(
    params: Tree,
    state: DecodeState,
    end_slot: Array,
    *,
    model: ModelSpec,
    forward_config: ForwardConfig,
    generation_config: GenerationConfig,
) -> DecodeState:
    """Sample one token per row at a time until slot `end_slot` is filled or all rows have ended.

    Args:
        params: Parameters from `cast_for_inference`.
        state: The state after `prefill` or an earlier loop.
        end_slot: int32 [], the last slot to fill.
        model: The model.
        forward_config: Execution options.
        generation_config: End tokens and sampling.
    """

    def is_unfinished(state: DecodeState) -> Array:
        # Rows that have ended stay in the computation until all have. The host drops their later tokens.
        return (state.kv_cache.length < end_slot) & ~state.batch.is_finished.all()

    def step(state: DecodeState) -> DecodeState:
        latest = lax.dynamic_slice_in_dim(state.batch.tokens, state.kv_cache.length, 1, axis=1)
        return _decode_and_sample(params, state, latest, model, forward_config, generation_config)

    return lax.while_loop(is_unfinished, step, state)


def _decode_and_sample(
    params: Tree,
    state: DecodeState,
    new_tokens: Array,
    model: ModelSpec,
    forward_config: ForwardConfig,
    generation_config: GenerationConfig,
) -> DecodeState:
    """Append the tokens [B, T] to the cache, from slot `kv_cache.length` on, and sample the tokens that follow."""
    batch = state.batch
    start_slots = state.batch.start_slots
    logits, kv_cache = decode_step(
        params,
        state.kv_cache,
        new_tokens,
        start_slots,
        model=model,
        forward_config=forward_config,
        encoder_output=batch.encoder_output,
    )
    # The number of the new token. With prompts in 64 slots it is 64 - 64 = 0 after the prefill, and
    # 87 - 64 = 23 after a recomputed cache of 87 slots, so that the random keys continue.
    step = kv_cache.length - batch.first_new_slot
    logits = apply_token_rules(
        logits,
        DecodedTokens(batch.tokens, start_slots, kv_cache.length, step),
        eos_token_ids=generation_config.eos_token_ids,
        max_new_tokens=generation_config.max_new_tokens,
        rules=generation_config.rules,
    )
    sampled = sample_tokens(logits, batch.row_numbers, step, generation_config.sampling)
    # Without a dtype an empty tuple of end tokens would be a float32 array.
    is_eos = jnp.isin(sampled, jnp.array(generation_config.eos_token_ids, jnp.int32))
    tokens = lax.dynamic_update_slice(batch.tokens, sampled[:, None], (0, kv_cache.length))
    return DecodeState(
        batch._replace(tokens=tokens, is_finished=batch.is_finished | is_eos), kv_cache
    )


def decode_step(
    params: Tree,
    kv_cache: KVCache,
    new_tokens: Array,
    start_slots: Array,
    *,
    model: ModelSpec,
    forward_config: ForwardConfig,
    encoder_output: EncoderOutput | None = None,
) -> tuple[Array, KVCache]:
    """Run the decoder on the next tokens of each row.

    Args:
        params: Parameters from `cast_for_inference`.
        kv_cache: Keys and values of all earlier slots.
        new_tokens: int32 [B, T], the tokens of the slots from `kv_cache.length` on. T is 1 unless the cache is empty.
        start_slots: int32 [B], the slot of each row's first token.
        model: The model.
        forward_config: Execution options.
        encoder_output: Result of `encode_sources`. Required if the model has an encoder.

    Returns:
        float32 logits [B, V] of the token that follows the last of `new_tokens`, and the cache with their keys and
        values.
    """
    arch_config = model.arch_config
    count = new_tokens.shape[1]
    # [B, T]: the position of slot s in a row that starts in slot r is s - r, e.g. a prompt of 10
    # tokens in 64 slots starts in slot 54, and its first new token, in slot 64, has position 10
    q_positions = kv_cache.length + jnp.arange(count) - start_slots[:, None]
    lengths = q_positions[:, -1] + 1
    max_length = kv_cache.num_slots
    cos_sin = {
        rope: rotary_cos_sin_at(rope, q_positions, lengths, max_length)
        for rope in arch_config.ropes
    }
    # [B, S] by window, negative before a row's first token
    kv_positions = {
        window: kv_cache.key_slots(window, count) - start_slots[:, None]
        for window in (FULL_ATTENTION, *arch_config.sliding_windows)
    }
    mask = AttentionMask(
        q_positions=q_positions,
        kv_positions=kv_positions[FULL_ATTENTION],
        kv_valid=kv_positions[FULL_ATTENTION] >= 0,
        window_kv_positions=kv_positions,
    )
    # Slots before a row's first token have negative positions. No token attends to them, so their
    # embedding only needs a position in range.
    x = embed_tokens(params, new_tokens, model, forward_config, jnp.maximum(q_positions, 0))
    context = transformer.decoder_context(
        params,
        model,
        forward_config,
        mask=mask,
        cos_sin_by_rope=cos_sin,
        encoder_output=encoder_output,
        document_positions=q_positions,
        layer_inputs=layer_inputs(params, new_tokens, x, model, forward_config),
    )
    x, updated_cache = run_stack(x, params, context, kv_cache)
    x = transformer.lm_head_input(params, x, model, forward_config)
    assert updated_cache is not None
    updated_cache = updated_cache.advance(count)
    # Only the last token's logits are sampled from: [B, 1, padded vocabulary].
    logits = transformer.logits_from_hidden(params, x[:, -1:], model, forward_config)
    return logits[:, 0, : model.true_vocab_size], updated_cache
