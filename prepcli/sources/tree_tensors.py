"""The tensors that leaves of a tree hold, by the rows that say what each leaf is made of."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from prepcli.errors import PrepError
from prepcli.planning.accounting import TensorNames
from prepcli.planning.chunk_placement import LeafPiece
from prepcli.planning.grids import ChunkGrid, Placement
from prepcli.planning.plan import DroppedTensor
from prepcli.planning.state_names import (
    OPT_STATE,
    OPT_STATE_RULE,
    PARAMS,
    TRAINING_STATE_RULE,
    find_slots,
    identity_axis_map,
    qualify,
)
from prepcli.planning.strided_copies import Region
from prepcli.planning.tensors import itemsize
from prepcli.sources.source import SourceTensor, recorded_digests
from trainer.models.axis_map import AxisMap, Row, Sizes, bind_row
from trainer.models.parameters import (
    LAYER_ATOMS,
    Family,
    HFConfig,
    TreeLayout,
    layer_atom_in,
    layout_rows,
    parameter_rows,
)

ROOTS = ("", "params.", "params.params.")  # of a tree that is all parameters, of Flax's variables, of a training state
NATIVE_LAYOUT = "native"  # prep's own tree, without its manifest
BOXED_SUFFIX = ".value"  # below a leaf that Flax boxed with the names of its dims
MAX_LAYERS = 1 << 12  # of a stacked tree: far above any model; keeps a wrong config from asking for memory
MAX_LISTED = 4


@dataclass(frozen=True, slots=True)
class StoredLeaf:
    """A leaf that is read: its chunks, and where those that hold a tensor are."""

    shape: tuple[int, ...]
    dtype: str
    chunk_shape: tuple[int, ...]
    locate_chunks: Callable[[LeafPiece], Placement]

    def region(self, name: str, row: AxisMap, stacked_indices: tuple[tuple[str, int], ...]) -> Region:
        """Where a tensor of the row lies in the leaf, which is called `name`."""
        want = LeafPiece(name, row, stacked_indices, ChunkGrid(self.shape, self.chunk_shape), itemsize(self.dtype))
        return Region(row, stacked_indices, want.grid, self.locate_chunks(want), want.itemsize)


Leaves = Mapping[str, StoredLeaf]
LeafTensor = tuple[str, AxisMap, str, tuple[tuple[str, int], ...]]  # a leaf's path, its row, a tensor of it, which one


def tensors_from_manifest(
    leaves: Leaves, names: TensorNames, manifest: Mapping[str, Any], folder: object
) -> tuple[tuple[SourceTensor, ...], tuple[SourceTensor, ...]]:
    """The tensors that leaves, by dotted name, hold by the layout that a manifest names: those of the parameters, and
    of the rest of a training state. PrepError for a parameter that is not there, or not of its shape."""
    family, config = names.family, manifest["config"]
    form = {names.bare_name(name) for name in manifest["tensors"]}  # of two that a family has, the one that was read
    table = parameter_rows(family, config, manifest["scan"], manifest["scan_axis"], form)
    kept = {path: row for path, row in table.items() if path != family.tying.head_leaf or not manifest["tied"]}
    parts = tuple(_parts(kept, family.sizes(config)))
    for path, bound, _, _ in parts:
        if f"{PARAMS}.{path}" not in leaves:
            raise PrepError(f"{folder} lacks the leaf {PARAMS}.{path}", "its manifest and its tree differ")
        _check(f"{PARAMS}.{path}", leaves[f"{PARAMS}.{path}"], bound, "manifest's config", folder)
    shapes = {name: leaf.shape for name, leaf in leaves.items()}
    slots = find_slots(shapes, {path: bound.leaf_shape for path, bound, _, _ in parts})
    taken = {f"{slot}.{path}" for slot in (PARAMS, *slots) for path, _, _, _ in parts}

    def of_slot(slot: str) -> Iterator[SourceTensor]:
        said = manifest["tensors"] if slot == PARAMS else manifest.get("slots", {}).get(slot, {})
        found = ((f"{slot}.{path}", row, tensor, at) for path, row, tensor, at in parts)
        return (_renamed(t, qualify(slot, t.name)) for t in iter_tensors(leaves, found, said, names))

    others = (_alone(name, leaves[name], manifest.get("others", {})) for name in leaves if name not in taken)
    return tuple(of_slot(PARAMS)), (*(tensor for slot in slots for tensor in of_slot(slot)), *others)


def iter_tensors(
    leaves: Leaves, leaf_tensors: Iterator[LeafTensor], records: Mapping[str, Any], names: TensorNames
) -> Iterator[SourceTensor]:
    """The tensors of the parts, in their order, each with all that leaves have of it."""
    found: dict[str, SourceTensor] = {}
    for path, row, name, at in leaf_tensors:
        region = leaves[path].region(path, row, at)
        side = (*found[name].placement, region) if name in found else (region,)
        digests = recorded_digests(records, names.full_name(name))
        found[name] = SourceTensor(name, leaves[path].dtype, row.source_shape, side, digests)
    yield from found.values()


def _renamed(tensor: SourceTensor, name: str) -> SourceTensor:
    return SourceTensor(name, tensor.dtype, tensor.shape, tensor.placement, tensor.digests)


def _alone(name: str, leaf: StoredLeaf, said: Mapping[str, Any]) -> SourceTensor:
    """A leaf that belongs to no parameter, as a tensor of a training state."""
    region = leaf.region(name, identity_axis_map(name, leaf.shape), ())
    return SourceTensor(qualify("", name), leaf.dtype, leaf.shape, (region,), recorded_digests(said, name))


def _parts(table: Mapping[str, Row], sizes: Sizes) -> Iterator[LeafTensor]:
    for path, row in table.items():
        bound = bind_row(row, sizes)
        for tensor, at in bound.tensors():
            yield path.format(**at), bound, tensor, tuple(at.items())


def _check(name: str, leaf: StoredLeaf, row: AxisMap, what: str, where: object) -> None:
    if leaf.shape != row.leaf_shape:
        why = f"shape {list(leaf.shape)}, its {what} makes it {list(row.leaf_shape)}"
        raise PrepError(f"{where}: the leaf {name} is not what it should be", why)


# Trees of other libraries


@dataclass(frozen=True, slots=True)
class TreeFormat:
    """What a tree of another library is: the layout's name, below which root, the axis that layers are stacked on
    (None: a leaf for each), and whether paths carry the family's base prefix."""

    layout: str
    root: str
    layer_axis: int | None = None
    has_prefix: bool = True

    def rows(self, family: Family, config: HFConfig) -> dict[str, Row]:
        """Path, without the root, -> row."""
        if self.layout == NATIVE_LAYOUT:
            return parameter_rows(family, config, self.layer_axis is not None, self.layer_axis or 0)
        found = layout_rows(family.layouts[self.layout], config, self.layer_axis)
        return found if self.has_prefix else {path.removeprefix(family.prefix): row for path, row in found.items()}


