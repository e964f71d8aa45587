"""Tiny decoders for tests of the trainer: configs, tensors of Hugging Face's layout with all values filled, trees."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.helpers.strategies import split_into_atoms
from trainer.models.axis_map import AxisMap, bind_row
from trainer.models.param_tree import Tree, flatten_tree, unflatten_tree
from trainer.models.parameters import HFConfig, parameter_rows
from trainer.models.registry import family_of
from trainer.nn import transformer as models
from trainer.nn.transformer import ForwardConfig, ModelSpec

Tensors = Mapping[str, np.ndarray]
UNSCANNED = ForwardConfig(scan_layers=False)


@dataclass(frozen=True, slots=True)
class TensorLocation:
    """Where a tensor, or the part of it that a row has, is in the tree: the leaf, and its index there, empty for the
    whole of it."""

    tensor: str
    leaf_path: str
    leaf_index: tuple[Any, ...]
    axis_map: AxisMap

    def matching_views(self, tensor: np.ndarray, leaf: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The same elements of both, in the order of the leaf."""
        inside, names = split_into_atoms(self.axis_map, tensor)
        order = [f.atom for dim in self.axis_map.leaf_dims for f in dim if f.atom in names]
        values = inside.transpose([names.index(atom) for atom in order])
        return values, leaf[self.leaf_index].reshape(values.shape)


@dataclass(frozen=True, slots=True)
class TinyTransformer:
    """A model with the place of each tensor."""

    model: ModelSpec
    locations: tuple[TensorLocation, ...]

    def params_from_tensors(self, tensors: Tensors) -> Tree:
        """The tree that holds these tensors; every leaf is filled."""
        leaves = {path: np.full(leaf.shape, np.nan, np.float32) for path, leaf in self.model.leaves.items()}
        for place in self.locations:
            values, part = place.matching_views(tensors[place.tensor], leaves[place.leaf_path])
            part[...] = values
        return unflatten_tree({path: jnp.asarray(leaf) for path, leaf in leaves.items()})

    def tensors_from_params(self, tree: Tree) -> dict[str, np.ndarray]:
        """The tensors that a tree holds."""
        leaves = {path: np.asarray(leaf) for path, leaf in flatten_tree(tree).items()}
        found = {place.tensor: np.full(place.axis_map.source_shape, np.nan, np.float32) for place in self.locations}
        for place in self.locations:
            values, part = place.matching_views(found[place.tensor], leaves[place.leaf_path])
            values[...] = part
        return found


def tiny_transformer(
    config: HFConfig, scan: bool = True, scan_axis: int = 0, has_stored_head: bool = False
) -> TinyTransformer:
    """The model that a config describes, its layers stacked on an axis or apart; `own_head`: of a file with a head,
    which is its own where the config leaves that to the file."""
    family = family_of(config)
    tied = family.is_tied(config, (family.tying.head_tensor,) if has_stored_head else ())
    model = models.build_model(family, config, tied, scan, scan_axis)
    return TinyTransformer(model, tuple(_tensor_locations(model, config, scan, scan_axis)))


def _tensor_locations(model: ModelSpec, config: HFConfig, scan: bool, scan_axis: int) -> Iterator[TensorLocation]:
    family = model.family
    for path, row in parameter_rows(family, config, scan, scan_axis).items():
        bound = bind_row(row, family.sizes(config))
        for bare, at in bound.tensors():
            leaf = model.leaves.get(path.format(**at))
            if leaf is not None:
                name = bare if bare in family.unprefixed else family.prefix + bare
                index = tuple(at.get(atom, slice(None)) for atom, *_ in leaf.dims)
                yield TensorLocation(name, leaf.path, index, bound)


