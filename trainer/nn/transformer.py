"""The functional core: first values, hidden states and loss of any family, from its table and traits."""

from __future__ import annotations

import dataclasses
import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from trainer.distributed.sharding import ShardingContext
from trainer.models.architecture import ArchConfig, window_period
from trainer.models.errors import PrepError, usage_error
from trainer.models.param_tree import ParamLeaf, Tree, flatten_tree, param_leaves, unflatten_tree
from trainer.models.parameters import DECODER, ENCODER, LAYERS, Family, HFConfig
from trainer.models.rope_config import Rope
from trainer.nn import lm_head as heads
from trainer.nn.attention import project_kv
from trainer.nn.attention_mask import KV, KV_CACHE_DIMS, AttentionMask, CosSin, EncoderOutput, KVCache, causal_mask
from trainer.nn.block import block, shard_residual
from trainer.nn.lm_head import LMHead, LossSums
from trainer.nn.norms import norm
from trainer.nn.position_encoding import relative_position_bias, rotary_cos_sin

REMAT_NONE = "none"
LAYER_SCORE_SCALE = "score_factor"  # beside the weights of a layer, and none of them
REMAT_POLICIES = (  # of jax.checkpoint_policies those that are policies, not makers of one
    "nothing_saveable",
    "everything_saveable",
    "dots_saveable",
    "checkpoint_dots",
    "dots_with_no_batch_dims_saveable",
    "checkpoint_dots_with_no_batch_dims",
)


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """An architecture: `leaves` by path, as they are stored; `vocab` is the true one, padded rows come after it."""

    family: Family
    arch_config: ArchConfig
    leaves: Mapping[str, ParamLeaf]
    true_vocab_size: int
    is_tied: bool

    @property
    def has_stacked_layers(self) -> bool:
        """Whether a leaf holds all layers."""
        return any(leaf.stack_axis is not None for leaf in self.leaves.values())


@dataclass(frozen=True, slots=True)
class ForwardConfig:
    """How a forward pass is carried out; none of it changes results beyond rounding.

    scan: one compiled layer for all of them. remat: one of REMAT_POLICIES for what is kept of each layer, or "none":
    all. head_chunk: tokens of a row whose logits exist at a time, -1: all. Usage PrepError for another remat.
    """

    dtype: str = "float32"
    scan_layers: bool = True
    remat_policy: str = REMAT_NONE
    head_chunk_size: int = 512
    sharding: ShardingContext = field(default_factory=ShardingContext)

    def __post_init__(self) -> None:
        if self.remat_policy not in (REMAT_NONE, *REMAT_POLICIES):
            known = ", ".join((REMAT_NONE, *REMAT_POLICIES))
            raise usage_error(
                f"`model.remat_policy` is {self.remat_policy!r:.60}", f"known: {known}", '`model.remat_policy = "none"`'
            )


def build_model(family: Family, config: HFConfig, is_tied: bool, scan: bool = True, scan_axis: int = 0) -> ModelSpec:
    """The architecture that a config describes, its leaves stacked or not. PrepError where prep lacks it."""
    traits = family.arch_config(config)
    found = param_leaves(family, config, is_tied, scan, scan_axis)
    padded = family.sizes(config)["vocab"]
    vocab = config.get("true_vocab_size", padded)
    if not isinstance(vocab, int) or not 1 <= vocab <= padded:
        raise PrepError("config.json makes no sense", f"true_vocab_size is {vocab!r}, vocab_size {padded}")
    return ModelSpec(family, traits, found, vocab, is_tied)


def init_params(model: ModelSpec, seed: int) -> Tree:
    """First float32 values: normal for matrices and embeddings, zeros for biases; scales do nothing.

    Those of a layer are the same whether layers are stacked or not, and do not depend on what else a model has.
    """
    key = jax.random.key(seed)
    return unflatten_tree({path: _init_leaf(leaf, key, model.arch_config) for path, leaf in model.leaves.items()})


