"""The tree of a model's parameters: each leaf's path, shape and logical dims, and what it is for. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from trainer.models.axis_map import AxisMap, bind
from trainer.models.parameters import EMBEDDINGS, Config, Family, rows, stack_axis

T = TypeVar("T")
Tree = dict[str, Any]  # nested; a leaf is anything but a dict
Role = Literal["embedding", "matrix", "scale", "bias"]


@dataclass(frozen=True, slots=True)
class Leaf:
    """A leaf of the tree. `layer`: its number, where layers are apart; `row`: its path with `{…}` for that."""

    path: str
    row: str
    shape: tuple[int, ...]
    dims: tuple[tuple[str, ...], ...]  # the atoms of each dim; the first one is its logical name
    layer: int | None = None

    @property
    def role(self) -> Role:
        """What it is for: only matrices and embeddings decay, and each role has its own first values."""
        if not EMBEDDINGS.isdisjoint(self.path.split(".")):
            return "embedding"
        last = self.path.rpartition(".")[2]
        return "scale" if last == "scale" else "bias" if last == "bias" else "matrix"

    @property
    def stack_axis(self) -> int | None:
        """The axis over which layers are stacked."""
        return stack_axis(self.dims)


def leaves(family: Family, config: Config, tied: bool, scan: bool = True, scan_axis: int = 0) -> dict[str, Leaf]:
    """Path -> leaf of every parameter, in the table's order; without the head where that is the embedding."""
    found: dict[str, Leaf] = {}
    sizes = family.sizes(config)
    for path, row in rows(family, config, scan, scan_axis).items():
        if path == family.tie.leaf and tied:
            continue
        bound = bind(row, sizes)
        found |= {leaf.path: leaf for leaf in _leaves_of(path, bound)}
    return found


def _leaves_of(path: str, bound: AxisMap) -> Iterable[Leaf]:
    dims = tuple(tuple(factor.atom for factor in dim) for dim in bound.leaf)
    if not bound.unscanned:
        return [Leaf(path, path, bound.leaf_shape, dims)]
    stack = bound.unscanned[0]
    numbers = range(stack.extent)
    return [Leaf(path.format(**{stack.atom: i}), path, bound.leaf_shape, dims, i) for i in numbers]


def nested(flat: Mapping[str, T]) -> Tree:
    """Dotted paths as nested dicts."""
    tree: Tree = {}
    for path, value in flat.items():
        *parts, last = path.split(".")
        at = tree
        for part in parts:
            at = at.setdefault(part, {})
        at[last] = value
    return tree


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dicts as dotted paths."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found
