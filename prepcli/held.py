"""The tensors that leaves of a tree hold, by the rows that say what each leaf is made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from prepcli.accounting import Names
from prepcli.errors import PrepError
from prepcli.grids import Grid, Places
from prepcli.moves import Region
from prepcli.placing import Want
from prepcli.slots import PARAMS, alone, joined, slots_of
from prepcli.sources import SourceTensor, recorded
from prepcli.tensors import itemsize
from trainer.axes import AxisMap, bind
from trainer.table import rows


@dataclass(frozen=True, slots=True)
class HeldLeaf:
    """A leaf that is read: its chunks, and where those that hold a tensor are."""

    shape: tuple[int, ...]
    dtype: str
    chunk: tuple[int, ...]
    places: Callable[[Want], Places]


def tree_tensors(
    leaves: Mapping[str, HeldLeaf], names: Names, manifest: Mapping[str, Any], where: object
) -> tuple[tuple[SourceTensor, ...], tuple[SourceTensor, ...]]:
    """The tensors that leaves, by dotted name, hold by the layout that a manifest names: those of the parameters, and
    of the rest of a training state. PrepError for a parameter that is not there, or not of its shape."""
    tree = _Tree(leaves, names, manifest)
    for path, bound, _, _ in tree.parts:
        leaf = leaves.get(f"{PARAMS}.{path}")
        if leaf is None:
            raise PrepError(f"{where} lacks the leaf {PARAMS}.{path}", "its manifest and its tree differ")
        if leaf.shape != bound.leaf_shape:
            why = f"shape {list(leaf.shape)}, its manifest's config makes it {list(bound.leaf_shape)}"
            raise PrepError(f"{where}: the leaf {PARAMS}.{path} is not what it should be", why)
    shapes = {name: leaf.shape for name, leaf in leaves.items()}
    slots = slots_of(shapes, {path: bound.leaf_shape for path, bound, _, _ in tree.parts})
    of_slots = [tensor for slot in slots for tensor in tree.slot(slot)]
    taken = {f"{slot}.{path}" for slot in (PARAMS, *slots) for path, _, _, _ in tree.parts}
    return tuple(tree.slot(PARAMS)), (*of_slots, *(tree.alone(name) for name in leaves if name not in taken))


class _Tree:
    """Leaves with the rows that say what they hold: `parts` has the path, row, tensor and indices of each piece."""

    def __init__(self, leaves: Mapping[str, HeldLeaf], names: Names, manifest: Mapping[str, Any]) -> None:
        self._leaves, self._names, self._manifest = leaves, names, manifest
        family, config = names.family, manifest["config"]
        sizes = family.sizes(config)
        table = rows(family, config, manifest["scan"], manifest["scan_axis"])
        bound = {
            path: bind(row, sizes) for path, row in table.items() if path != family.tie.leaf or not manifest["tied"]
        }
        self.parts = [
            (path.format(**at), row, tensor, tuple(at.items()))
            for path, row in bound.items()
            for tensor, at in row.tensors()
        ]

    def slot(self, slot: str) -> Iterator[SourceTensor]:
        """The tensors of a slot, in the order of its leaves."""
        said = self._manifest["tensors"] if slot == PARAMS else self._manifest.get("slots", {}).get(slot, {})
        found: dict[str, SourceTensor] = {}
        for path, row, name, at in self.parts:
            dtype, region = self._region(f"{slot}.{path}", row, at)
            sides = (*found[name].side, region) if name in found else (region,)
            digests = recorded(said, self._names.full(name))
            found[name] = SourceTensor(joined(slot, name), dtype, row.source_shape, sides, digests)
        yield from found.values()

    def alone(self, name: str) -> SourceTensor:
        """A leaf that belongs to no parameter."""
        shape = self._leaves[name].shape
        dtype, region = self._region(name, alone(name, shape), ())
        return SourceTensor(joined("", name), dtype, shape, (region,), recorded(self._manifest.get("others", {}), name))

    def _region(self, name: str, row: AxisMap, at: tuple[tuple[str, int], ...]) -> tuple[str, Region]:
        leaf = self._leaves[name]
        want = Want(name, row, at, Grid(leaf.shape, leaf.chunk), itemsize(leaf.dtype))
        return leaf.dtype, Region(row, at, want.grid, leaf.places(want), want.itemsize)