@dataclass(frozen=True, slots=True)
class ForeignTree:
    """A tree of another library as tensors: the parameters, and what is not below their root, by first key."""

    format: TreeFormat
    names: TensorNames
    tensors: tuple[SourceTensor, ...]
    extra_entries: tuple[DroppedTensor, ...]


def match_foreign_tree(
    leaves: Leaves, family: Family, config: HFConfig, display_name: str, roots: Collection[str] = ROOTS
) -> ForeignTree:
    """What leaves, by dotted name, hold by the layout that fits them best; a leaf below its root that is in no row is a
    tensor by its own name. PrepError where none fits, or a leaf has not its shape; what is missing is missing."""
    form = _best_form(leaves, family, config, display_name, roots)
    inside = _below(leaves, form, family, display_name)
    parts = _parts_inside(form, family, config, inside, display_name)
    tensors = tuple(iter_tensors(inside, iter(parts), {}, TensorNames(family)))
    unknown = sorted(inside.keys() - {path for path, _, _, _ in parts})
    plain = frozenset(path for path in unknown if form.has_prefix and not path.startswith(family.prefix))
    names = TensorNames(family, form.has_prefix, unprefixed_names=plain)
    spare = tuple(_renamed(_alone(path, inside[path], {}), names.bare_name(path)) for path in unknown)
    found = (*tensors, *spare)
    if len({tensor.name for tensor in found}) != len(found):
        raise PrepError(
            f"{display_name} has a tensor twice",
            f"one of {', '.join(unknown[:MAX_LISTED])} is there as another leaf too",
        )
    others = [(name, leaf) for name, leaf in leaves.items() if not name.startswith(form.root)]
    return ForeignTree(form, names, found, tuple(_beside(others)))