def _init_leaf(leaf: ParamLeaf, key: Array, arch_config: ArchConfig) -> Array:
    std = arch_config.init_std
    if leaf.role in ("scale", "bias"):
        return jnp.full(leaf.shape, float(leaf.role == "scale" and arch_config.norm != "rms_offset"), jnp.float32)
    own = jax.random.fold_in(key, zlib.crc32(re.sub(r"\{\w+\}\.", "", leaf.path_pattern).encode()))
    axis = leaf.stack_axis
    if axis is not None:
        shape = (*leaf.shape[:axis], *leaf.shape[axis + 1 :])
        own = jax.vmap(partial(jax.random.fold_in, own))(jnp.arange(leaf.shape[axis]))
        return jnp.moveaxis(jax.vmap(lambda each: jax.random.normal(each, shape))(own), 0, axis) * std
    own = own if leaf.layer_index is None else jax.random.fold_in(own, leaf.layer_index)
    return jax.random.normal(own, leaf.shape) * std


def encode(
    params: Tree,
    source_tokens: Array,
    model: ModelSpec,
    forward_config: ForwardConfig,
    source_mask: Array | None = None,
) -> EncoderOutput:
    """What the encoder makes of source tokens [B, S]; `present`: bool [B, S], false for padding."""
    traits = model.arch_config.encoder
    if traits is None:
        raise PrepError(f"{model.family.name} has no encoder", "its layers look at nothing but their own tokens")
    params = cast_params(params, forward_config.dtype)
    at = jnp.arange(source_tokens.shape[1])
    seen = AttentionMask(
        kv_valid=source_mask, bias=_relative_position_bias(params[ENCODER], at, at, traits, forward_config)
    )
    layer = partial(_run_layer, traits, forward_config, seen, {}, None)
    x, _ = _run_stack(
        (embed_tokens(params, source_tokens, model, forward_config), None),
        params,
        ENCODER,
        model,
        traits,
        forward_config,
        layer,
    )
    return EncoderOutput(forward_config.sharding.constrain(x, "batch", "seq", "embed"), source_mask)


def precompute_cross_kv(
    params: Tree, encoder_output: EncoderOutput, model: ModelSpec, forward_config: ForwardConfig
) -> EncoderOutput:
    """What each layer makes of a memory, for steps with a cache; `params` in the dtype of the computation."""

    states = encoder_output.states
    assert not isinstance(states, KV)

    def look(weights: Tree) -> KV:
        return project_kv(states, weights["cross"], model.arch_config, AttentionMask(), forward_config.sharding)

    layers = _layer_weights(
        params[DECODER][LAYERS], DECODER, len(model.arch_config.sliding_windows), model, forward_config
    )
    if isinstance(layers, list):
        found = jax.tree.map(lambda *each: jnp.stack(each), *map(look, layers))
    else:
        found = lax.map(look, layers)
    return encoder_output._replace(
        states=KV(*(forward_config.sharding.constrain(each, *KV_CACHE_DIMS) for each in found))
    )


def hidden_states(
    params: Tree,
    tokens: Array,
    model: ModelSpec,
    forward_config: ForwardConfig,
    encoder_output: EncoderOutput | None = None,
) -> Array:
    """Tokens [B, T] -> [B, T, D] as the head takes them, in the dtype of the computation; `memory` of the source where
    the model has an encoder."""
    traits, length = model.arch_config, tokens.shape[1]
    if traits.has_learned_positions and length > traits.max_positions:
        raise usage_error(
            f"{length} tokens a sequence", f"the model has {traits.max_positions} positions", "a smaller seq_length"
        )
    params = cast_params(params, forward_config.dtype)
    turns = {rope: rotary_cos_sin(rope, length) for rope in traits.ropes}
    return run_decoder(
        params,
        embed_tokens(params, tokens, model, forward_config),
        model,
        forward_config,
        causal_mask(length),
        turns,
        encoder_output=encoder_output,
    )[0]


