"""Tensors of a parameter tree (Orbax, Flax, EasyLM): which leaf, and which part of it, stores each tensor."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from prepcli.errors import GET_AGAIN_HINT, DamagedError, PrepError
from prepcli.formats.manifest import Manifest
from prepcli.planning.chunk_placement import LeafPiece
from prepcli.planning.grids import ChunkGrid, Placement
from prepcli.planning.manifest_fields import TensorRecords
from prepcli.planning.plan import Contiguous, DroppedTensor
from prepcli.planning.quantization_leaves import (
    QUANTIZATION,
    is_quantization_leaf,
    quantization_leaves,
)
from prepcli.planning.state_names import (
    OPT_STATE,
    OPT_STATE_RULE,
    PARAMS,
    TOWERS,
    TRAINING_STATE_RULE,
    find_slots,
    identity_axis_map,
    qualify,
)
from prepcli.planning.state_rows import PathLeaf, find_state_leaves, state_axis_map
from prepcli.planning.strided_copies import ChunkedLocation
from prepcli.planning.tensor_match import TensorNames
from prepcli.planning.tensors import ITEM_BITS, itemsize
from prepcli.sources.source import SourceTensor, recorded_digests
from trainer.models.axis_map import LAYER_ATOMS, AxisMap, ParsedAxisMap, Sizes, bind_row
from trainer.models.parameters import (
    Family,
    HFConfig,
    TreeLayout,
    layer_atom_in,
    layout_rows,
    parameter_rows,
)

# Prefix of the parameters in a tree of parameters, in Flax variables, and in a Flax training state.
ROOTS = (
    "",
    "params.",
    "params.params.",
)
# The tree that prep writes, without its manifest.
NATIVE_LAYOUT = "native"
# End of the path of a leaf that Flax boxed with its logical axis names, e.g. `kernel.value`.
BOXED_SUFFIX = ".value"
# Layers of a stacked tree. Limits the memory that an invalid config can claim.
MAX_LAYERS = 1 << 12
MAX_LISTED = 4


@dataclass(frozen=True, slots=True)
class StoredLeaf:
    """A leaf of a stored tree.

    Attributes:
        shape: Shape of the leaf.
        dtype: Stored dtype.
        chunk_shape: Shape of its chunks.
        locate_chunks: Returns where the chunks that hold one tensor of the leaf are stored.
    """

    shape: tuple[int, ...]
    dtype: str
    chunk_shape: tuple[int, ...]
    locate_chunks: Callable[[LeafPiece], Placement]

    def region(
        self, name: str, row: AxisMap, stacked_indices: tuple[tuple[str, int], ...]
    ) -> ChunkedLocation:
        """Return where this leaf stores one tensor.

        Args:
            name: Path of the leaf.
            row: Axis map of the leaf.
            stacked_indices: Axis -> index of the tensor, for example the number of its layer.
        """
        grid = ChunkGrid(self.shape, self.chunk_shape)
        piece = LeafPiece(name, row, stacked_indices, grid, itemsize(self.dtype))
        return ChunkedLocation(
            row, stacked_indices, piece.grid, self.locate_chunks(piece), piece.itemsize
        )


# Location of a tensor without elements: no byte of it is read.
NO_BYTES = (Contiguous(0, 0),)
Leaves = Mapping[str, StoredLeaf]  # by dotted name
# Leaf path, its row, tensor name, stacked indices.
LeafTensor = tuple[str, AxisMap, str, tuple[tuple[str, int], ...]]


def tensors_from_manifest(
    leaves: Leaves, names: TensorNames, manifest: Manifest, folder: object
) -> tuple[tuple[SourceTensor, ...], tuple[SourceTensor, ...]]:
    """List the tensors of a tree that prep wrote.

    Args:
        leaves: Leaves of the tree, by dotted name.
        names: Naming scheme of the tensors in the manifest.
        manifest: Manifest of the checkpoint. It states the layout of the tree.
        folder: The checkpoint, for messages.

    Returns:
        The parameters, and the other tensors of a training state.

    Raises:
        PrepError: A parameter's leaf is missing or has another shape than the config implies.
    """
    family = names.family
    config = manifest.config
    # The recorded names select among alternative rows.
    recorded_names = {names.bare_name(name) for name in manifest.tensors}
    rows = parameter_rows(family, config, manifest.scan, manifest.scan_axis, recorded_names)
    # A tied head has no leaf: the embedding stores it.
    if manifest.is_tied:
        rows.pop(family.tying.head_leaf, None)
    leaf_tensors = tuple(_leaf_tensors(rows, family.sizes(config)))
    for path, row, _, _ in leaf_tensors:
        if f"{PARAMS}.{path}" not in leaves:
            what = f"{folder} lacks the leaf {PARAMS}.{path}"
            raise DamagedError(what, "its manifest and its tree differ", GET_AGAIN_HINT)
        _check_leaf_shape(
            f"{PARAMS}.{path}", leaves[f"{PARAMS}.{path}"], row, "manifest's config", folder
        )
    shapes = {name: leaf.shape for name, leaf in leaves.items()}
    rows_by_path = {path: row for path, row, _, _ in leaf_tensors}
    parameters = {path: row.leaf_shape for path, row in rows_by_path.items()}
    # A training state has copies of the parameter tree (`opt_state.mu`, `opt_state.nu`): a prefix
    # below which every parameter has a leaf of its shape is a slot, and its tensors have the axis
    # maps of the parameters.
    slots = find_slots(shapes, parameters)
    state_leaves = tuple(find_state_leaves(shapes, parameters, slots))
    matched = {leaf.name for leaf in state_leaves}
    for slot in (PARAMS, *slots):
        matched |= {f"{slot}.{path}" for path in parameters}

    def slot_tensors(slot: str) -> Iterator[SourceTensor]:
        if slot == PARAMS:
            records = manifest.tensors
        else:
            records = manifest.slots.get(slot, {})
        in_slot = (
            (f"{slot}.{path}", row, name, indices) for path, row, name, indices in leaf_tensors
        )
        tensors = iter_tensors(leaves, in_slot, records, names)
        return (replace(tensor, name=qualify(slot, tensor.name)) for tensor in tensors)

    state: list[SourceTensor] = []
    for slot in slots:
        state.extend(slot_tensors(slot))
    for state_leaf in state_leaves:
        row = rows_by_path[state_leaf.path]
        leaf = leaves[state_leaf.name]
        state.extend(_state_leaf_tensors(state_leaf, leaf, row, manifest.slots))
    state.extend(_quantization_tensors(leaves, manifest, folder))
    for name, leaf in leaves.items():
        if name not in matched and not is_quantization_leaf(name):
            state.append(leaf_as_tensor(name, leaf, manifest.others))
    empty = _empty_tensors(names, manifest) if names.family.is_verbatim else ()
    return (*slot_tensors(PARAMS), *empty), tuple(state)


def split_tower_leaves(leaves: Leaves, manifest: Manifest) -> tuple[Leaves, Leaves]:
    """Split the leaves of a multimodal model into its text part with the training state, and its towers."""
    if manifest.towers is None:
        return leaves, {}
    towers = {name: leaf for name, leaf in leaves.items() if name.startswith(f"{TOWERS}.")}
    others = {name: leaf for name, leaf in leaves.items() if name not in towers}
    return others, towers


def tower_tensors(
    leaves: Leaves, names: TensorNames, manifest: Manifest
) -> tuple[SourceTensor, ...]:
    """Return the tensors in the towers (vision and audio parts) of a multimodal model.

    Args:
        leaves: Leaves of the towers, by dotted name.
        names: Names of the text part's tensors.
        manifest: Manifest of the checkpoint.
    """
    tensors: list[SourceTensor] = []
    for leaf_name, leaf in leaves.items():
        name = leaf_name.removeprefix(f"{TOWERS}.")
        tensor = leaf_as_tensor(leaf_name, leaf, {})
        digests = recorded_digests(manifest.tensors, name)
        tensors.append(replace(tensor, name=qualify(TOWERS, name), digests=digests))
    if manifest.towers is not None:
        # Parameters of the text part have elements.
        for tensor in _empty_tensors(names, manifest):
            tensors.append(replace(tensor, name=qualify(TOWERS, tensor.name)))
    return tuple(tensors)


def _empty_tensors(names: TensorNames, manifest: Manifest) -> Iterator[SourceTensor]:
    """Yield the tensors without elements. Only the manifest has them."""
    for name, record in manifest.tensors.items():
        # `recorded_family` has checked dtype and shape of a verbatim tree.
        dtype = record.get("dtype", "")
        shape = tuple(record.get("shape", ()))
        if 0 in shape:
            if dtype not in ITEM_BITS:
                what = f"the manifest of {names.display_name(name)} is invalid"
                raise DamagedError(what, f"its dtype is {dtype!r:.40}", GET_AGAIN_HINT)
            digests = recorded_digests(manifest.tensors, name)
            yield SourceTensor(name, dtype, shape, NO_BYTES, digests)


def _quantization_tensors(
    leaves: Leaves, manifest: Manifest, folder: object
) -> Iterator[SourceTensor]:
    """Yield the scales of dequantised weights."""
    records = manifest.slots.get(QUANTIZATION)
    if not records:
        return
    types: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, record in records.items():
        dtype = record.get("dtype", "")
        if dtype not in ITEM_BITS:
            what = f"the manifest of {folder} is invalid"
            raise DamagedError(what, f"the dtype of {name!r:.60} is {dtype!r:.40}", GET_AGAIN_HINT)
        types[name] = (dtype, tuple(record.get("shape", ())))
    for name, (dtype, shape) in types.items():
        if 0 in shape:
            digests = recorded_digests(records, name)
            yield SourceTensor(qualify(QUANTIZATION, name), dtype, shape, NO_BYTES, digests)
    for name, leaf_name, axis_map, indices in quantization_leaves(types):
        dtype, shape = types[name]
        leaf = leaves.get(leaf_name)
        if leaf is None or (leaf.dtype, leaf.shape) != (dtype, axis_map.leaf_shape):
            what = f"{folder} lacks the leaf {leaf_name} of {dtype} {[*axis_map.leaf_shape]}"
            raise DamagedError(what, "its manifest and its tree differ", GET_AGAIN_HINT)
        region = leaf.region(leaf_name, axis_map, indices)
        digests = recorded_digests(records, name)
        yield SourceTensor(qualify(QUANTIZATION, name), dtype, shape, (region,), digests)


def verbatim_tensors(leaves: Leaves) -> tuple[SourceTensor, ...]:
    """Return each leaf of a tree as a tensor of its own name and shape."""
    tensors: list[SourceTensor] = []
    for name, leaf in leaves.items():
        tensors.append(replace(leaf_as_tensor(name, leaf, {}), name=name))
    return tuple(tensors)


def _state_leaf_tensors(
    state_leaf: PathLeaf, leaf: StoredLeaf, row: AxisMap, records: Mapping[str, TensorRecords]
) -> Iterator[SourceTensor]:
    """Yield the tensors of a leaf of the optimizer state, one per layer.

    The leaf is in an incomplete slot. A slot is a subtree of the optimizer state with one leaf per parameter, such as
    `opt_state.adam.mu`. An incomplete slot lacks some of them, or has some with reduced axes. See
    `planning.state_rows`.

    Args:
        state_leaf: Slot and parameter of the leaf.
        leaf: The stored leaf.
        row: The axis map of the parameter.
        records: The manifest's records of tensors, by slot and name.
    """
    axis_map = state_axis_map(state_leaf.path, row, leaf.shape)
    slot = state_leaf.slot
    for name, indices in axis_map.tensors():
        region = leaf.region(state_leaf.name, axis_map, tuple(indices.items()))
        digests = recorded_digests(records.get(slot, {}), name)
        yield SourceTensor(
            qualify(slot, name), leaf.dtype, axis_map.source_shape, (region,), digests
        )


def iter_tensors(
    leaves: Leaves,
    leaf_tensors: Iterator[LeafTensor],
    records: TensorRecords,
    names: TensorNames,
) -> Iterator[SourceTensor]:
    """Yield each tensor once, with all of its regions in the leaves.

    Args:
        leaves: Leaves of the tree, by dotted name.
        leaf_tensors: Pairs of leaf and tensor. A tensor that several leaves store occurs several times.
        records: The manifest's records of tensors, by name.
        names: Naming scheme of the tensors in `records`.
    """
    tensors: dict[str, SourceTensor] = {}
    # One tensor may be stored in several leaves, e.g. the fused `c_attn` of GPT-2 in q, k and v. Each
    # of them adds a region.
    for path, row, name, stacked_indices in leaf_tensors:
        region = leaves[path].region(path, row, stacked_indices)
        if name in tensors:
            placement = (*tensors[name].placement, region)
        else:
            placement = (region,)
        digests = recorded_digests(records, names.full_name(name))
        tensors[name] = SourceTensor(name, leaves[path].dtype, row.source_shape, placement, digests)
    yield from tensors.values()


def leaf_as_tensor(name: str, leaf: StoredLeaf, records: TensorRecords) -> SourceTensor:
    """Convert a leaf that matches no parameter or slot to a training-state tensor of the same shape."""
    region = leaf.region(name, identity_axis_map(name, leaf.shape), ())
    return SourceTensor(
        qualify("", name), leaf.dtype, leaf.shape, (region,), recorded_digests(records, name)
    )


def _leaf_tensors(rows: Mapping[str, ParsedAxisMap], sizes: Sizes) -> Iterator[LeafTensor]:
    for path, row in rows.items():
        bound = bind_row(row, sizes)
        for name, indices in bound.tensors():
            yield path.format(**indices), bound, name, tuple(indices.items())


def _check_leaf_shape(
    name: str, leaf: StoredLeaf, row: AxisMap, config_source: str, display_name: object
) -> None:
    if leaf.shape != row.leaf_shape:
        why = f"its shape is {list(leaf.shape)}, its {config_source} implies {list(row.leaf_shape)}"
        raise PrepError(
            f"{display_name}: the leaf {name} has the wrong shape",
            why,
            "are config.json and the weights of one model?",
        )


# Trees of other libraries


@dataclass(frozen=True, slots=True)
class TreeFormat:
    """Format of a tree that another library wrote.

    Attributes:
        layout: Name of the family's layout, or NATIVE_LAYOUT.
        root: Prefix of the parameters' dotted names.
        layer_axis: Axis on which layers are stacked. None if each layer has a leaf.
        has_prefix: Whether paths carry the family's base prefix.
    """

    layout: str
    root: str
    layer_axis: int | None = None
    has_prefix: bool = True

    def rows(self, family: Family, config: HFConfig) -> dict[str, ParsedAxisMap]:
        """Return the axis-map row of each parameter in this format, by path below `root`."""
        if self.layout == NATIVE_LAYOUT:
            return parameter_rows(family, config, self.layer_axis is not None, self.layer_axis or 0)
        rows = layout_rows(family.layouts[self.layout], config, self.layer_axis)
        if self.has_prefix:
            return rows
        return {path.removeprefix(family.prefix): row for path, row in rows.items()}


@dataclass(frozen=True, slots=True)
class ForeignTree:
    """A tree of another library, matched with a layout.

    Attributes:
        format: The format that matched.
        names: Naming scheme of the tensors.
        tensors: Tensors of the leaves below the root.
        extra_entries: Leaves outside of the root, grouped by their first key.
        scales: Leaf with a scale -> the number whose square root divides its values.
        scaled_tensors: Names of the tensors in these leaves.
    """

    format: TreeFormat
    names: TensorNames
    tensors: tuple[SourceTensor, ...]
    extra_entries: tuple[DroppedTensor, ...]
    scales: Mapping[str, int]
    scaled_tensors: tuple[str, ...]


def match_foreign_tree(
    leaves: Leaves,
    family: Family,
    config: HFConfig,
    display_name: str,
    roots: Collection[str] = ROOTS,
) -> ForeignTree:
    """Match the leaves of a tree with the layout that fits them best.

    A leaf below the root that no row of the family maps becomes a tensor with the name of the leaf. Missing leaves
    are not an error here.

    Args:
        leaves: Leaves of the tree, by dotted name.
        family: Model family.
        config: The model's config.json.
        display_name: Name of the checkpoint in messages.
        roots: Possible prefixes of the parameters.

    Raises:
        PrepError: No layout fits, a leaf has the wrong shape, or a tensor occurs twice.
    """
    tree_format = _best_format(leaves, family, config, display_name, roots)
    param_leaves = _leaves_below_root(leaves, tree_format, family, display_name)
    expected = _expected_leaf_tensors(tree_format, family, config, param_leaves, display_name)
    leaf_tensors = [leaf_tensor for leaf_tensor in expected if leaf_tensor[0] in param_leaves]
    missing_leaves = {
        name: tree_format.root + path for path, _, name, _ in expected if path not in param_leaves
    }
    matched = tuple(iter_tensors(param_leaves, iter(leaf_tensors), {}, TensorNames(family)))
    unknown = sorted(param_leaves.keys() - {path for path, _, _, _ in leaf_tensors})
    unprefixed = frozenset(
        path for path in unknown if tree_format.has_prefix and not path.startswith(family.prefix)
    )
    names = TensorNames(
        family,
        tree_format.has_prefix,
        unprefixed_names=unprefixed,
        missing_leaves=missing_leaves,
    )
    unmatched = tuple(
        replace(leaf_as_tensor(path, param_leaves[path], {}), name=names.bare_name(path))
        for path in unknown
    )
    tensors = (*matched, *unmatched)
    if len({tensor.name for tensor in tensors}) != len(tensors):
        why = f"one of {', '.join(unknown[:MAX_LISTED])} is also stored as another leaf"
        raise PrepError(f"{display_name} has a tensor twice", why, GET_AGAIN_HINT)
    outside = [
        (name, leaf) for name, leaf in leaves.items() if not name.startswith(tree_format.root)
    ]
    numbers = _scales_by_path(tree_format, family, config)
    scales: dict[str, int] = {}
    for name in leaves:
        path = name.removeprefix(tree_format.root).removesuffix(BOXED_SUFFIX)
        if name.startswith(tree_format.root) and path in numbers:
            scales[name] = numbers[path]
    return ForeignTree(
        tree_format,
        names,
        tensors,
        tuple(_extra_entries(outside)),
        scales,
        tuple(name for path, _, name, _ in leaf_tensors if path in numbers),
    )


def _scales_by_path(tree_format: TreeFormat, family: Family, config: HFConfig) -> dict[str, int]:
    """Return the leaves with a scale, by path below the root, and the number under the root."""
    sizes = family.sizes(config)
    numbers: dict[str, int] = {}
    for path, row in tree_format.rows(family, config).items():
        if row.scale_atom:
            for _, indices in bind_row(row, sizes).tensors():
                numbers[path.format(**indices)] = sizes[row.scale_atom]
    return numbers


def _expected_leaf_tensors(
    tree_format: TreeFormat, family: Family, config: HFConfig, leaves: Leaves, display_name: str
) -> list[LeafTensor]:
    """List the tensors of all leaves of a format. Raise PrepError if an existing leaf has the wrong shape."""
    sizes = family.sizes(config)
    # The config is untrusted, and the rows below are one object per layer. An unstacked tree has a
    # leaf for each layer, so its leaves bound them.
    if tree_format.layer_axis is None:
        max_layers = len(leaves)
    else:
        max_layers = MAX_LAYERS
    if (num_layers := max(sizes.get(atom, 0) for atom in LAYER_ATOMS)) > max_layers:
        why = f"its config has {num_layers:,} layers, the tree has {len(leaves):,} leaves"
        raise PrepError(
            f"{display_name} has too few layers",
            why,
            "are config.json and the weights of one model?",
        )
    rows = tree_format.rows(family, config)
    leaf_tensors = list(_leaf_tensors(rows, sizes))
    for path, row, _, _ in leaf_tensors:
        if path in leaves:
            _check_leaf_shape(path, leaves[path], row, "config", display_name)
    return leaf_tensors


def _extra_entries(leaves: Iterable[tuple[str, StoredLeaf]]) -> Iterator[DroppedTensor]:
    """Sum the bytes of leaves outside of the parameters, by the first key of their paths."""
    nbytes_by_key: dict[str, int] = {}
    for name, leaf in leaves:
        key = name.partition(".")[0]
        leaf_nbytes = math.prod(leaf.shape) * itemsize(leaf.dtype)
        nbytes_by_key[key] = nbytes_by_key.get(key, 0) + leaf_nbytes
    for key, nbytes in nbytes_by_key.items():
        if key == OPT_STATE:
            rule = OPT_STATE_RULE
        else:
            rule = TRAINING_STATE_RULE
        yield DroppedTensor(key, nbytes, rule)


def _leaves_below_root(
    leaves: Leaves, tree_format: TreeFormat, family: Family, display_name: str
) -> dict[str, StoredLeaf]:
    """Return the leaves below the root, by their paths there in the spelling of the layout's table."""
    root = tree_format.root
    layout = family.layouts.get(tree_format.layout, TreeLayout({}))
    below: dict[str, StoredLeaf] = {}
    for name, leaf in leaves.items():
        if name.startswith(root):
            path = name.removeprefix(root).removesuffix(BOXED_SUFFIX)
            path = layout.path_aliases.get(path, path)
            if path in below:
                why = f"two leaves are named {path}"
                raise PrepError(f"{display_name} has a leaf twice", why, GET_AGAIN_HINT)
            below[path] = leaf
    return below