def _parts_inside(form: TreeFormat, family: Family, config: HFConfig, inside: Leaves, where: str) -> list[LeafTensor]:
    """The parts of the leaves that are there. PrepError for one that has not its shape."""
    sizes = family.sizes(config)
    most = len(inside) if form.layer_axis is None else MAX_LAYERS
    if (asked := max(sizes.get(stack, 0) for stack in LAYER_ATOMS)) > most:
        why = f"its config asks for {asked:,} layers, it has {len(inside):,} leaves"
        raise PrepError(f"{where} lacks layers", why, "are config.json and the weights of one model?")
    parts = [part for part in _parts(form.rows(family, config), sizes) if part[0] in inside]
    for path, row, _, _ in parts:
        _check(path, inside[path], row, "config", where)
    return parts


def _beside(others: Iterable[tuple[str, StoredLeaf]]) -> Iterator[DroppedTensor]:
    """Leaves beside the parameters, by the first part of their paths."""
    found: dict[str, int] = {}
    for name, leaf in others:
        first = name.partition(".")[0]
        found[first] = found.get(first, 0) + math.prod(leaf.shape) * itemsize(leaf.dtype)
    for first, nbytes in found.items():
        yield DroppedTensor(first, nbytes, OPT_STATE_RULE if first == OPT_STATE else TRAINING_STATE_RULE)


def _below(leaves: Leaves, form: TreeFormat, family: Family, where: str) -> dict[str, StoredLeaf]:
    """The leaves below a root, by their paths there as the layout's table spells them."""
    root, layout = form.root, family.layouts.get(form.layout, TreeLayout({}))
    found: dict[str, StoredLeaf] = {}
    for name, leaf in leaves.items():
        if name.startswith(root):
            path = name.removeprefix(root).removesuffix(BOXED_SUFFIX)
            path = layout.path_aliases.get(path, path)
            if path in found:
                raise PrepError(f"{where} has a leaf twice", f"two are called {path}")
            found[path] = leaf
    return found


def _best_form(leaves: Leaves, family: Family, config: HFConfig, where: str, roots: Collection[str]) -> TreeFormat:
    """The form that has the most leaves in their shapes, layers counted once."""
    best, most = None, 0
    for form in _forms(family, roots):
        score = _score(form, leaves, family, config)
        if score > most:
            best, most = form, score
    if best is None:
        names = ", ".join(list(leaves)[:MAX_LISTED]) + (" …" if len(leaves) > MAX_LISTED else "")
        why = f"found {names or 'no arrays'}, which are not the leaves of a {family.name}"
        looked = f"layouts that are read: {_examples(family, config)}, below {_roots_text(roots)}"
        raise PrepError(f"{where} has no known layout", why, looked)
    return best


def _examples(family: Family, config: HFConfig) -> str:
    """A leaf of each layout that is read: `native (layers.attn.q.weight)`."""
    paths = {name: TreeFormat(name, "").rows(family, config) for name in (NATIVE_LAYOUT, *family.layouts)}
    first = {
        name: next(filter(layer_atom_in, rows), "").format(**dict.fromkeys(LAYER_ATOMS, 0))
        for name, rows in paths.items()
    }
    return " or ".join(f"{name} ({path})" for name, path in first.items())


def _roots_text(roots: Collection[str]) -> str:
    return " or ".join(root.removesuffix(".") or "no root" for root in roots)


def _score(form: TreeFormat, leaves: Leaves, family: Family, config: HFConfig) -> int:
    """How many leaves a form has of those of its first layer, one in its shape counted twice; 0 for less than half."""
    sizes, spellings = family.sizes(config), family.layouts.get(form.layout, TreeLayout({})).path_aliases
    others = {path: other for other, path in spellings.items()}
    table, count, right = form.rows(family, config), 0, 0
    for path, row in table.items():
        first = path.format(**dict.fromkeys(LAYER_ATOMS, 0))
        names = (form.root + each + box for each in (first, others.get(first, first)) for box in ("", BOXED_SUFFIX))
        leaf = next((leaves[name] for name in names if name in leaves), None)
        count += leaf is not None
        right += leaf is not None and leaf.shape == bind_row(row, sizes).leaf_shape
    return count + right if 2 * count >= len(table) else 0


def _forms(family: Family, roots: Collection[str]) -> Iterator[TreeFormat]:
    for root in roots:
        for axis in (0, 1, None):
            yield TreeFormat(NATIVE_LAYOUT, root, axis)
        for name, layout in family.layouts.items():
            for axis in (None, 0, 1) if layout.stacked_name else (None,):
                yield TreeFormat(name, root, axis)
            if family.prefix and all(
                path.startswith(family.prefix) or not layer_atom_in(path) for path in layout.parameters
            ):
                yield TreeFormat(name, root, None, has_prefix=False)
