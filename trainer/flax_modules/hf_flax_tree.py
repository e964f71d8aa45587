"""Parameter trees of the Flax classes in transformers 4, from and to prep's tree, in memory.

A leaf of either tree is a rearrangement of tensors of a Hugging Face file, as an axis map describes it. The tensors
exist in between, so that a conversion takes twice the memory of the parameters. It is one compiled program: JAX would
compile each operation by itself, and again for each layer.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from prepcli.algebra.axis_map import AxisMap, ParsedAxisMap, SizedAxis, bind_row
from prepcli.core.errors import PrepError
from prepcli.models.param_tree import Tree, flatten_tree, unflatten_tree
from prepcli.models.parameters import (
    Family,
    HFConfig,
    layout_rows,
    parameter_rows,
    read_size,
)

LAYOUT = "hf-flax"
# Parameters that an error names.
MAX_NAMES = 4
# Tensors by name in a Hugging Face file.
Tensors = dict[str, Array]


@dataclass(frozen=True, slots=True)
class LeafMap:
    """A leaf of a tree and the tensors that it stores."""

    path: str  # Path of the leaf
    axis_map: AxisMap  # Its axis map
    # Index of each layer atom with a leaf per index, e.g. `("layers", 3)`.
    unscanned: tuple[tuple[str, int], ...] = ()

    def tensors(self) -> Iterator[tuple[str, dict[str, int]]]:
        """Yield the name and the stacked indices of each tensor of the leaf."""
        fixed = dict(self.unscanned)
        for name, indices in self.axis_map.tensors():
            if fixed.items() <= indices.items():
                yield name, indices

    def has_tensor(self, names: Container[str]) -> bool:
        """Return whether one of the names is a tensor of the leaf."""
        return any(name in names for name, _ in self.tensors())


def to_hf_flax_tree(params: Tree, family: Family, config: HFConfig) -> Tree:
    """Return parameters as the tree of the family's Flax class, without the padding of the vocabulary.

    Args:
        params: prep's tree, with layers stacked on axis 0.
        family: Family of the model.
        config: Content of its config.json.

    Raises:
        PrepError: transformers has no Flax class of the family, or the tree does not fit the config.
    """
    flax_rows = _flax_rows(family, config)
    rows = parameter_rows(family, config)
    leaves = flatten_tree(params)
    head_leaf = family.tying.head_leaf
    head_tensor = family.tying.head_tensor
    is_tied = head_leaf not in leaves and family.is_tied(config)
    if is_tied:
        rows.pop(head_leaf, None)
    _check_leaves(leaves, rows, "prep's tree")
    true_size = _true_vocab_size(family, config)
    sizes = family.sizes(config) | {"vocab": true_size}
    padded = {"vocab": leaves["embed.tokens"].shape[0]}
    sources = [LeafMap(path, bind_row(row, sizes, padded)) for path, row in rows.items()]
    copies: dict[str, str] = {}
    # Some Flax classes store the head of a tied model as a leaf of its own.
    if is_tied and not family.layouts[LAYOUT].allows_tied_head:
        copies[head_tensor] = family.tying.embedding_tensor
    names = {name for source in sources for name, _ in source.tensors()} | copies.keys()
    # A tied head without a leaf in the Flax class has no tensor here.
    targets = [leaf for leaf in _flax_leaves(flax_rows, sizes) if leaf.has_tensor(names)]
    return unflatten_tree(_rearrange(leaves, tuple(sources), tuple(targets), (*copies.items(),)))


def from_hf_flax_tree(tree: Tree, family: Family, config: HFConfig) -> Tree:
    """Return the parameters of the family's Flax class as prep's tree, with layers stacked on axis 0.

    Args:
        tree: Nested dicts of arrays, as `params` of a Flax class.
        family: Family of the model.
        config: Content of its config.json. Rows beyond its `true_vocab_size` are zeros.

    Raises:
        PrepError: transformers has no Flax class of the family, or the tree does not fit the config.
    """
    rows = parameter_rows(family, config)
    sizes = family.sizes(config)
    padded = {"vocab": sizes["vocab"]}
    sizes = sizes | {"vocab": _true_vocab_size(family, config)}
    head_leaf = family.tying.head_leaf
    head_tensor = family.tying.head_tensor
    leaves = flatten_tree(tree)
    sources: dict[str, LeafMap] = {}
    for leaf in _flax_leaves(_flax_rows(family, config), sizes):
        # Some Flax classes with tied embeddings store the head a second time, others do not.
        is_tied_head = family.is_tied(config) and leaf.has_tensor([head_tensor])
        if leaf.path in leaves or not is_tied_head:
            sources[leaf.path] = leaf
    _check_leaves(leaves, sources, "the Flax tree")
    if family.is_tied(config):
        _check_tied(leaves, sources.values(), head_tensor, family.tying.embedding_tensor)
        rows.pop(head_leaf, None)
    targets = [LeafMap(path, bind_row(row, sizes, padded)) for path, row in rows.items()]
    return unflatten_tree(_rearrange(leaves, tuple(sources.values()), tuple(targets)))


@partial(jax.jit, static_argnums=(1, 2, 3))
def _rearrange(
    leaves: dict[str, Array],
    sources: tuple[LeafMap, ...],
    targets: tuple[LeafMap, ...],
    copies: tuple[tuple[str, str], ...] = (),
) -> dict[str, Array]:
    """Return the leaves of another tree."""
    tensors = Tensors()
    for source in sources:
        _scatter_leaf(leaves[source.path], source, tensors)
    for name, original in copies:
        tensors[name] = tensors[original]
    return {target.path: _gather_leaf(tensors, target) for target in targets}


def _flax_leaves(rows: Mapping[str, ParsedAxisMap], sizes: Mapping[str, int]) -> Iterator[LeafMap]:
    """Yield the leaves of a Flax class, whose rows may have one leaf per layer."""
    for path, row in rows.items():
        axis_map = bind_row(row, sizes)
        for unscanned in _unscanned_indices(axis_map):
            yield LeafMap(path.format(**unscanned), axis_map, (*unscanned.items(),))


def _flax_rows(family: Family, config: HFConfig) -> dict[str, ParsedAxisMap]:
    if LAYOUT not in family.layouts:
        why = "transformers has no Flax class of this family"
        hint = "`load_params` returns the parameters in prep's own tree"
        raise PrepError(f"{family.name} has no layout {LAYOUT}", why, hint)
    return layout_rows(family.layouts[LAYOUT], config)


def _true_vocab_size(family: Family, config: HFConfig) -> int:
    return read_size(config, "true_vocab_size", family.sizes(config)["vocab"])


def _check_leaves(
    leaves: Mapping[str, Array], expected: Mapping[str, object], tree_name: str
) -> None:
    """Raise PrepError unless a tree has exactly the expected leaves."""
    for verb, names in (
        ("lacks", expected.keys() - leaves.keys()),
        ("has unknown", leaves.keys() - expected.keys()),
    ):
        if not names:
            continue
        listed = ", ".join(sorted(names)[:MAX_NAMES])
        if len(names) > MAX_NAMES:
            listed += f" and {len(names) - MAX_NAMES} more"
        raise PrepError(
            f"{tree_name} does not fit the config",
            f"it {verb} {listed}",
            "pass the config.json of the model with these parameters",
        )


def _check_tied(
    leaves: Mapping[str, Array],
    leaf_maps: Iterable[LeafMap],
    head_tensor: str,
    embedding_tensor: str,
) -> None:
    """Raise PrepError if the head of a model with tied embeddings is not the embedding."""
    tensors = Tensors()
    for leaf in leaf_maps:
        if leaf.has_tensor((head_tensor, embedding_tensor)):
            _scatter_leaf(leaves[leaf.path], leaf, tensors)
    head = tensors.get(head_tensor)
    if head is not None and not bool(jnp.array_equal(head, tensors[embedding_tensor])):
        raise PrepError(
            f"{head_tensor} differs from {embedding_tensor}",
            "the config ties the head to the embedding",
            "set `tie_word_embeddings` to false in the config",
        )


# One leaf


def _unscanned_indices(axis_map: AxisMap) -> Iterator[dict[str, int]]:
    """Yield the layer indices of each leaf of an axis map. An axis map with one leaf per layer has several leaves."""
    atoms = {factor.atom for factor in axis_map.unscanned_factors}
    seen: list[dict[str, int]] = []
    for _, indices in axis_map.tensors():
        unscanned = {atom: index for atom, index in indices.items() if atom in atoms}
        if unscanned not in seen:
            seen.append(unscanned)
            yield unscanned


def _scatter_leaf(leaf: Array, leaf_map: LeafMap, tensors: Tensors) -> None:
    """Write the elements of a leaf to the tensors that it stores."""
    # Example: layers heads head_dim embed <- h.{layers}.q: (heads head_dim) embed, with the sizes
    # 2, 4, 8 and 16. The leaf [2, 4, 8, 16] has one dim per atom. Index 1 of `layers` selects the
    # tensor h.1.q, and the piece [4, 8, 16] becomes its rows: [4 * 8, 16].
    axis_map = leaf_map.axis_map
    leaf_factors = _leaf_factors(axis_map)
    if leaf.shape != axis_map.leaf_shape:
        raise PrepError(
            f"a leaf of `{axis_map.text}` has shape {leaf.shape}",
            f"expected {axis_map.leaf_shape}",
            "pass the config.json of the model with these parameters",
        )
    split = leaf.reshape(_extents(leaf_factors))
    free = _unfixed_factors(axis_map)
    region = _tensor_region(axis_map)
    for name, indices in leaf_map.tensors():
        piece_index = tuple(indices.get(factor.atom, slice(None)) for factor in leaf_factors)
        atoms = [factor.atom for factor in leaf_factors if factor.atom not in indices]
        piece = split[piece_index].transpose([atoms.index(factor.atom) for factor in free])
        # Padding is only in the leaf, e.g. the rows of the vocabulary beyond the tensor's.
        piece = piece[tuple(map(slice, _extents(free)))]
        tensor = tensors.get(name, jnp.zeros(axis_map.source_shape, leaf.dtype))
        parts = tensor[region].reshape(_extents(_source_factors(axis_map)))
        parts = parts.at[_fixed_index(axis_map)].set(piece)
        # A tensor may have parts of several leaves, e.g. fused q, k and v.
        tensors[name] = tensor.at[region].set(parts.reshape(tensor[region].shape))


def _gather_leaf(tensors: Mapping[str, Array], leaf_map: LeafMap) -> Array:
    """Assemble a leaf from its regions of the tensors. Padding is zero."""
    axis_map = leaf_map.axis_map
    leaf_factors = _leaf_factors(axis_map)
    fixed = dict(leaf_map.unscanned)
    pieces: list[Array] = []
    for name, _ in leaf_map.tensors():
        part = tensors[name][_tensor_region(axis_map)]
        split = part.reshape(_extents(_source_factors(axis_map)))
        pieces.append(split[_fixed_index(axis_map)])
    # `tensors` yields the stacked atoms in row-major order, so the pieces are one dim per stacked
    # atom, before the dims of a piece.
    stacked = [factor for factor in axis_map.stacked_factors if factor.atom not in fixed]
    joined = jnp.stack(pieces).reshape([*_extents(stacked), *pieces[0].shape])
    atoms = [factor.atom for factor in (*stacked, *_unfixed_factors(axis_map))]
    leaf = joined.transpose([atoms.index(factor.atom) for factor in leaf_factors])
    padding: list[tuple[int, int]] = []
    for factor, extent in zip(leaf_factors, leaf.shape):
        padding.append((0, factor.extent - extent))
    return jnp.pad(leaf, padding).reshape(axis_map.leaf_shape)


def _leaf_factors(axis_map: AxisMap) -> list[SizedAxis]:
    """Return the named axes (atoms) of a leaf as a flat list, e.g. [a, b, c] for the dims `(a b) c`."""
    return list(itertools.chain.from_iterable(axis_map.leaf_dims))


def _unfixed_factors(axis_map: AxisMap) -> list[SizedAxis]:
    """Return the named axes (atoms) that a tensor and its leaf share, in the order of the tensor."""
    return [factor for factor in _source_factors(axis_map) if factor.fixed is None]


def _source_factors(axis_map: AxisMap) -> list[SizedAxis]:
    """Return the named axes (atoms) of a tensor as a flat list, e.g. [a, b, c] for the dims `(a b) c`."""
    factors: list[SizedAxis] = []
    for dim in axis_map.source_dims:
        factors += dim.factors
    return factors


def _extents(factors: Iterable[SizedAxis]) -> list[int]:
    return [factor.extent for factor in factors]


def _fixed_index(axis_map: AxisMap) -> tuple[int | slice, ...]:
    """Return the index of a leaf's part of a tensor, e.g. `(0, :, :)` for the query in [qkv, heads, head_dim]."""
    # The tensor has one dim per named axis of its axis map. Axes with a fixed index are selected by it.
    index: list[int | slice] = []
    for factor in _source_factors(axis_map):
        if factor.fixed is None:
            index.append(slice(None))
        else:
            index.append(factor.fixed)
    return tuple(index)


def _tensor_region(axis_map: AxisMap) -> tuple[slice, ...]:
    """Return the range of each dim of a tensor that the axis map uses."""
    return tuple(slice(dim.start, dim.start + dim.selected_extent) for dim in axis_map.source_dims)
