"""Decoding on devices: the tokens of prompts all at once, then one after the other, with keys and values kept.

Rows of a batch end in the same slot and begin where they may: positions count from a row's first token, and nothing
sees the slots before it, so that a row has the tokens that it would have alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from trainer.generation.sampling import Sampling, sample_tokens
from trainer.models.errors import usage_error
from trainer.models.param_tree import Tree, flatten_tree, unflatten_tree
from trainer.models.parameters import ENCODER
from trainer.nn import transformer as core
from trainer.nn.attention_mask import AttentionMask, EncoderOutput, KVCache, empty_kv_cache
from trainer.nn.position_encoding import rotary_cos_sin_at
from trainer.nn.transformer import ForwardConfig, ModelSpec


@dataclass(frozen=True, slots=True)
class GenerationConfig:
    """What to generate: at most so many new tokens a row, up to the first that is among `ends`, which is kept."""

    max_new_tokens: int
    eos_token_ids: tuple[int, ...] = ()
    sampling: Sampling = field(default_factory=Sampling)

    def __post_init__(self) -> None:
        """Usage PrepError for no tokens."""
        if self.max_new_tokens < 1:
            raise usage_error(f"{self.max_new_tokens} new tokens", "there is nothing to generate", "a number from 1 on")


class PromptBatch(NamedTuple):
    """Rows of tokens, int32 [B, S]: row b's begin in slot `starts[b]`, the first new ones are in slot `first`.

    starts, rows: int32 [B]; what is drawn for a row depends on its number. ended: bool [B]. first: int32 [].
    memory: what an encoder made of the sources.
    """

    tokens: Array
    start_slots: Array
    row_numbers: Array
    is_finished: Array
    first_new_slot: Array
    encoder_output: EncoderOutput | None = None


class DecodeState(NamedTuple):
    """A batch on its way: the newest tokens are in slot `cache.filled`, all before them have been looked at."""

    batch: PromptBatch
    kv_cache: KVCache


def cast_for_inference(params: Tree, forward_config: ForwardConfig) -> Tree:
    """Parameters as all steps use them; those that are so already are not copied."""
    wanted = {path: jnp.dtype(inference_dtype(path, forward_config.dtype)) for path in flatten_tree(params)}
    return unflatten_tree(
        {p: leaf if leaf.dtype == wanted[p] else leaf.astype(wanted[p]) for p, leaf in flatten_tree(params).items()}
    )


def inference_dtype(path: str, compute_dtype: str) -> str:
    """The dtype of a parameter in steps that are computed in one: what is added to logits is float32, as they are."""
    return "float32" if path == "head.bias" else compute_dtype


def encode_sources(
    params: Tree, sources: Array, source_mask: Array, model: ModelSpec, forward_config: ForwardConfig
) -> EncoderOutput:
    """Of sources [B, S], `present` where they are no padding, the keys and values of all layers."""
    return core.precompute_cross_kv(
        params, core.encode(params, sources, model, forward_config, source_mask), model, forward_config
    )


def prefill(
    params: Tree,
    batch: PromptBatch,
    count: int,
    model: ModelSpec,
    forward_config: ForwardConfig,
    generation_config: GenerationConfig,
) -> DecodeState:
    """Of what is in the first `count` slots all keys and values, and the tokens that come next."""
    cache = init_kv_cache(model, batch.tokens.shape, forward_config)
    return _decode_and_sample(
        params, DecodeState(batch, cache), batch.tokens[:, :count], model, forward_config, generation_config
    )


def init_kv_cache(model: ModelSpec, shape: tuple[int, ...], forward_config: ForwardConfig) -> KVCache:
    """A cache for tokens [B, S], with nothing in it."""
    rows, slots = shape
    keys = next(
        leaf
        for leaf in model.leaves.values()
        if leaf.path_pattern.endswith("attn.k.weight") and ENCODER not in leaf.path_pattern
    )
    heads, head_dim, _ = (extent for axis, extent in enumerate(keys.shape) if axis != keys.stack_axis)
    return empty_kv_cache(
        (len(model.arch_config.sliding_windows), rows, slots, heads, head_dim),
        forward_config.dtype,
        forward_config.sharding,
    )


def decode_loop(
    params: Tree,
    state: DecodeState,
    end_slot: Array,
    model: ModelSpec,
    forward_config: ForwardConfig,
    generation_config: GenerationConfig,
) -> DecodeState:
    """One token after the other, up to that in slot `until`, or to when all rows have ended."""

    def more(state: DecodeState) -> Array:
        return (state.kv_cache.length < end_slot) & ~state.batch.is_finished.all()

    def step(state: DecodeState) -> DecodeState:
        newest = lax.dynamic_slice_in_dim(state.batch.tokens, state.kv_cache.length, 1, axis=1)
        return _decode_and_sample(params, state, newest, model, forward_config, generation_config)

    return lax.while_loop(more, step, state)


def _decode_and_sample(
    params: Tree,
    state: DecodeState,
    new_tokens: Array,
    model: ModelSpec,
    forward_config: ForwardConfig,
    generation_config: GenerationConfig,
) -> DecodeState:
    """After the tokens `new` [B, T], in the slots from `cache.filled` on."""
    batch = state.batch
    logits, cache = decode_step(
        params, state.kv_cache, new_tokens, batch.start_slots, model, forward_config, batch.encoder_output
    )
    tokens = sample_tokens(logits, batch.row_numbers, cache.length - batch.first_new_slot, generation_config.sampling)
    ended = batch.is_finished | jnp.isin(tokens, jnp.array(generation_config.eos_token_ids, jnp.int32))
    tokens = lax.dynamic_update_slice(batch.tokens, tokens[:, None], (0, cache.length))
    return DecodeState(batch._replace(tokens=tokens, is_finished=ended), cache)


def decode_step(
    params: Tree,
    kv_cache: KVCache,
    new_tokens: Array,
    start_slots: Array,
    model: ModelSpec,
    forward_config: ForwardConfig,
    encoder_output: EncoderOutput | None = None,
) -> tuple[Array, KVCache]:
    """Float32 logits [B, V] of what comes after the tokens `new` [B, T], in the slots from `cache.filled` on, and the
    cache with them. V is the true vocabulary; `params` are `ready`; row b begins in slot `starts[b]`."""
    slots = kv_cache.keys.shape[2]
    positions = kv_cache.length + jnp.arange(new_tokens.shape[1]) - start_slots[:, None]
    keys = jnp.arange(slots) - start_slots[:, None]
    lengths = positions[:, -1] + 1
    turns = {rope: rotary_cos_sin_at(rope, positions, lengths, slots) for rope in model.arch_config.ropes}
    x = core.embed_tokens(params, new_tokens, model, forward_config, jnp.maximum(positions, 0))
    x, found = core.run_decoder(
        params,
        x,
        model,
        forward_config,
        AttentionMask(positions, keys, kv_valid=keys >= 0),
        turns,
        kv_cache,
        encoder_output,
    )
    assert found is not None
    return core.logits_from_hidden(params, x[:, -1:], model, forward_config)[:, 0, : model.true_vocab_size], found
