"""Parameter trees of the Flax classes in transformers 4, from and to prep's tree, in memory.

A leaf of either tree is a rearrangement of tensors of a Hugging Face file, as an axis map describes it. The tensors
exist in between, so that a conversion takes twice the memory of the parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import jax.numpy as jnp
from jax import Array

from trainer.models.axis_map import AxisMap, ParsedAxisMap, SizedAxis, bind_row
from trainer.models.errors import PrepError
from trainer.models.param_tree import Tree, flatten_tree, unflatten_tree
from trainer.models.parameters import Family, HFConfig, layout_rows, parameter_rows

LAYOUT = "hf-flax"
# Parameters that an error names.
MAX_NAMES = 4
# Tensors by name in a Hugging Face file.
Tensors = dict[str, Array]


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
    sizes = family.sizes(config)
    padded = {"vocab": leaves["embed.tokens"].shape[0]}
    tensors: Tensors = {}
    for path, row in rows.items():
        _scatter_leaf(leaves[path], bind_row(row, sizes | {"vocab": true_size}, padded), tensors)
    if is_tied and not family.layouts[LAYOUT].allows_tied_head:
        tensors[head_tensor] = tensors[family.tying.embedding_tensor]
    bound = {path: bind_row(row, sizes | {"vocab": true_size}) for path, row in flax_rows.items()}
    flax_leaves: dict[str, Array] = {}
    for path, axis_map in bound.items():
        for unscanned in _unscanned_indices(axis_map):
            if axis_map.tensor_name(unscanned) in tensors:
                leaf = _gather_leaf(tensors, axis_map, unscanned)
                flax_leaves[path.format(**unscanned)] = leaf
    return unflatten_tree(flax_leaves)


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
    sizes, padded = sizes | {"vocab": _true_vocab_size(family, config)}, {"vocab": sizes["vocab"]}
    head_leaf = family.tying.head_leaf
    head_tensor = family.tying.head_tensor
    leaves = flatten_tree(tree)
    tensors = Tensors()
    flax_maps: dict[str, tuple[AxisMap, dict[str, int]]] = {}
    for path, row in _flax_rows(family, config).items():
        axis_map = bind_row(row, sizes)
        for unscanned in _unscanned_indices(axis_map):
            flax_maps[path.format(**unscanned)] = (axis_map, unscanned)
    if family.is_tied(config):
        flax_maps = {
            path: use
            for path, use in flax_maps.items()
            # Every row but the head, and the head if the tree has it: for booleans a <= b means a
            # implies b.
            if _has_head(use, head_tensor) <= (path in leaves)
        }
    _check_leaves(leaves, flax_maps, "the Flax tree")
    for path, (axis_map, unscanned) in flax_maps.items():
        _scatter_leaf(leaves[path], axis_map, tensors, unscanned)
    if family.is_tied(config):
        _check_tied(tensors, head_tensor, family.tying.embedding_tensor)
        rows.pop(head_leaf, None)
    return unflatten_tree(
        {path: _gather_leaf(tensors, bind_row(row, sizes, padded)) for path, row in rows.items()}
    )


def _has_head(use: tuple[AxisMap, Mapping[str, int]], head_tensor: str) -> bool:
    axis_map, unscanned = use
    return axis_map.tensor_name(unscanned) == head_tensor


def _flax_rows(family: Family, config: HFConfig) -> dict[str, ParsedAxisMap]:
    if LAYOUT not in family.layouts:
        raise PrepError(
            f"{family.name} has no layout {LAYOUT}", "transformers has no Flax class of this family"
        )
    return layout_rows(family.layouts[LAYOUT], config)


def _true_vocab_size(family: Family, config: HFConfig) -> int:
    return config.get("true_vocab_size") or family.sizes(config)["vocab"]


def _check_leaves(
    leaves: Mapping[str, Array], expected: Mapping[str, object], tree_name: str
) -> None:
    """Raise PrepError unless a tree has exactly the expected leaves."""
    for verb, names in (
        ("lacks", expected.keys() - leaves.keys()),
        ("has unknown", leaves.keys() - expected.keys()),
    ):
        if names:
            listed = ", ".join(sorted(names)[:MAX_NAMES])
            more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
            raise PrepError(f"{tree_name} does not fit the config", f"it {verb} {listed}{more}")


def _check_tied(tensors: Tensors, head_tensor: str, embedding_tensor: str) -> None:
    """Raise PrepError if the head of a model with tied embeddings is not the embedding."""
    head = tensors.get(head_tensor)
    if head is not None and not bool(jnp.array_equal(head, tensors[embedding_tensor])):
        why = "the config says `tie_word_embeddings`"
        raise PrepError(
            f"{head_tensor} differs from {embedding_tensor}", why, "set it to false in the config"
        )


# One leaf


def _unscanned_indices(axis_map: AxisMap) -> Iterator[dict[str, int]]:
    """Yield the indices of each leaf of a row. A row with a leaf per layer has several."""
    atoms = {factor.atom for factor in axis_map.unscanned_factors}
    seen: list[dict[str, int]] = []
    for _, indices in axis_map.tensors():
        unscanned = {atom: index for atom, index in indices.items() if atom in atoms}
        if unscanned not in seen:
            seen.append(unscanned)
            yield unscanned


def _scatter_leaf(
    leaf: Array, axis_map: AxisMap, tensors: Tensors, unscanned: Mapping[str, int] | None = None
) -> None:
    """Write a leaf to its places in its tensors."""
    leaf_factors = [factor for dim in axis_map.leaf_dims for factor in dim]
    if leaf.shape != axis_map.leaf_shape:
        raise PrepError(
            f"a leaf of `{axis_map.text}` has shape {leaf.shape}", f"expected {axis_map.leaf_shape}"
        )
    split = leaf.reshape([factor.extent for factor in leaf_factors])
    for name, indices in axis_map.tensors():
        if any(indices[atom] != index for atom, index in (unscanned or {}).items()):
            continue
        atoms = [factor.atom for factor in leaf_factors if factor.atom not in indices]
        piece = split[tuple(indices.get(factor.atom, slice(None)) for factor in leaf_factors)]
        free = _free_factors(axis_map)
        piece = piece.transpose([atoms.index(factor.atom) for factor in free])
        piece = piece[tuple(slice(factor.extent) for factor in free)]  # without padding
        tensor = tensors.get(name, jnp.zeros(axis_map.source_shape, leaf.dtype))
        region = _region(axis_map)
        parts = (
            tensor[region].reshape(_factor_extents(axis_map)).at[_fixed_index(axis_map)].set(piece)
        )
        selected_shape = [dim.selected_extent for dim in axis_map.source_dims]
        tensors[name] = tensor.at[region].set(parts.reshape(selected_shape))


def _gather_leaf(
    tensors: Mapping[str, Array], axis_map: AxisMap, unscanned: Mapping[str, int] | None = None
) -> Array:
    """Return a leaf from its places in its tensors, with zeros as padding."""
    leaf_factors = [factor for dim in axis_map.leaf_dims for factor in dim]
    free = [factor.atom for factor in _free_factors(axis_map)]
    fixed = unscanned or {}
    pieces = [
        tensors[name][_region(axis_map)].reshape(_factor_extents(axis_map))[_fixed_index(axis_map)]
        for name, indices in axis_map.tensors()
        if all(indices[atom] == index for atom, index in fixed.items())
    ]
    stacked = [factor for factor in axis_map.stacked_factors if factor.atom not in fixed]
    joined = jnp.stack(pieces).reshape([*(factor.extent for factor in stacked), *pieces[0].shape])
    atoms = [*(factor.atom for factor in stacked), *free]
    leaf = joined.transpose([atoms.index(factor.atom) for factor in leaf_factors])
    padding = [(0, factor.extent - extent) for factor, extent in zip(leaf_factors, leaf.shape)]
    return jnp.pad(leaf, padding).reshape(axis_map.leaf_shape)


def _free_factors(axis_map: AxisMap) -> list[SizedAxis]:
    """Return the atoms of a tensor's dims that are dims of the leaf, in the order of the tensor."""
    return [factor for factor in _factors(axis_map) if factor.fixed is None]


def _factors(axis_map: AxisMap) -> list[SizedAxis]:
    return [factor for dim in axis_map.source_dims for factor in dim.factors]


def _factor_extents(axis_map: AxisMap) -> Sequence[int]:
    return [factor.extent for factor in _factors(axis_map)]


def _fixed_index(axis_map: AxisMap) -> tuple[int | slice, ...]:
    """Return the index that selects the row's part of a tensor, with a dim per atom."""
    return tuple(
        slice(None) if factor.fixed is None else factor.fixed for factor in _factors(axis_map)
    )


def _region(axis_map: AxisMap) -> tuple[slice, ...]:
    """Return the consecutive elements of each dim of a tensor that the row maps."""
    return tuple(slice(dim.start, dim.start + dim.selected_extent) for dim in axis_map.source_dims)
