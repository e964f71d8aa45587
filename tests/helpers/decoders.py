"""Tiny decoders for tests of the trainer: configs, tensors of Hugging Face's layout with all values filled, trees."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.helpers.strategies import atoms_of
from trainer.models.axis_map import AxisMap, bind
from trainer.models.parameters import Config, rows
from trainer.models.registry import family_of
from trainer.models.tree import Tree, flat, nested
from trainer.nn import transformer as models
from trainer.nn.transformer import Compute, Model

Tensors = Mapping[str, np.ndarray]
ONE_BY_ONE = Compute(scan=False)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor, or the part of it that a row has, is in the tree: the leaf, and its index there, empty for the
    whole of it."""

    tensor: str
    path: str
    index: tuple[Any, ...]
    row: AxisMap

    def views(self, tensor: np.ndarray, leaf: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The same elements of both, in the order of the leaf."""
        inside, names = atoms_of(self.row, tensor)
        order = [f.atom for dim in self.row.leaf for f in dim if f.atom in names]
        values = inside.transpose([names.index(atom) for atom in order])
        return values, leaf[self.index].reshape(values.shape)


@dataclass(frozen=True, slots=True)
class Decoder:
    """A model with the place of each tensor."""

    model: Model
    places: tuple[Place, ...]

    def params(self, tensors: Tensors) -> Tree:
        """The tree that holds these tensors; every leaf is filled."""
        leaves = {path: np.full(leaf.shape, np.nan, np.float32) for path, leaf in self.model.leaves.items()}
        for place in self.places:
            values, part = place.views(tensors[place.tensor], leaves[place.path])
            part[...] = values
        return nested({path: jnp.asarray(leaf) for path, leaf in leaves.items()})

    def tensors(self, tree: Tree) -> dict[str, np.ndarray]:
        """The tensors that a tree holds."""
        leaves = {path: np.asarray(leaf) for path, leaf in flat(tree).items()}
        found = {place.tensor: np.full(place.row.source_shape, np.nan, np.float32) for place in self.places}
        for place in self.places:
            values, part = place.views(found[place.tensor], leaves[place.path])
            values[...] = part
        return found


def decoder(config: Config, scan: bool = True, scan_axis: int = 0, own_head: bool = False) -> Decoder:
    """The model that a config describes, its layers stacked on an axis or apart; `own_head`: of a file with a head,
    which is its own where the config leaves that to the file."""
    family = family_of(config)
    tied = family.tied(config, (family.tie.tensor,) if own_head else ())
    model = models.build(family, config, tied, scan, scan_axis)
    return Decoder(model, tuple(_places(model, config, scan, scan_axis)))


def _places(model: Model, config: Config, scan: bool, scan_axis: int) -> Iterator[Place]:
    family = model.family
    for path, row in rows(family, config, scan, scan_axis).items():
        bound = bind(row, family.sizes(config))
        for bare, at in bound.tensors():
            leaf = model.leaves.get(path.format(**at))
            if leaf is not None:
                name = bare if bare in family.unprefixed else family.prefix + bare
                index = tuple(at.get(atom, slice(None)) for atom, *_ in leaf.dims)
                yield Place(name, leaf.path, index, bound)


def filled(config: Config, seed: int = 0, own_head: bool = False) -> dict[str, np.ndarray]:
    """Every tensor that the config asks for; no bias is zero and no scale does nothing, so that each of them counts."""
    rng, made = np.random.default_rng(seed), decoder(config, own_head=own_head)
    found = {}
    for place in made.places:
        if place.tensor in found:
            continue
        shape = place.row.source_shape
        values = rng.standard_normal(shape)
        match made.model.leaves[place.path].role:
            case "scale":
                values = (made.model.traits.norm != "rms_offset") + 0.2 * values
            case "bias":
                values = 0.1 * values
            case "embedding":
                values = 0.5 * values / made.model.traits.head_scale
            case "matrix":
                values = 0.8 * values / math.sqrt(shape[-1])
        found[place.tensor] = values.astype(np.float32)
    return found


def batch_of(vocab: int, rows: int, length: int, seed: int = 0, encodes: bool = False) -> dict[str, np.ndarray]:
    """Tokens, targets and weights, several of which are 0: there the target is no token at all. For a model that
    `encodes` also a source, longer where tokens are few, the end of each of its rows padding."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, vocab, (rows, length + 1), dtype=np.int32)
    weights = rng.choice(np.array([0, 1, 1, 2], np.float32), (rows, length))
    batch = {"tokens": tokens[:, :-1], "targets": np.where(weights > 0, tokens[:, 1:], -100), "weights": weights}
    if encodes:
        longer = length + 5 if length < 100 else length
        source = rng.integers(0, vocab, (rows, longer), dtype=np.int32)
        batch |= {"source": source, "present": np.arange(longer) < rng.integers(longer // 2, longer, (rows, 1))}
    return batch


def encodes(config: Config) -> bool:
    """Whether a model has an encoder."""
    return family_of(config).traits(config).encoder is not None


def logits_of(model: Model, params: Tree, batch: Tensors, how: Compute = ONE_BY_ONE) -> np.ndarray:
    """Of the tokens [B, T] of a batch: [B, T, V]. Not compiled as a whole, so that its parts are compiled once for
    many models."""
    given = {name: jnp.asarray(batch[name]) for name in ("tokens", "source", "present") if name in batch}
    memory = models.encode(params, given["source"], model, how, given["present"]) if "source" in given else None
    return np.asarray(models.logits(params, given["tokens"], model, how, memory))


def loss_and_gradients(model: Model, params: Tree, batch: Tensors, how: Compute = ONE_BY_ONE) -> tuple[float, Tree]:
    """The mean loss over the weights of a batch, and its gradients."""

    def mean(params: Tree, batch: Mapping[str, jax.Array]) -> jax.Array:
        sums = models.loss_sums(params, batch, model, how)
        return sums.loss / sums.weight

    loss, gradients = jax.jit(jax.value_and_grad(mean))(params, batch)
    return float(loss), gradients


def with_padding(
    config: Config, tensors: Tensors, rows_more: int, value: float
) -> tuple[Config, dict[str, np.ndarray]]:
    """The same model with more rows of the vocabulary, all of `value`."""
    vocab, made = config["vocab_size"], decoder(config)
    heads = {place.tensor for place in made.places if ("vocab",) in made.model.leaves[place.path].dims}
    rows = {name: np.full((rows_more, *tensors[name].shape[1:]), value, np.float32) for name in heads}
    padded = {
        name: np.concatenate([tensor, rows[name]]) if name in rows else tensor for name, tensor in tensors.items()
    }
    return {**config, "vocab_size": vocab + rows_more, "true_vocab_size": vocab}, padded


def apart(found: np.ndarray, wanted: np.ndarray) -> float:
    """Norm of the difference, relative to what is wanted; rounding of what should be 0, as the gradient of a bias that
    all keys have in common, does not count."""
    return float(np.linalg.norm(found - wanted) / max(np.linalg.norm(wanted), 1e-2))
