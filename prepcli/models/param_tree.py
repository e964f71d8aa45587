"""The parameter tree of a model: path, shape, logical dims and role of each leaf. No I/O, no jax."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from prepcli.algebra.axis_map import AxisMap, SizedAxis, bind_row, dim_name, stack_axis
from prepcli.models.parameters import EMBEDDING_PATH_PARTS, Family, HFConfig, parameter_rows

T = TypeVar("T")
# Nested dicts. Every other value is a leaf.
Tree = dict[str, Any]
# Dims of the elements of a head. A model may have wider heads in layers with full attention.
HEAD_WIDTH_DIMS = ("head_dim", "full_head_dim")
# Dims of the key and value heads, likewise.
KV_HEAD_DIMS = ("kv_heads", "full_kv_heads")
Role = Literal["embedding", "matrix", "scale", "bias"]


@dataclass(frozen=True, slots=True)
class ParamLeaf:
    """A leaf of the parameter tree.

    Attributes:
        path: Dotted path in the tree.
        path_pattern: The path with a placeholder in place of the layer index, if the leaf belongs
            to one layer.
        shape: Shape of the leaf.
        dims: Named axes (atoms) of each dim. `dim_name` gives the logical name of a dim.
        layer_index: Index of the leaf's layer, or None if it stacks the layers or belongs to no
            layer.
    """

    path: str
    path_pattern: str
    shape: tuple[int, ...]
    dims: tuple[tuple[str, ...], ...]
    layer_index: int | None = None

    @property
    def role(self) -> Role:
        """Role of the leaf. It decides the initial values and whether weight decay applies."""
        if not EMBEDDING_PATH_PARTS.isdisjoint(self.path.split(".")):
            return "embedding"
        last = self.path.rpartition(".")[2]
        if last == "scale":
            return "scale"
        if last == "bias":
            return "bias"
        return "matrix"

    @property
    def stack_axis(self) -> int | None:
        """Axis that stacks the layers, or None."""
        return stack_axis(self.dims)

    def extent(self, name: str) -> int:
        """Return the extent of a logical dim, or 1 if the leaf does not have it."""
        return math.prod(
            extent for dim, extent in zip(self.dims, self.shape) if dim_name(dim) == name
        )


def dim_extent(leaves: Mapping[str, ParamLeaf], name: str) -> int:
    """Return the extent of a logical dim in the first leaf that has it, or 0 if no leaf has it."""
    for leaf in leaves.values():
        if any(dim_name(dim) == name for dim in leaf.dims):
            return leaf.extent(name)
    return 0


def widest_head(leaves: Mapping[str, ParamLeaf]) -> int:
    """Return the number of elements of the widest attention head, or 0 without attention."""
    return max(dim_extent(leaves, dim) for dim in HEAD_WIDTH_DIMS)


def param_leaves(
    family: Family, config: HFConfig, tied: bool, *, scan: bool = True, scan_axis: int = 0
) -> dict[str, ParamLeaf]:
    """Return the leaves of a model's parameter tree.

    Args:
        family: Family of the model.
        config: Content of its config.json.
        tied: Whether the head is the token embedding. The tree then has no leaf for the head.
        scan: Whether each leaf stacks all layers.
        scan_axis: Axis of the stacked layers.

    Returns:
        Path -> leaf, in the order of the family's parameters.
    """
    leaves: dict[str, ParamLeaf] = {}
    sizes = family.sizes(config)
    for path, row in parameter_rows(family, config, scan, scan_axis).items():
        if path == family.tying.head_leaf and tied:
            continue
        leaves |= {leaf.path: leaf for leaf in _leaves_of_row(path, bind_row(row, sizes))}
    return leaves


def _dim_atoms(dim: Iterable[SizedAxis]) -> tuple[str, ...]:
    return tuple(axis.atom for axis in dim)


def _leaves_of_row(path: str, row: AxisMap) -> Iterable[ParamLeaf]:
    """Return the leaves of one row of an axis map."""
    dims = tuple(_dim_atoms(dim) for dim in row.leaf_dims)
    if not row.unscanned_factors:
        return [ParamLeaf(path.format(), path, shape=row.leaf_shape, dims=dims)]
    # Only a layer atom can lack a dim of the leaf, so it is the atom of the path's placeholder.
    layers = row.unscanned_factors[0]
    return [
        ParamLeaf(
            path.format(**{layers.atom: i}), path, shape=row.leaf_shape, dims=dims, layer_index=i
        )
        for i in range(layers.extent)
    ]


def find_param_path(name: str, param_paths: Mapping[str, object]) -> str | None:
    """Return the longest parameter path at the end of the name of a state's leaf, or None if there is none."""
    parts = name.split(".")
    # The first part is never in a path, e.g. opt_state.adam.mu.embed.tokens -> embed.tokens.
    # Longest first, so that a path wins over another path that equals its end.
    suffixes = (".".join(parts[i:]) for i in range(1, len(parts)))
    return next((suffix for suffix in suffixes if suffix in param_paths), None)


def unflatten_tree(flat: Mapping[str, T]) -> Tree:
    """Return nested dicts from a dict with dotted paths."""
    tree: Tree = {}
    for path, value in flat.items():
        *parts, last = path.split(".")
        node = tree
        for part in parts:
            node = node.setdefault(part, {})
        node[last] = value
    return tree


def flatten_tree(tree: Tree, prefix: str = "") -> dict[str, Any]:
    """Return a dict with dotted paths, each after `prefix`, from nested dicts."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= (
            flatten_tree(value, f"{prefix}{key}.")
            if isinstance(value, dict)
            else {f"{prefix}{key}": value}
        )
    return flat
