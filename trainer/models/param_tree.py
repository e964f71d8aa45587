"""The tree of a model's parameters: each leaf's path, shape and logical dims, and what it is for. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from trainer.models.axis_map import AxisMap, bind_row
from trainer.models.parameters import EMBEDDING_PATH_PARTS, Family, HFConfig, parameter_rows, stack_axis

T = TypeVar("T")
Tree = dict[str, Any]  # nested; a leaf is anything but a dict
Role = Literal["embedding", "matrix", "scale", "bias"]


@dataclass(frozen=True, slots=True)
class ParamLeaf:
    """A leaf of the tree. `layer`: its number, where layers are apart; `row`: its path with `{…}` for that."""

    path: str
    path_pattern: str
    shape: tuple[int, ...]
    dims: tuple[tuple[str, ...], ...]  # the atoms of each dim; the first one is its logical name
    layer_index: int | None = None

    @property
    def role(self) -> Role:
        """What it is for: only matrices and embeddings decay, and each role has its own first values."""
        if not EMBEDDING_PATH_PARTS.isdisjoint(self.path.split(".")):
            return "embedding"
        last = self.path.rpartition(".")[2]
        return "scale" if last == "scale" else "bias" if last == "bias" else "matrix"

    @property
    def stack_axis(self) -> int | None:
        """The axis over which layers are stacked."""
        return stack_axis(self.dims)


def param_leaves(
    family: Family, config: HFConfig, tied: bool, scan: bool = True, scan_axis: int = 0
) -> dict[str, ParamLeaf]:
    """Path -> leaf of every parameter, in the table's order; without the head where that is the embedding."""
    found: dict[str, ParamLeaf] = {}
    sizes = family.sizes(config)
    for path, row in parameter_rows(family, config, scan, scan_axis).items():
        if path == family.tying.head_leaf and tied:
            continue
        bound = bind_row(row, sizes)
        found |= {leaf.path: leaf for leaf in _leaves_of_row(path, bound)}
    return found


def _leaves_of_row(path: str, bound: AxisMap) -> Iterable[ParamLeaf]:
    dims = tuple(tuple(factor.atom for factor in dim) for dim in bound.leaf_dims)
    if not bound.unscanned_factors:
        return [ParamLeaf(path, path, bound.leaf_shape, dims)]
    stack = bound.unscanned_factors[0]
    numbers = range(stack.extent)
    return [ParamLeaf(path.format(**{stack.atom: i}), path, bound.leaf_shape, dims, i) for i in numbers]


def unflatten_tree(flat: Mapping[str, T]) -> Tree:
    """Dotted paths as nested dicts."""
    tree: Tree = {}
    for path, value in flat.items():
        *parts, last = path.split(".")
        at = tree
        for part in parts:
            at = at.setdefault(part, {})
        at[last] = value
    return tree


def flatten_tree(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dicts as dotted paths."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= flatten_tree(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found