def _best_format(
    leaves: Leaves, family: Family, config: HFConfig, display_name: str, roots: Collection[str]
) -> TreeFormat:
    """Return the format with the highest score."""
    best = None
    best_score = 0
    for tree_format in _candidate_formats(family, roots):
        score = _score_format(tree_format, leaves, family, config)
        if score > best_score:
            best = tree_format
            best_score = score
    if best is None:
        listed = ", ".join(list(leaves)[:MAX_LISTED]) or "no arrays"
        if len(leaves) > MAX_LISTED:
            listed += " …"
        why = f"found {listed}, which are not the leaves of a {family.name}"
        hint = f"supported layouts: {_example_leaves(family, config)}, below {_roots_text(roots)}"
        raise PrepError(f"{display_name} has no known layout", why, hint)
    return best


def _example_leaves(family: Family, config: HFConfig) -> str:
    """Describe each supported layout by one of its leaves, as in `native (layers.attn.q.weight)`."""
    examples: list[str] = []
    for name in (NATIVE_LAYOUT, *family.layouts):
        rows = TreeFormat(name, "").rows(family, config)
        path = next(filter(layer_atom_in, rows), "").format(**dict.fromkeys(LAYER_ATOMS, 0))
        examples.append(f"{name} ({path})")
    return " or ".join(examples)