def cast_params(params: Tree, dtype: str) -> Tree:
    """Parameters in the dtype of a computation."""
    return jax.tree.map(lambda leaf: leaf.astype(dtype), params)


def embed_tokens(
    params: Tree, tokens: Array, model: ModelSpec, forward_config: ForwardConfig, positions: Array | None = None
) -> Array:
    """Tokens [B, T] -> [B, T, D] as the first layer takes them, at positions [B, T], or from 0 on."""
    traits = model.arch_config
    x = jnp.take(params["embed"]["tokens"], tokens, axis=0)
    if traits.embed_scale != 1.0:
        x = x * jnp.asarray(traits.embed_scale, x.dtype)  # rounded first, as transformers does
    x = _project(x, params, "project_in")
    if traits.has_learned_positions:
        first, table = traits.position_offset, params["embed"]["positions"]
        x = x + (table[first : first + tokens.shape[1]] if positions is None else table[first + positions])
    return shard_residual(x, forward_config.sharding)


def run_decoder(
    params: Tree,
    x: Array,
    model: ModelSpec,
    forward_config: ForwardConfig,
    mask: AttentionMask,
    cos_sin_by_rope: Mapping[Rope, CosSin],
    kv_cache: KVCache | None = None,
    encoder_output: EncoderOutput | None = None,
) -> tuple[Array, KVCache | None]:
    """What all layers and the last norm make of [B, T, D], and the cache with these tokens in it.

    `params` in the dtype of the computation; `turns`: of each rotation that `model.traits.ropes` has; `memory`: of the
    source where the model has an encoder.
    """
    if (encoder_output is None) != (model.arch_config.encoder is None):
        raise ValueError(f"{model.family.name}: a memory goes with an encoder, and an encoder with a memory")
    traits, of = model.arch_config, DECODER if DECODER in params else ""
    if mask.q_positions is not None and mask.kv_positions is not None:
        mask = dataclasses.replace(
            mask,
            bias=_relative_position_bias(
                params[of] if of else params, mask.q_positions, mask.kv_positions, traits, forward_config
            ),
        )
    layer = partial(_run_layer, traits, forward_config, mask, cos_sin_by_rope, encoder_output)
    x, kv_cache = _run_stack((x, kv_cache), params, of, model, traits, forward_config, layer)
    x = _project(x, params, "project_out")
    if traits.lm_head_input_scale != 1.0:  # a scale that is rounded first would be another one for all logits
        x = (x.astype(jnp.float32) * traits.lm_head_input_scale).astype(x.dtype)
    return x, None if kv_cache is None else kv_cache.advance(x.shape[1])


def _run_stack(
    carry: LayerCarry,
    params: Tree,
    stack_name: str,
    model: ModelSpec,
    arch_config: ArchConfig,
    forward_config: ForwardConfig,
    run_layer: Callable[..., LayerCarry],
) -> LayerCarry:
    """All layers and the last norm of one half of a model, or (`of` is empty) of one that has no halves."""
    part = params[stack_name] if stack_name else params
    layers = _with_score_scales(
        _layer_weights(part[LAYERS], stack_name, len(arch_config.sliding_windows), model, forward_config), arch_config
    )
    x, cache = _run_layers(carry, layers, run_layer, forward_config, arch_config)
    return norm(x, part.get("final_norm", {}), arch_config) if arch_config.has_final_norm else x, cache


def _relative_position_bias(
    params: Tree, q_positions: Array, kv_positions: Array, arch_config: ArchConfig, forward_config: ForwardConfig
) -> Array | None:
    """What is added to scores for distances between positions [T] and [S]; None where nothing is."""
    if arch_config.relative_position_bias is None:
        return None
    bias = relative_position_bias(
        params["relative_positions"]["weight"], q_positions, kv_positions, arch_config.relative_position_bias
    )
    return forward_config.sharding.constrain(bias, *("batch",) * (bias.ndim - 3), "heads", "seq", "seq")


