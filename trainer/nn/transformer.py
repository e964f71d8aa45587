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

from trainer.distributed.sharding import Shards
from trainer.models.architecture import Traits, period
from trainer.models.errors import PrepError, usage
from trainer.models.parameters import DECODER, ENCODER, LAYERS, Config, Family
from trainer.models.rope_config import Rope
from trainer.models.tree import Leaf, Tree, flat, leaves, nested
from trainer.nn import lm_head as heads
from trainer.nn.attention import keys_values
from trainer.nn.attention_mask import STACK, Cache, KeysValues, Memory, Seen, Turns, causal
from trainer.nn.block import block, split
from trainer.nn.lm_head import Head, Sums
from trainer.nn.norms import norm
from trainer.nn.rotary import by_distance, rotations

REMAT_NONE = "none"
SCORE_FACTOR = "score_factor"  # beside the weights of a layer, and none of them
REMAT_POLICIES = (  # of jax.checkpoint_policies those that are policies, not makers of one
    "nothing_saveable",
    "everything_saveable",
    "dots_saveable",
    "checkpoint_dots",
    "dots_with_no_batch_dims_saveable",
    "checkpoint_dots_with_no_batch_dims",
)


@dataclass(frozen=True, slots=True)
class Model:
    """An architecture: `leaves` by path, as they are stored; `vocab` is the true one, padded rows come after it."""

    family: Family
    traits: Traits
    leaves: Mapping[str, Leaf]
    vocab: int
    tied: bool

    @property
    def stacked(self) -> bool:
        """Whether a leaf holds all layers."""
        return any(leaf.stack_axis is not None for leaf in self.leaves.values())


@dataclass(frozen=True, slots=True)
class Compute:
    """How a forward pass is carried out; none of it changes results beyond rounding.

    scan: one compiled layer for all of them. remat: one of REMAT_POLICIES for what is kept of each layer, or "none":
    all. head_chunk: tokens of a row whose logits exist at a time, -1: all. Usage PrepError for another remat.
    """

    dtype: str = "float32"
    scan: bool = True
    remat: str = REMAT_NONE
    head_chunk: int = 512
    shards: Shards = field(default_factory=Shards)

    def __post_init__(self) -> None:
        if self.remat not in (REMAT_NONE, *REMAT_POLICIES):
            known = ", ".join((REMAT_NONE, *REMAT_POLICIES))
            raise usage(
                f"`model.remat_policy` is {self.remat!r:.60}", f"known: {known}", '`model.remat_policy = "none"`'
            )


def build(family: Family, config: Config, tied: bool, scan: bool = True, scan_axis: int = 0) -> Model:
    """The architecture that a config describes, its leaves stacked or not. PrepError where prep lacks it."""
    traits = family.traits(config)
    found = leaves(family, config, tied, scan, scan_axis)
    padded = family.sizes(config)["vocab"]
    vocab = config.get("true_vocab_size", padded)
    if not isinstance(vocab, int) or not 1 <= vocab <= padded:
        raise PrepError("config.json makes no sense", f"true_vocab_size is {vocab!r}, vocab_size {padded}")
    return Model(family, traits, found, vocab, tied)


def init(model: Model, seed: int) -> Tree:
    """First float32 values: normal for matrices and embeddings, zeros for biases; scales do nothing.

    Those of a layer are the same whether layers are stacked or not, and do not depend on what else a model has.
    """
    key = jax.random.key(seed)
    return nested({path: _first(leaf, key, model.traits) for path, leaf in model.leaves.items()})


def _first(leaf: Leaf, key: Array, traits: Traits) -> Array:
    std = traits.init_std
    if leaf.role in ("scale", "bias"):
        return jnp.full(leaf.shape, float(leaf.role == "scale" and traits.norm != "rms_offset"), jnp.float32)
    own = jax.random.fold_in(key, zlib.crc32(re.sub(r"\{\w+\}\.", "", leaf.row).encode()))
    axis = leaf.stack_axis
    if axis is not None:
        shape = (*leaf.shape[:axis], *leaf.shape[axis + 1 :])
        own = jax.vmap(partial(jax.random.fold_in, own))(jnp.arange(leaf.shape[axis]))
        return jnp.moveaxis(jax.vmap(lambda each: jax.random.normal(each, shape))(own), 0, axis) * std
    own = own if leaf.layer is None else jax.random.fold_in(own, leaf.layer)
    return jax.random.normal(own, leaf.shape) * std