def _roots_text(roots: Collection[str]) -> str:
    return " or ".join(root.removesuffix(".") or "no root" for root in roots)


def _score_format(tree_format: TreeFormat, leaves: Leaves, family: Family, config: HFConfig) -> int:
    """Count the first-layer leaves of a format in the tree.

    A leaf of the right shape counts twice. The score is 0 if the tree has less than half of the leaves.
    """
    sizes = family.sizes(config)
    path_aliases = family.layouts.get(tree_format.layout, TreeLayout({})).path_aliases
    alias_of = {path: alias for alias, path in path_aliases.items()}
    rows = tree_format.rows(family, config)
    num_present = 0
    num_right_shape = 0
    for path, row in rows.items():
        first = path.format(**dict.fromkeys(LAYER_ATOMS, 0))
        plain = tree_format.root + first
        alias = tree_format.root + alias_of.get(first, first)
        names = (plain, plain + BOXED_SUFFIX, alias, alias + BOXED_SUFFIX)
        leaf = next((leaves[name] for name in names if name in leaves), None)
        num_present += leaf is not None
        num_right_shape += leaf is not None and leaf.shape == bind_row(row, sizes).leaf_shape
    # Trees of two formats can share a few names, e.g. the final norm, but not half of them. A tree
    # that lacks the other half is still found, and its missing leaves are reported.
    if 2 * num_present >= len(rows):
        return num_present + num_right_shape
    return 0


def _candidate_formats(family: Family, roots: Collection[str]) -> Iterator[TreeFormat]:
    # Of two formats with equal scores `_best_format` keeps the first one. A tree with as many layers
    # as the first dim has rows fits both axes by its shapes, so the usual axis 0 comes first.
    for root in roots:
        for axis in (0, 1, None):
            yield TreeFormat(NATIVE_LAYOUT, root, axis)
        for name, layout in family.layouts.items():
            for axis in layout.readable_axes:
                yield TreeFormat(name, root, axis)
            # A base model, saved without its head, has the paths below the prefix.
            layer_paths = filter(layer_atom_in, layout.parameters)
            if family.prefix and all(path.startswith(family.prefix) for path in layer_paths):
                yield TreeFormat(name, root, None, has_prefix=False)
