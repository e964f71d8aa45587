"""The functional core: first values, hidden states and loss of any family's decoder, from its table and traits."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from trainer.errors import PrepError, usage
from trainer.layers import head as heads
from trainer.layers.block import block, split
from trainer.layers.head import Head, Sums
from trainer.layers.norms import norm
from trainer.layers.positions import rotations
from trainer.rope import Rope
from trainer.sharding import Shards
from trainer.table import LAYERS, Config, Family
from trainer.traits import Traits, period
from trainer.tree import Leaf, Tree, flat, leaves, nested

REMAT_NONE = "none"
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
    own = jax.random.fold_in(key, zlib.crc32(leaf.row.replace(f"{{{LAYERS}}}.", "").encode()))
    axis = leaf.stack_axis
    if axis is not None:
        shape = (*leaf.shape[:axis], *leaf.shape[axis + 1 :])
        own = jax.vmap(partial(jax.random.fold_in, own))(jnp.arange(leaf.shape[axis]))
        return jnp.moveaxis(jax.vmap(lambda each: jax.random.normal(each, shape))(own), 0, axis) * std
    own = own if leaf.layer is None else jax.random.fold_in(own, leaf.layer)
    return jax.random.normal(own, leaf.shape) * std


def hidden(params: Tree, tokens: Array, model: Model, how: Compute) -> Array:
    """Tokens [B, T] -> [B, T, D] as the head takes them, in the dtype of the computation."""
    traits, shards, length = model.traits, how.shards, tokens.shape[1]
    if traits.rope is None and length > traits.positions:
        raise usage(
            f"{length} tokens a sequence", f"the model has {traits.positions} positions", "a smaller seq_length"
        )
    params = jax.tree.map(lambda leaf: leaf.astype(how.dtype), params)
    x = split(_embedded(params, tokens, traits), shards)
    turns = {rope: rotations(rope, length) for rope in {*map(traits.rope_of, traits.windows)} if rope}
    x = _layers(x, _by_layer(params[LAYERS], model, how), partial(_layer, model, how, turns), how, traits)
    x = norm(x, params.get("final_norm", {}), traits) if traits.final_norm else x
    return _projected(x, params, "project_out")


def _embedded(params: Tree, tokens: Array, traits: Traits) -> Array:
    x = jnp.take(params["embed"]["tokens"], tokens, axis=0)
    if traits.embed_scale != 1.0:
        x = x * jnp.asarray(traits.embed_scale, x.dtype)  # rounded first, as transformers does
    x = _projected(x, params, "project_in")
    if traits.rope is None:
        first = traits.position_offset
        x = x + params["embed"]["positions"][first : first + tokens.shape[1]]
    return x


def _projected(x: Array, params: Tree, name: str) -> Array:
    """Between the width of embeddings and that of layers, where these differ."""
    return jnp.einsum("bti,oi->bto", x, params[name]["weight"]) if name in params else x


def logits(params: Tree, tokens: Array, model: Model, how: Compute) -> Array:
    """Tokens [B, T] -> float32 [B, T, V]; those of padded rows of the vocabulary are far below all others."""
    x = hidden(params, tokens, model, how)
    head = Head(model.vocab, -1, how.shards, model.traits.logit_cap)
    return heads.logits(x, _head_weight(params, model, how), head, _head_bias(params))


def loss_sums(params: Tree, batch: Mapping[str, Array], model: Model, how: Compute) -> Sums:
    """Sums over the tokens of a batch: `tokens` and `targets` [B, T], `weights` [B, T] float32, 0 for no target."""
    x = how.shards.constrain(hidden(params, batch["tokens"], model, how), "batch", "seq", "embed")
    head = Head(model.vocab, how.head_chunk, how.shards, model.traits.logit_cap)
    weight, bias = _head_weight(params, model, how), _head_bias(params)
    return heads.loss_sums(x, weight, batch["targets"], batch["weights"], head, bias)


def _head_weight(params: Tree, model: Model, how: Compute) -> Array:
    weight = params["embed"]["tokens"] if model.tied else params["head"]["weight"]
    return weight.astype(how.dtype)


def _head_bias(params: Tree) -> Array | None:
    return params.get("head", {}).get("bias")


def _layer(
    model: Model,
    how: Compute,
    turns: Mapping[Rope, tuple[Array, Array]],
    window: int,
    x: Array,
    weights: Tree,
) -> Array:
    rope = model.traits.rope_of(window)
    return block(x, weights, model.traits, window, turns[rope] if rope else None, how.shards)


Layers = Tree | list[Tree]  # stacked on axis 0, or one by one


def _by_layer(weights: Tree, model: Model, how: Compute) -> Layers:
    """Weights as the loop over layers takes them. Usage PrepError for a scan over leaves that are apart."""
    count = len(model.traits.windows)
    if not model.stacked:
        if how.scan:
            raise layers_apart()
        return [weights[str(i)] for i in range(count)]
    axes = {path.removeprefix(f"{LAYERS}."): leaf.stack_axis for path, leaf in model.leaves.items()}
    stacked = nested({path: jnp.moveaxis(leaf, axes[path] or 0, 0) for path, leaf in flat(weights).items()})
    return stacked if how.scan else [_at(stacked, i) for i in range(count)]


def layers_apart() -> PrepError:
    """The error of a scan over layers that are apart."""
    hint = "`model.scan_layers = false`, or `prep reshard --scan`"
    return usage("layers cannot be scanned", "the checkpoint has a leaf for each of them", hint)


def _at(stacked: Tree, index: int) -> Tree:
    return jax.tree.map(lambda leaf: leaf[index], stacked)


def _layers(
    x: Array, weights: Layers, layer: Callable[[int, Array, Tree], Array], how: Compute, traits: Traits
) -> Array:
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


def _scanned(x: Array, stacked: Tree, bodies: list[Callable[[Array, Tree], Array]], times: int) -> Array:
    every = len(bodies)
    groups = jax.tree.map(lambda leaf: leaf[: times * every].reshape(times, every, *leaf.shape[1:]), stacked)

    def group(x: Array, weights: Tree) -> tuple[Array, None]:
        for index, body in enumerate(bodies):
            x = body(x, _at(weights, index))
        return x, None

    return lax.scan(group, x, groups)[0]


def _kept(layer: Callable[[Array, Tree], Array], how: Compute, in_loop: bool = False) -> Callable[..., Any]:
    """The layer, with what is kept of it for the backward pass.

    Where no loop lies between the two passes, the compiler would find both computing the same, and keep it all.
    """
    if how.remat == REMAT_NONE:
        return layer
    policy = getattr(jax.checkpoint_policies, how.remat)
    return jax.checkpoint(layer, policy=policy, prevent_cse=not in_loop)