def encode(params: Tree, source: Array, model: Model, how: Compute, present: Array | None = None) -> Memory:
    """What the encoder makes of source tokens [B, S]; `present`: bool [B, S], false for padding."""
    traits = model.traits.encoder
    if traits is None:
        raise PrepError(f"{model.family.name} has no encoder", "its layers look at nothing but their own tokens")
    params = computed_in(params, how.dtype)
    at = jnp.arange(source.shape[1])
    seen = Seen(present=present, bias=_bias(params[ENCODER], at, at, traits, how))
    layer = partial(_layer, traits, how, seen, {}, None)
    x, _ = _stack((embedded(params, source, model, how), None), params, ENCODER, model, traits, how, layer)
    return Memory(how.shards.constrain(x, "batch", "seq", "embed"), present)


def remembered(params: Tree, memory: Memory, model: Model, how: Compute) -> Memory:
    """What each layer makes of a memory, for steps with a cache; `params` in the dtype of the computation."""

    states = memory.states
    assert not isinstance(states, KeysValues)

    def look(weights: Tree) -> KeysValues:
        return keys_values(states, weights["cross"], model.traits, Seen(), how.shards)

    layers = _by_layer(params[DECODER][LAYERS], DECODER, len(model.traits.windows), model, how)
    if isinstance(layers, list):
        found = jax.tree.map(lambda *each: jnp.stack(each), *map(look, layers))
    else:
        found = lax.map(look, layers)
    return memory._replace(states=KeysValues(*(how.shards.constrain(each, *STACK) for each in found)))


def hidden(params: Tree, tokens: Array, model: Model, how: Compute, memory: Memory | None = None) -> Array:
    """Tokens [B, T] -> [B, T, D] as the head takes them, in the dtype of the computation; `memory` of the source where
    the model has an encoder."""
    traits, length = model.traits, tokens.shape[1]
    if traits.learns_positions and length > traits.positions:
        raise usage(
            f"{length} tokens a sequence", f"the model has {traits.positions} positions", "a smaller seq_length"
        )
    params = computed_in(params, how.dtype)
    turns = {rope: rotations(rope, length) for rope in traits.ropes}
    return decoded(params, embedded(params, tokens, model, how), model, how, causal(length), turns, memory=memory)[0]


def computed_in(params: Tree, dtype: str) -> Tree:
    """Parameters in the dtype of a computation."""
    return jax.tree.map(lambda leaf: leaf.astype(dtype), params)


def embedded(params: Tree, tokens: Array, model: Model, how: Compute, positions: Array | None = None) -> Array:
    """Tokens [B, T] -> [B, T, D] as the first layer takes them, at positions [B, T], or from 0 on."""
    traits = model.traits
    x = jnp.take(params["embed"]["tokens"], tokens, axis=0)
    if traits.embed_scale != 1.0:
        x = x * jnp.asarray(traits.embed_scale, x.dtype)  # rounded first, as transformers does
    x = _projected(x, params, "project_in")
    if traits.learns_positions:
        first, table = traits.position_offset, params["embed"]["positions"]
        x = x + (table[first : first + tokens.shape[1]] if positions is None else table[first + positions])
    return split(x, how.shards)