def _project(x: Array, params: Tree, name: str) -> Array:
    """Between the width of embeddings and that of layers, where these differ."""
    return jnp.einsum("bti,oi->bto", x, params[name]["weight"]) if name in params else x


def compute_logits(
    params: Tree,
    tokens: Array,
    model: ModelSpec,
    forward_config: ForwardConfig,
    encoder_output: EncoderOutput | None = None,
) -> Array:
    """Tokens [B, T] -> float32 [B, T, V]; those of padded rows of the vocabulary are far below all others."""
    return logits_from_hidden(
        params, hidden_states(params, tokens, model, forward_config, encoder_output), model, forward_config
    )


def logits_from_hidden(params: Tree, x: Array, model: ModelSpec, forward_config: ForwardConfig) -> Array:
    """The same from hidden states [B, T, D]."""
    head = LMHead(model.true_vocab_size, -1, forward_config.sharding, model.arch_config.final_logit_softcap)
    return heads.project_logits(x, _lm_head_weight(params, model, forward_config), head, _lm_head_bias(params))


def loss_sums(params: Tree, batch: Mapping[str, Array], model: ModelSpec, forward_config: ForwardConfig) -> LossSums:
    """Sums over the tokens of a batch: `tokens` and `targets` [B, T], `weights` [B, T] float32, 0 for no target; for
    an encoder `source` [B, S] and `present` [B, S], 0 for padding."""
    has = model.arch_config.encoder is not None
    memory = encode(params, batch["source"], model, forward_config, batch["present"] != 0) if has else None
    x = forward_config.sharding.constrain(
        hidden_states(params, batch["tokens"], model, forward_config, memory), "batch", "seq", "embed"
    )
    head = LMHead(
        model.true_vocab_size,
        forward_config.head_chunk_size,
        forward_config.sharding,
        model.arch_config.final_logit_softcap,
    )
    weight, bias = _lm_head_weight(params, model, forward_config), _lm_head_bias(params)
    return heads.loss_sums(x, weight, batch["targets"], batch["weights"], head, bias)


def _lm_head_weight(params: Tree, model: ModelSpec, forward_config: ForwardConfig) -> Array:
    weight = params["embed"]["tokens"] if model.is_tied else params["head"]["weight"]
    return weight.astype(forward_config.dtype)


def _lm_head_bias(params: Tree) -> Array | None:
    return params.get("head", {}).get("bias")


def _run_layer(
    arch_config: ArchConfig,
    forward_config: ForwardConfig,
    mask: AttentionMask,
    cos_sin_by_rope: Mapping[Rope, CosSin],
    encoder_output: EncoderOutput | None,
    window: int,
    carry: LayerCarry,
    weights: Tree,
) -> LayerCarry:
    x, cache = carry
    if encoder_output is not None and cache is not None:
        encoder_output = encoder_output.for_layer(cache.layer)
    rope = arch_config.rope_for(window)
    factor = weights.get(LAYER_SCORE_SCALE)
    own = dataclasses.replace(
        mask, window=window, cos_sin=cos_sin_by_rope[rope] if rope else None, layer_score_scale=factor
    )
    return block(x, weights, arch_config, own, forward_config.sharding, cache, encoder_output)


LayerWeights = Tree | list[Tree]  # stacked on axis 0, or one by one
LayerCarry = tuple[Array, KVCache | None]  # [B, T, D] between layers, and what is kept of it


def _layer_weights(
    weights: Tree, stack_name: str, num_layers: int, model: ModelSpec, forward_config: ForwardConfig
) -> LayerWeights:
    """Weights as the loop over layers takes them. Usage PrepError for a scan over leaves that are apart."""
    if not model.has_stacked_layers:
        if forward_config.scan_layers:
            raise unscannable_error()
        return [weights[str(i)] for i in range(num_layers)]
    axes = {path: leaf.stack_axis for path, leaf in model.leaves.items()}
    above = f"{stack_name}.{LAYERS}." if stack_name else f"{LAYERS}."
    stacked = unflatten_tree(
        {path: jnp.moveaxis(leaf, axes[above + path] or 0, 0) for path, leaf in flatten_tree(weights).items()}
    )
    return stacked if forward_config.scan_layers else [_take_layer(stacked, i) for i in range(num_layers)]