def random_tensors(config: HFConfig, seed: int = 0, has_stored_head: bool = False) -> dict[str, np.ndarray]:
    """Every tensor that the config asks for; no bias is zero and no scale does nothing, so that each of them counts."""
    rng, made = np.random.default_rng(seed), tiny_transformer(config, has_stored_head=has_stored_head)
    found = {}
    for place in made.locations:
        if place.tensor in found:
            continue
        shape = place.axis_map.source_shape
        values = rng.standard_normal(shape)
        match made.model.leaves[place.leaf_path].role:
            case "scale":
                values = (made.model.arch_config.norm != "rms_offset") + 0.2 * values
            case "bias":
                values = 0.1 * values
            case "embedding":
                values = 0.5 * values / made.model.arch_config.lm_head_input_scale
            case "matrix":
                values = 0.8 * values / math.sqrt(shape[-1])
        found[place.tensor] = values.astype(np.float32)
    return found


def random_batch(vocab: int, rows: int, length: int, seed: int = 0, has_source: bool = False) -> dict[str, np.ndarray]:
    """Tokens, targets and weights, several of which are 0: there the target is no token at all. For a model that
    `encodes` also a source, longer where tokens are few, the end of each of its rows padding."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, vocab, (rows, length + 1), dtype=np.int32)
    weights = rng.choice(np.array([0, 1, 1, 2], np.float32), (rows, length))
    batch = {"tokens": tokens[:, :-1], "targets": np.where(weights > 0, tokens[:, 1:], -100), "weights": weights}
    if has_source:
        longer = length + 5 if length < 100 else length
        source = rng.integers(0, vocab, (rows, longer), dtype=np.int32)
        batch |= {"source": source, "present": np.arange(longer) < rng.integers(longer // 2, longer, (rows, 1))}
    return batch


def has_encoder(config: HFConfig) -> bool:
    """Whether a model has an encoder."""
    return family_of(config).arch_config(config).encoder is not None


def model_logits(
    model: ModelSpec, params: Tree, batch: Tensors, forward_config: ForwardConfig = UNSCANNED
) -> np.ndarray:
    """Of the tokens [B, T] of a batch: [B, T, V]. Not compiled as a whole, so that its parts are compiled once for
    many models."""
    given = {name: jnp.asarray(batch[name]) for name in ("tokens", "source", "present") if name in batch}
    memory = (
        models.encode(params, given["source"], model, forward_config, given["present"]) if "source" in given else None
    )
    return np.asarray(models.compute_logits(params, given["tokens"], model, forward_config, memory))


def loss_and_gradients(
    model: ModelSpec, params: Tree, batch: Tensors, forward_config: ForwardConfig = UNSCANNED
) -> tuple[float, Tree]:
    """The mean loss over the weights of a batch, and its gradients."""

    def mean(params: Tree, batch: Mapping[str, jax.Array]) -> jax.Array:
        sums = models.loss_sums(params, batch, model, forward_config)
        return sums.loss / sums.weight

    loss, gradients = jax.jit(jax.value_and_grad(mean))(params, batch)
    return float(loss), gradients


def with_padded_vocab(
    config: HFConfig, tensors: Tensors, num_padding_rows: int, value: float
) -> tuple[HFConfig, dict[str, np.ndarray]]:
    """The same model with more rows of the vocabulary, all of `value`."""
    vocab, made = config["vocab_size"], tiny_transformer(config)
    heads = {place.tensor for place in made.locations if ("vocab",) in made.model.leaves[place.leaf_path].dims}
    rows = {name: np.full((num_padding_rows, *tensors[name].shape[1:]), value, np.float32) for name in heads}
    padded = {
        name: np.concatenate([tensor, rows[name]]) if name in rows else tensor for name, tensor in tensors.items()
    }
    return {**config, "vocab_size": vocab + num_padding_rows, "true_vocab_size": vocab}, padded


def relative_error(found: np.ndarray, wanted: np.ndarray) -> float:
    """Norm of the difference, relative to what is wanted; rounding of what should be 0, as the gradient of a bias that
    all keys have in common, does not count."""
    return float(np.linalg.norm(found - wanted) / max(np.linalg.norm(wanted), 1e-2))