def decoded(
    params: Tree,
    x: Array,
    model: Model,
    how: Compute,
    seen: Seen,
    turns: Mapping[Rope, Turns],
    cache: Cache | None = None,
    memory: Memory | None = None,
) -> tuple[Array, Cache | None]:
    """What all layers and the last norm make of [B, T, D], and the cache with these tokens in it.

    `params` in the dtype of the computation; `turns`: of each rotation that `model.traits.ropes` has; `memory`: of the
    source where the model has an encoder.
    """
    if (memory is None) != (model.traits.encoder is None):
        raise ValueError(f"{model.family.name}: a memory goes with an encoder, and an encoder with a memory")
    traits, of = model.traits, DECODER if DECODER in params else ""
    if seen.queries is not None and seen.keys is not None:
        seen = dataclasses.replace(seen, bias=_bias(params[of] if of else params, seen.queries, seen.keys, traits, how))
    layer = partial(_layer, traits, how, seen, turns, memory)
    x, cache = _stack((x, cache), params, of, model, traits, how, layer)
    x = _projected(x, params, "project_out")
    if traits.head_scale != 1.0:  # a scale that is rounded first would be another one for all logits
        x = (x.astype(jnp.float32) * traits.head_scale).astype(x.dtype)
    return x, None if cache is None else cache.after(x.shape[1])


def _stack(
    stream: Stream, params: Tree, of: str, model: Model, traits: Traits, how: Compute, layer: Callable[..., Stream]
) -> Stream:
    """All layers and the last norm of one half of a model, or (`of` is empty) of one that has no halves."""
    part = params[of] if of else params
    layers = _with_factors(_by_layer(part[LAYERS], of, len(traits.windows), model, how), traits)
    x, cache = _layers(stream, layers, layer, how, traits)
    return norm(x, part.get("final_norm", {}), traits) if traits.final_norm else x, cache


def _bias(part: Tree, queries: Array, keys: Array, traits: Traits, how: Compute) -> Array | None:
    """What is added to scores for distances between positions [T] and [S]; None where nothing is."""
    if traits.distances is None:
        return None
    bias = by_distance(part["relative_positions"]["weight"], queries, keys, traits.distances)
    return how.shards.constrain(bias, *("batch",) * (bias.ndim - 3), "heads", "seq", "seq")


def _projected(x: Array, params: Tree, name: str) -> Array:
    """Between the width of embeddings and that of layers, where these differ."""
    return jnp.einsum("bti,oi->bto", x, params[name]["weight"]) if name in params else x


def logits(params: Tree, tokens: Array, model: Model, how: Compute, memory: Memory | None = None) -> Array:
    """Tokens [B, T] -> float32 [B, T, V]; those of padded rows of the vocabulary are far below all others."""
    return logits_of(params, hidden(params, tokens, model, how, memory), model, how)


def logits_of(params: Tree, x: Array, model: Model, how: Compute) -> Array:
    """The same from hidden states [B, T, D]."""
    head = Head(model.vocab, -1, how.shards, model.traits.logit_cap)
    return heads.logits(x, _head_weight(params, model, how), head, _head_bias(params))


def loss_sums(params: Tree, batch: Mapping[str, Array], model: Model, how: Compute) -> Sums:
    """Sums over the tokens of a batch: `tokens` and `targets` [B, T], `weights` [B, T] float32, 0 for no target; for
    an encoder `source` [B, S] and `present` [B, S], 0 for padding."""
    has = model.traits.encoder is not None
    memory = encode(params, batch["source"], model, how, batch["present"] != 0) if has else None
    x = how.shards.constrain(hidden(params, batch["tokens"], model, how, memory), "batch", "seq", "embed")
    head = Head(model.vocab, how.head_chunk, how.shards, model.traits.logit_cap)
    weight, bias = _head_weight(params, model, how), _head_bias(params)
    return heads.loss_sums(x, weight, batch["targets"], batch["weights"], head, bias)


def _head_weight(params: Tree, model: Model, how: Compute) -> Array:
    weight = params["embed"]["tokens"] if model.tied else params["head"]["weight"]
    return weight.astype(how.dtype)


def _head_bias(params: Tree) -> Array | None:
    return params.get("head", {}).get("bias")


def _layer(
    traits: Traits,
    how: Compute,
    seen: Seen,
    turns: Mapping[Rope, Turns],
    memory: Memory | None,
    window: int,
    stream: Stream,
    weights: Tree,
) -> Stream:
    x, cache = stream
    if memory is not None and cache is not None:
        memory = memory.of(cache.layer)
    rope = traits.rope_of(window)
    factor = weights.get(SCORE_FACTOR)
    own = dataclasses.replace(seen, window=window, turns=turns[rope] if rope else None, score_factor=factor)
    return block(x, weights, traits, own, how.shards, cache, memory)