def _with_score_scales(layers: LayerWeights, arch_config: ArchConfig) -> LayerWeights:
    """The layers' weights, with what scores of each are multiplied by, where that differs between layers."""
    if not arch_config.scale_attn_by_inverse_layer_idx:
        return layers
    factors = jnp.asarray([1 / number for number in range(1, len(arch_config.sliding_windows) + 1)], jnp.float32)
    if isinstance(layers, list):
        return [{**own, LAYER_SCORE_SCALE: factor} for own, factor in zip(layers, factors)]
    return {**layers, LAYER_SCORE_SCALE: factors}


def unscannable_error() -> PrepError:
    """The error of a scan over layers that are apart."""
    hint = "`model.scan_layers = false`, or `prep reshard --scan`"
    return usage_error("layers cannot be scanned", "the checkpoint has a leaf for each of them", hint)


def _take_layer(stacked: Tree, index: int | Array) -> Tree:
    return jax.tree.map(lambda leaf: leaf[index], stacked)


def _run_layers(
    carry: LayerCarry,
    weights: LayerWeights,
    run_layer: Callable[[int, LayerCarry, Tree], LayerCarry],
    forward_config: ForwardConfig,
    arch_config: ArchConfig,
) -> LayerCarry:
    """All layers in turn; scanned by whole periods of the pattern of windows, so that windows are static."""
    windows, every, done = arch_config.sliding_windows, window_period(arch_config.sliding_windows), 0
    if not isinstance(weights, list):
        bodies = [_with_remat(partial(run_layer, window), forward_config, in_loop=True) for window in windows[:every]]
        if (times := len(windows) // every) > 1:
            carry, done = _scan_layers(carry, weights, bodies, times), times * every
        weights = [_take_layer(weights, index) for index in range(done, len(windows))]
    each = {window: _with_remat(partial(run_layer, window), forward_config) for window in {*windows}}
    for window, own in zip(windows[done:], weights):
        carry = each[window](carry, own)
    return carry


def _scan_layers(
    carry: LayerCarry, stacked: Tree, layer_fns: list[Callable[[LayerCarry, Tree], LayerCarry]], num_periods: int
) -> LayerCarry:
    """With a cache there is no backward pass, and layers are taken out of the stack as their turn comes: a part of it
    that is cut off for the loop would be a copy."""
    every = len(layer_fns)

    def in_turn(x: LayerCarry, weights: Tree, first: int | Array) -> tuple[LayerCarry, None]:
        for index, body in enumerate(layer_fns):
            x = body(x, _take_layer(weights, first + index))
        return x, None

    if carry[1] is not None:
        return lax.scan(lambda x, first: in_turn(x, stacked, first), carry, every * jnp.arange(num_periods))[0]
    groups = jax.tree.map(
        lambda leaf: leaf[: num_periods * every].reshape(num_periods, every, *leaf.shape[1:]), stacked
    )
    return lax.scan(lambda x, weights: in_turn(x, weights, 0), carry, groups)[0]


def _with_remat(
    layer: Callable[[LayerCarry, Tree], LayerCarry], forward_config: ForwardConfig, in_loop: bool = False
) -> Callable[..., Any]:
    """The layer, with what is kept of it for the backward pass.

    Where no loop lies between the two passes, the compiler would find both computing the same, and keep it all.
    """
    if forward_config.remat_policy == REMAT_NONE:
        return layer
    policy = getattr(jax.checkpoint_policies, forward_config.remat_policy)
    return jax.checkpoint(layer, policy=policy, prevent_cse=not in_loop)
