"""Tiny models: random tensors in Hugging Face's layout, and their conversion to and from parameter trees."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from prepcli.algebra.axis_map import AxisMap, SizedAxis, bind_row
from prepcli.core.json_types import HFConfig
from prepcli.models.param_tree import Tree, flatten_tree, unflatten_tree
from prepcli.models.parameters import parameter_rows
from prepcli.models.registry import family_of
from trainer.nn import transformer
from trainer.nn.initialization import RESIDUAL_WEIGHTS
from trainer.nn.model_spec import ForwardConfig, ModelSpec, build_model

Tensors = Mapping[str, np.ndarray]
UNSCANNED = ForwardConfig(scan_layers=False)


@dataclass(frozen=True, slots=True)
class TensorLocation:
    """The location of a tensor's elements in the parameter tree.

    Attributes:
        tensor: Name of the tensor.
        leaf_path: Path of the leaf.
        leaf_index: Index of the elements in the leaf, empty for the whole leaf.
        axis_map: Relation of the tensor's axes to the leaf's.
    """

    tensor: str
    leaf_path: str
    leaf_index: tuple[Any, ...]
    axis_map: AxisMap

    def views_of_same_elements(
        self, tensor: np.ndarray, leaf: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return views of the same elements in the tensor and in the leaf, in the order of the leaf."""
        atom_array, names = split_into_atoms(self.axis_map, tensor)
        factors = itertools.chain(*self.axis_map.leaf_dims)
        order = [factor.atom for factor in factors if factor.atom in names]
        tensor_view = atom_array.transpose([names.index(atom) for atom in order])
        # With the ellipsis, a leaf of one element per layer gives a view too, and no scalar.
        return tensor_view, leaf[(*self.leaf_index, ...)].reshape(tensor_view.shape)


@dataclass(frozen=True, slots=True)
class TinyTransformer:
    """A model with the location of each tensor."""

    model: ModelSpec
    locations: tuple[TensorLocation, ...]

    def params_from_tensors(self, tensors: Tensors) -> Tree:
        """Build the parameter tree of Hugging Face tensors."""
        leaves = {
            # NaN marks elements that no tensor fills. They make every later comparison fail.
            path: np.full(leaf.shape, np.nan, np.float32)
            for path, leaf in self.model.leaves.items()
        }
        for location in self.locations:
            tensor_view, leaf_view = location.views_of_same_elements(
                tensors[location.tensor], leaves[location.leaf_path]
            )
            leaf_view[...] = tensor_view
        # `jnp.asarray` would compile a program per shape.
        return jax.device_put(unflatten_tree(leaves))

    def tensors_from_params(self, tree: Tree) -> dict[str, np.ndarray]:
        """Build the Hugging Face tensors of a parameter tree."""
        leaves = {path: np.asarray(leaf) for path, leaf in flatten_tree(tree).items()}
        tensors = {
            location.tensor: np.full(location.axis_map.source_shape, np.nan, np.float32)
            for location in self.locations
        }
        for location in self.locations:
            tensor_view, leaf_view = location.views_of_same_elements(
                tensors[location.tensor], leaves[location.leaf_path]
            )
            tensor_view[...] = leaf_view
        return tensors


def tiny_transformer(
    config: HFConfig, scan: bool = True, scan_axis: int = 0, has_stored_head: bool = False
) -> TinyTransformer:
    """Build the model of a config.

    Args:
        config: Fields of config.json.
        scan: Whether layers are stacked.
        scan_axis: The axis over which layers are stacked.
        has_stored_head: Whether the checkpoint stores an LM head, which some families then use although the config
            ties it to the embedding.
    """
    family = family_of(config)
    is_tied = family.is_tied(config, (family.tying.head_tensor,) if has_stored_head else ())
    model = build_model(family, config, is_tied, scan=scan, scan_axis=scan_axis)
    return TinyTransformer(model, tuple(_tensor_locations(model, config, scan, scan_axis)))


def _tensor_locations(
    model: ModelSpec, config: HFConfig, scan: bool, scan_axis: int
) -> Iterator[TensorLocation]:
    """Yield the location of each tensor of a model."""
    family = model.family
    for path, row in parameter_rows(family, config, scan, scan_axis).items():
        axis_map = bind_row(row, family.sizes(config))
        for unprefixed_name, atom_indices in axis_map.tensors():
            leaf = model.leaves.get(path.format(**atom_indices))
            if leaf is not None:
                name = (
                    unprefixed_name
                    if unprefixed_name in family.unprefixed
                    else family.prefix + unprefixed_name
                )
                leaf_index = tuple(atom_indices.get(atom, slice(None)) for atom, *_ in leaf.dims)
                yield TensorLocation(
                    tensor=name, leaf_path=leaf.path, leaf_index=leaf_index, axis_map=axis_map
                )