Layers = Tree | list[Tree]  # stacked on axis 0, or one by one
Stream = tuple[Array, Cache | None]  # [B, T, D] between layers, and what is kept of it


def _by_layer(weights: Tree, of: str, count: int, model: Model, how: Compute) -> Layers:
    """Weights as the loop over layers takes them. Usage PrepError for a scan over leaves that are apart."""
    if not model.stacked:
        if how.scan:
            raise layers_apart()
        return [weights[str(i)] for i in range(count)]
    axes = {path: leaf.stack_axis for path, leaf in model.leaves.items()}
    above = f"{of}.{LAYERS}." if of else f"{LAYERS}."
    stacked = nested({path: jnp.moveaxis(leaf, axes[above + path] or 0, 0) for path, leaf in flat(weights).items()})
    return stacked if how.scan else [_at(stacked, i) for i in range(count)]


def _with_factors(layers: Layers, traits: Traits) -> Layers:
    """The layers' weights, with what scores of each are multiplied by, where that differs between layers."""
    if not traits.scores_by_depth:
        return layers
    factors = jnp.asarray([1 / number for number in range(1, len(traits.windows) + 1)], jnp.float32)
    if isinstance(layers, list):
        return [{**own, SCORE_FACTOR: factor} for own, factor in zip(layers, factors)]
    return {**layers, SCORE_FACTOR: factors}


def layers_apart() -> PrepError:
    """The error of a scan over layers that are apart."""
    hint = "`model.scan_layers = false`, or `prep reshard --scan`"
    return usage("layers cannot be scanned", "the checkpoint has a leaf for each of them", hint)


def _at(stacked: Tree, index: int | Array) -> Tree:
    return jax.tree.map(lambda leaf: leaf[index], stacked)


def _layers(
    x: Stream, weights: Layers, layer: Callable[[int, Stream, Tree], Stream], how: Compute, traits: Traits
) -> Stream:
    """All layers in turn; scanned by whole periods of the pattern of windows, so that windows are static."""
    windows, every, done = traits.windows, period(traits.windows), 0
    if not isinstance(weights, list):
        bodies = [_kept(partial(layer, window), how, in_loop=True) for window in windows[:every]]
        if (times := len(windows) // every) > 1:
            x, done = _scanned(x, weights, bodies, times), times * every
        weights = [_at(weights, index) for index in range(done, len(windows))]
    each = {window: _kept(partial(layer, window), how) for window in {*windows}}
    for window, own in zip(windows[done:], weights):
        x = each[window](x, own)
    return x


def _scanned(x: Stream, stacked: Tree, bodies: list[Callable[[Stream, Tree], Stream]], times: int) -> Stream:
    """With a cache there is no backward pass, and layers are taken out of the stack as their turn comes: a part of it
    that is cut off for the loop would be a copy."""
    every = len(bodies)

    def in_turn(x: Stream, weights: Tree, first: int | Array) -> tuple[Stream, None]:
        for index, body in enumerate(bodies):
            x = body(x, _at(weights, first + index))
        return x, None

    if x[1] is not None:
        return lax.scan(lambda x, first: in_turn(x, stacked, first), x, every * jnp.arange(times))[0]
    groups = jax.tree.map(lambda leaf: leaf[: times * every].reshape(times, every, *leaf.shape[1:]), stacked)
    return lax.scan(lambda x, weights: in_turn(x, weights, 0), x, groups)[0]


def _kept(layer: Callable[[Stream, Tree], Stream], how: Compute, in_loop: bool = False) -> Callable[..., Any]:
    """The layer, with what is kept of it for the backward pass.

    Where no loop lies between the two passes, the compiler would find both computing the same, and keep it all.
    """
    if how.remat == REMAT_NONE:
        return layer
    policy = getattr(jax.checkpoint_policies, how.remat)
    return jax.checkpoint(layer, policy=policy, prevent_cse=not in_loop)