def random_tensors(
    config: HFConfig, seed: int = 0, has_stored_head: bool = False
) -> dict[str, np.ndarray]:
    """Generate every tensor of a config. Biases are not 0 and scales are not the identity."""
    rng = np.random.default_rng(seed)
    tiny = tiny_transformer(config, has_stored_head=has_stored_head)
    arch_config = tiny.model.arch_config
    tensors = {}
    for location in tiny.locations:
        if location.tensor in tensors:
            continue
        shape = location.axis_map.source_shape
        values = rng.standard_normal(shape)
        leaf = tiny.model.leaves[location.leaf_path]
        match leaf.role:
            case "scale":
                # An rms_offset norm multiplies by 1 + scale, so its scales are around 0. Other
                # scales are around 1.
                values = 1.0 - arch_config.norm_scale_offset + 0.2 * values
            case "bias":
                values = 0.1 * values
            case "embedding":
                values = 0.5 * values / arch_config.lm_head_input_scale
            case "matrix" if leaf.path.endswith(RESIDUAL_WEIGHTS):
                # The layers of a trained model keep most of the residual stream.
                values = 1.0 + 0.2 * values
            case "matrix":
                # Variance 0.64 / shape[-1], the fan-in of a matrix [out, in].
                values = 0.8 * values / math.sqrt(shape[-1])
        tensors[location.tensor] = values.astype(np.float32)
    return tensors


def random_batch(
    vocab: int, rows: int, length: int, seed: int = 0, has_source: bool = False
) -> dict[str, np.ndarray]:
    """Generate tokens, targets and weights [rows, length]. The target of a token of weight 0 is -100.

    `has_source` adds a right-padded source and its mask. A source is longer than a short target.
    """
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, vocab, (rows, length + 1), dtype=np.int32)
    weights = rng.choice(np.array([0, 1, 1, 2], np.float32), (rows, length))
    batch = {
        "tokens": tokens[:, :-1],
        "targets": np.where(weights > 0, tokens[:, 1:], -100),
        "weights": weights,
    }
    if has_source:
        # E.g. 8 target and 13 source tokens: exchanged axes then fail on the shape.
        source_length = length + 5 if length < 100 else length
        source = rng.integers(0, vocab, (rows, source_length), dtype=np.int32)
        lengths = rng.integers(source_length // 2, source_length, (rows, 1))
        batch |= {"source": source, "present": np.arange(source_length) < lengths}
    return batch


def has_encoder(config: HFConfig) -> bool:
    """Return whether the model of a config has an encoder."""
    return family_of(config).arch_config(config).encoder is not None


def model_logits(
    model: ModelSpec, params: Tree, batch: Tensors, forward_config: ForwardConfig = UNSCANNED
) -> np.ndarray:
    """Compute logits [B, T, V] of a batch's tokens."""

    @jax.jit
    def compute(params: Tree, arrays: Mapping[str, jax.Array]) -> jax.Array:
        encoder_output = None
        if "source" in arrays:
            encoder_output = transformer.encode(
                params, arrays["source"], model, forward_config, arrays["present"]
            )
        return transformer.compute_logits(
            params, arrays["tokens"], model, forward_config, encoder_output
        )

    return np.asarray(
        compute(
            params, {name: batch[name] for name in ("tokens", "source", "present") if name in batch}
        )
    )


def loss_and_gradients(
    model: ModelSpec, params: Tree, batch: Tensors, forward_config: ForwardConfig = UNSCANNED
) -> tuple[float, Tree]:
    """Compute the weighted mean loss of a batch and its gradients."""

    def mean_loss(params: Tree, batch: Mapping[str, jax.Array]) -> jax.Array:
        sums = transformer.loss_sums(params, batch, model, forward_config)
        return sums.loss / sums.weight

    loss, gradients = jax.jit(jax.value_and_grad(mean_loss))(params, batch)
    return float(loss), gradients


def with_padded_vocab(
    config: HFConfig, tensors: Tensors, num_padding_rows: int, value: float
) -> tuple[HFConfig, dict[str, np.ndarray]]:
    """Append rows of `value` to every tensor with a vocabulary axis, and set `true_vocab_size`."""
    vocab = family_of(config).sizes(config)["vocab"]
    tiny = tiny_transformer(config)
    vocab_tensors = {
        location.tensor
        for location in tiny.locations
        if ("vocab",) in tiny.model.leaves[location.leaf_path].dims
    }
    padded = dict(tensors)
    for name in vocab_tensors:
        padding = np.full((num_padding_rows, *tensors[name].shape[1:]), value, np.float32)
        padded[name] = np.concatenate([tensors[name], padding])
    return {**config, "vocab_size": vocab + num_padding_rows, "true_vocab_size": vocab}, padded


def relative_error(actual: np.ndarray, expected: np.ndarray) -> float:
    """Compute the norm of the difference, relative to the norm of `expected`, which counts as 0.01 at least.

    The minimum hides the rounding of exact zeros, e.g. the gradient of a bias shared by all keys.
    """
    # ||actual - expected|| / max(||expected||, 0.01)
    return float(np.linalg.norm(actual - expected) / max(np.linalg.norm(expected), 1e-2))


def split_into_atoms(row: AxisMap, tensor: np.ndarray) -> tuple[np.ndarray, list[str]]:
    """Return the part of a tensor that an axis map uses, as a view with one dim per axis, and the names of the axes."""
    parts = (slice(dim.start, dim.start + dim.selected_extent) for dim in row.source_dims)
    # With the ellipsis, a tensor without dims or of one element gives a view too.
    part = tensor[(*parts, ...)]
    factors: list[SizedAxis] = []
    for dim in row.source_dims:
        factors.extend(dim.factors)
    # E.g. the k of a fused (three heads head_dim): `three` is fixed at 1, the others are free.
    index: list[slice | int] = []
    free_atoms: list[str] = []
    for factor in factors:
        if factor.fixed is None:
            index.append(slice(None))
            free_atoms.append(factor.atom)
        else:
            index.append(factor.fixed)
    values = part.reshape([factor.extent for factor in factors])
    return values[(*index, ...)], free_atoms
