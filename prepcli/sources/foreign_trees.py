"""Parameter trees (Orbax, Flax, EasyLM): the tensors in their leaves, and the layout of a tree of another library.

The manifest of a tree that prep wrote states its layout. Otherwise it is found by the names and shapes of the leaves.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from types import MappingProxyType

from prepcli.algebra.axis_map import LAYER_ATOMS, AxisMap, ParsedAxisMap, Sizes, bind_row
from prepcli.core.errors import GET_AGAIN_HINT, DamagedError, Option, PrepError, text
from prepcli.core.formatting import did_you_mean
from prepcli.formats.manifest import NO_MANIFEST
from prepcli.models.parameters import (
    Family,
    HFConfig,
    StoredShapes,
    TreeLayout,
    layer_atom_in,
    layout_rows,
    parameter_rows,
)
from prepcli.planning.arrays import Array, identity_axis_map, whole_array
from prepcli.planning.libraries import LIBRARIES, LayoutScale, bind_scale
from prepcli.planning.manifest_fields import Manifest, TensorRecords
from prepcli.planning.plan import DroppedTensor
from prepcli.planning.tensors import (
    ITEM_BITS,
    OPT_STATE,
    OPT_STATE_RULE,
    PARAMS,
    QUANTIZATION,
    TOWERS,
    TRAINING_STATE_RULE,
    find_slots,
    is_quantization_leaf,
    qualify,
)
from prepcli.sources.source import SourceTensor, recorded_digests
from prepcli.sources.state_rows import find_state_leaves, quantization_leaves, state_axis_map
from prepcli.sources.tensor_match import TensorNames

Leaves = Mapping[str, Array]  # by dotted name
# Leaf path, its row, tensor name, stacked indices.
LeafTensor = tuple[str, AxisMap, str, tuple[tuple[str, int], ...]]
# Prefix of the parameters in a tree of parameters, in Flax variables, and in the items of trainers.
ROOTS = (
    "",
    "params.",
    *(library.item.root for library in LIBRARIES if library.item and library.item.root),
)
# The tree that prep writes, without its manifest.
NATIVE_LAYOUT = "native"
# End of the path of a leaf that Flax boxed with its logical axis names, e.g. `kernel.value`.
BOXED_SUFFIX = ".value"
# Layers of a stacked tree. Limits the memory that an invalid config can claim.
MAX_LAYERS = 1 << 12
MAX_LISTED = 4
# Rule that drops leaves below the root that are not parameters.
NON_PARAMETER_RULE = "not a parameter"
ONE_MODEL_HINT = "are config.json and the weights of one model?"


def recorded_shapes(names: TensorNames, manifest: Manifest) -> dict[str, Sequence[int]]:
    """Return the shape of each tensor in a manifest, by bare name. It is empty if the manifest has none."""
    shapes: dict[str, Sequence[int]] = {}
    for name, record in manifest.tensors.items():
        shape = record.get("shape")
        shapes[names.bare_name(name)] = shape if isinstance(shape, list) else ()
    return shapes


def tensors_from_manifest(
    leaves: Leaves, names: TensorNames, manifest: Manifest, folder: object
) -> tuple[tuple[SourceTensor, ...], tuple[SourceTensor, ...]]:
    """List the tensors of a tree written by prep.

    Returns:
        The parameters, and the other tensors of a training state.
    """
    family = names.family
    config = manifest.config
    # The recorded tensors select among alternative rows.
    shapes = recorded_shapes(names, manifest)
    rows = parameter_rows(family, config, manifest.scan, manifest.scan_axis, shapes)
    # A tied head has no leaf: the embedding stores it.
    if manifest.tied:
        rows.pop(family.tying.head_leaf, None)
    leaf_tensors = tuple(bound_leaf_tensors(rows, family.sizes(config)))
    for path, row, _, _ in leaf_tensors:
        if f"{PARAMS}.{path}" not in leaves:
            what = f"{folder} lacks the leaf {PARAMS}.{path}"
            raise DamagedError(what, "its manifest and its tree differ", GET_AGAIN_HINT)
        check_leaf_shape(
            f"{PARAMS}.{path}", leaves[f"{PARAMS}.{path}"], row, "manifest's config", folder
        )
    leaf_shapes = {name: leaf.shape for name, leaf in leaves.items()}
    rows_by_path = {path: row for path, row, _, _ in leaf_tensors}
    parameters = {path: row.leaf_shape for path, row in rows_by_path.items()}
    # A training state has copies of the parameter tree (`opt_state.mu`, `opt_state.nu`): a prefix
    # below which every parameter has a leaf of its shape is a slot, and its tensors have the axis
    # maps of the parameters.
    slots = find_slots(leaf_shapes, parameters)
    state_leaves = tuple(find_state_leaves(leaf_shapes, parameters, slots))
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
        # A slot that lacks some parameters, or has some with reduced axes: one tensor per layer.
        leaf = leaves[state_leaf.name]
        row = state_axis_map(state_leaf.path, rows_by_path[state_leaf.path], leaf.shape)
        for name, indices in row.tensors():
            place = (leaf.part(row, tuple(indices.items())),)
            digests = recorded_digests(manifest.slots.get(state_leaf.slot, {}), name)
            full_name = qualify(state_leaf.slot, name)
            state.append(SourceTensor(full_name, leaf.dtype, row.source_shape, place, digests))
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
    """Return the tensors in the towers (vision and audio parts) of a multimodal model."""
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
            yield _empty_tensor(name, dtype, shape, manifest.tensors)


def _empty_tensor(
    name: str, dtype: str, shape: tuple[int, ...], records: TensorRecords
) -> SourceTensor:
    """Return a tensor without elements: no byte of it is read."""
    place = (whole_array(name, dtype, shape, (0, 0)),)
    return SourceTensor(name, dtype, shape, place, recorded_digests(records, name))


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
            tensor = _empty_tensor(name, dtype, shape, records)
            yield replace(tensor, name=qualify(QUANTIZATION, name))
    for name, leaf_name, axis_map, indices in quantization_leaves(types):
        dtype, shape = types[name]
        leaf = leaves.get(leaf_name)
        if leaf is None or (leaf.dtype, leaf.shape) != (dtype, axis_map.leaf_shape):
            what = f"{folder} lacks the leaf {leaf_name} of {dtype} {[*axis_map.leaf_shape]}"
            raise DamagedError(what, "its manifest and its tree differ", GET_AGAIN_HINT)
        location = leaf.part(axis_map, indices)
        digests = recorded_digests(records, name)
        yield SourceTensor(qualify(QUANTIZATION, name), dtype, shape, (location,), digests)


def verbatim_tensors(leaves: Leaves) -> tuple[SourceTensor, ...]:
    """Return each leaf of a tree as a tensor of its own name and shape."""
    tensors: list[SourceTensor] = []
    for name, leaf in leaves.items():
        tensors.append(replace(leaf_as_tensor(name, leaf, {}), name=name))
    return tuple(tensors)


def iter_tensors(
    leaves: Leaves,
    leaf_tensors: Iterator[LeafTensor],
    records: TensorRecords,
    names: TensorNames,
) -> Iterator[SourceTensor]:
    """Yield each tensor once, with all of its locations in the leaves.

    A tensor in several leaves occurs several times in `leaf_tensors`. `names` is the naming scheme of the `records`.
    """
    tensors: dict[str, SourceTensor] = {}
    # One tensor may be stored in several leaves, e.g. the fused `c_attn` of GPT-2 in q, k and v. Each
    # of them adds a location.
    for path, row, name, stacked_indices in leaf_tensors:
        location = leaves[path].part(row, stacked_indices)
        if name in tensors:
            placement = (*tensors[name].placement, location)
        else:
            placement = (location,)
        digests = recorded_digests(records, names.full_name(name))
        tensors[name] = SourceTensor(name, leaves[path].dtype, row.source_shape, placement, digests)
    yield from tensors.values()


def leaf_as_tensor(name: str, leaf: Array, records: TensorRecords) -> SourceTensor:
    """Convert a leaf without parameter or slot to a training-state tensor of the same shape."""
    location = leaf.part(identity_axis_map(name, leaf.shape))
    return SourceTensor(
        qualify("", name), leaf.dtype, leaf.shape, (location,), recorded_digests(records, name)
    )


def bound_leaf_tensors(rows: Mapping[str, ParsedAxisMap], sizes: Sizes) -> Iterator[LeafTensor]:
    """Yield each leaf of axis-map rows with each of its tensors."""
    for path, row in rows.items():
        bound = bind_row(row, sizes)
        for name, indices in bound.tensors():
            yield bound.leaf_path(path, indices), bound, name, tuple(indices.items())


def check_leaf_shape(
    name: str, leaf: Array, row: AxisMap, config_source: str, display_name: object
) -> None:
    """Raise PrepError if a leaf has another shape than its row. The sizes of the row are from `config_source`."""
    if leaf.shape != row.leaf_shape:
        why = f"its shape is {list(leaf.shape)}, its {config_source} implies {list(row.leaf_shape)}"
        raise PrepError(f"{display_name}: the leaf {name} has the wrong shape", why, ONE_MODEL_HINT)


@dataclass(frozen=True, slots=True)
class TreeFormat:
    """Format of a tree of another library.

    Attributes:
        layout: Name of the family's layout, or NATIVE_LAYOUT.
        root: Prefix of the parameters' dotted names.
        layer_axis: Axis of the stacked layers. None if each layer has a leaf.
        has_prefix: Whether paths carry the family's base prefix.
    """

    layout: str
    root: str
    layer_axis: int | None = None
    has_prefix: bool = True

    def rows(
        self, family: Family, config: HFConfig, tensors: StoredShapes = MappingProxyType({})
    ) -> dict[str, ParsedAxisMap]:
        """Return the axis-map row of each parameter in this format, by path below `root`.

        The shapes of `tensors`, by bare name, decide between a row and its alternate.
        """
        if self.layout == NATIVE_LAYOUT:
            is_stacked = self.layer_axis is not None
            return parameter_rows(family, config, is_stacked, self.layer_axis or 0, tensors)
        rows = layout_rows(
            family.layouts[self.layout],
            config,
            self.layer_axis,
            sizes=family.sizes(config),
            tensors=tensors,
        )
        if self.has_prefix:
            return rows
        return {path.removeprefix(family.prefix): row for path, row in rows.items()}


@dataclass(frozen=True, slots=True)
class ForeignTree:
    """A tree of another library, matched with a layout.

    Attributes:
        format: The matching format.
        names: Naming scheme of the tensors.
        tensors: Tensors of the leaves below the root.
        extra_entries: Leaves outside of the root, grouped by their first key.
        scales: Leaf with a scale -> the scale.
        scaled_tensors: Tensor in these leaves -> its scale.
    """

    format: TreeFormat
    names: TensorNames
    tensors: tuple[SourceTensor, ...]
    extra_entries: tuple[DroppedTensor, ...]
    scales: Mapping[str, LayoutScale]
    scaled_tensors: Mapping[str, LayoutScale]


def match_foreign_tree(
    leaves: Leaves,
    family: Family,
    config: HFConfig,
    display_name: str,
    roots: Collection[str] = ROOTS,
    layout: str | None = None,
    *,
    manifest: Manifest = NO_MANIFEST,
) -> ForeignTree:
    """Match the leaves of a tree with the best layout.

    A leaf below the root without a row of the family becomes a tensor with the name of the leaf. Missing leaves
    are not an error here.

    Args:
        leaves: Leaves of the tree, by dotted name.
        family: Model family.
        config: The model's config.json.
        display_name: Name of the checkpoint in messages.
        roots: Possible prefixes of the parameters.
        layout: Name of the layout. None allows all layouts of the family, and prep's own.
        manifest: Manifest of a tree written by prep. Its names of tensors are used.
    """
    tree_format = _find_format(leaves, family, config, display_name, roots, layout)
    leaves, ignored = _split_non_parameters(leaves, tree_format, family)
    param_leaves = _leaves_below_root(leaves, tree_format, family, display_name)
    names = TensorNames(family, tree_format.has_prefix and manifest.prefixed)
    shapes = recorded_shapes(names, manifest)
    expected = _expected_leaf_tensors(
        tree_format, family, config, param_leaves, display_name, shapes
    )
    missing_leaves = {
        name: tree_format.root + path for path, _, name, _ in expected if path not in param_leaves
    }
    # A tensor of several leaves is missing if one of them is.
    leaf_tensors = [leaf_tensor for leaf_tensor in expected if leaf_tensor[2] not in missing_leaves]
    matched = tuple(iter_tensors(param_leaves, iter(leaf_tensors), {}, names))
    unknown = sorted(param_leaves.keys() - {path for path, _, _, _ in expected})
    unprefixed = frozenset(
        path for path in unknown if names.is_prefixed and not path.startswith(family.prefix)
    )
    names = replace(names, unprefixed_names=unprefixed, missing_leaves=missing_leaves)
    unmatched = tuple(
        replace(leaf_as_tensor(path, param_leaves[path], {}), name=names.bare_name(path))
        for path in unknown
    )
    tensors = (*matched, *unmatched)
    if len({tensor.name for tensor in tensors}) != len(tensors):
        why = f"one of {', '.join(unknown[:MAX_LISTED])} is also stored as another leaf"
        raise PrepError(f"{display_name} has a tensor twice", why, GET_AGAIN_HINT)
    outside = [pair for pair in leaves.items() if not pair[0].startswith(tree_format.root)]
    sizes = family.sizes(config)
    scales: dict[str, LayoutScale] = {}
    for path, row in tree_format.rows(family, config).items():
        if row.scale:
            scale = bind_scale(row.scale, sizes)
            axis_map = bind_row(row, sizes)
            for _, indices in axis_map.tensors():
                scales[axis_map.leaf_path(path, indices)] = scale
    leaf_scales: dict[str, LayoutScale] = {}
    for name in leaves:
        path = name.removeprefix(tree_format.root).removesuffix(BOXED_SUFFIX)
        if name.startswith(tree_format.root) and path in scales:
            leaf_scales[name] = scales[path]
    return ForeignTree(
        tree_format,
        names,
        tensors,
        (*_extra_entries(outside), *ignored),
        leaf_scales,
        {name: scales[path] for path, _, name, _ in leaf_tensors if path in scales},
    )


def _split_non_parameters(
    leaves: Leaves, tree_format: TreeFormat, family: Family
) -> tuple[Leaves, list[DroppedTensor]]:
    """Split leaves into possible parameters of the layout, and the records of its other leaves."""
    layout = family.layouts.get(tree_format.layout, TreeLayout({}))
    kept: dict[str, Array] = {}
    ignored: list[DroppedTensor] = []
    state: list[tuple[str, Array]] = []
    for name, leaf in leaves.items():
        if layout.non_parameters and name.endswith(layout.non_parameters):
            ignored.append(DroppedTensor(name, leaf.nbytes, NON_PARAMETER_RULE))
        elif not tree_format.root and name.partition(".")[0] in layout.state_keys:
            state.append((name, leaf))
        else:
            kept[name] = leaf
    return kept, [*ignored, *_extra_entries(state)]


def _expected_leaf_tensors(
    tree_format: TreeFormat,
    family: Family,
    config: HFConfig,
    leaves: Leaves,
    display_name: str,
    recorded: StoredShapes,
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
        raise PrepError(f"{display_name} has too few layers", why, ONE_MODEL_HINT)
    rows = tree_format.rows(family, config, recorded)
    leaf_tensors = list(bound_leaf_tensors(rows, sizes))
    for path, row, _, _ in leaf_tensors:
        if path in leaves:
            check_leaf_shape(path, leaves[path], row, "config", display_name)
    return leaf_tensors


def _extra_entries(leaves: Iterable[tuple[str, Array]]) -> Iterator[DroppedTensor]:
    """Sum the bytes of leaves outside of the parameters, by the first key of their paths."""
    nbytes_by_key: dict[str, int] = {}
    for name, leaf in leaves:
        key = name.partition(".")[0]
        nbytes_by_key[key] = nbytes_by_key.get(key, 0) + leaf.nbytes
    for key, nbytes in nbytes_by_key.items():
        rule = OPT_STATE_RULE if key == OPT_STATE else TRAINING_STATE_RULE
        yield DroppedTensor(key, nbytes, rule)


def _leaves_below_root(
    leaves: Leaves, tree_format: TreeFormat, family: Family, display_name: str
) -> dict[str, Array]:
    """Return the leaves below the root, by their paths there in the spelling of the layout's table."""
    root = tree_format.root
    layout = family.layouts.get(tree_format.layout, TreeLayout({}))
    below: dict[str, Array] = {}
    for name, leaf in leaves.items():
        if name.startswith(root):
            path = layout.resolve_alias(name.removeprefix(root).removesuffix(BOXED_SUFFIX))
            if path in below:
                why = f"two leaves are named {path}"
                raise PrepError(f"{display_name} has a leaf twice", why, GET_AGAIN_HINT)
            below[path] = leaf
    return below


def _find_format(
    leaves: Leaves,
    family: Family,
    config: HFConfig,
    display_name: str,
    roots: Collection[str],
    layout: str | None,
) -> TreeFormat:
    """Return the best format for the leaves."""
    # A tree with as many layers as the first dim has rows fits both axes by its shapes, so the usual axis 0 comes
    # first.
    all_formats: list[TreeFormat] = []
    for root in roots:
        all_formats += [TreeFormat(NATIVE_LAYOUT, root, axis) for axis in (0, 1, None)]
        for name, tree_layout in family.layouts.items():
            all_formats += [TreeFormat(name, root, axis) for axis in tree_layout.readable_axes]
            # A base model, saved without its head, has the paths below the prefix.
            if family.prefix and tree_layout.follows_prefix:
                all_formats.append(TreeFormat(name, root, None, has_prefix=False))
    candidates = all_formats
    if layout is not None:
        candidates = [candidate for candidate in all_formats if candidate.layout == layout]
        names = (NATIVE_LAYOUT, *family.layouts)
        if not candidates:
            what = text("{} is unknown for {}", Option("source_layout", layout), family.name)
            raise PrepError(
                what, f"its layouts are {', '.join(names)}", did_you_mean(layout, names)
            )
    best = _best_format(leaves, family, config, candidates)
    if best is not None:
        return best
    listed = ", ".join(list(leaves)[:MAX_LISTED]) or "no arrays"
    if len(leaves) > MAX_LISTED:
        listed += " …"
    why = f"found {listed}, which are not the leaves of a {family.name}"
    fitting = _best_format(leaves, family, config, all_formats)
    if layout is not None and fitting is not None:
        what = text("{} contradicts {}", Option("source_layout", layout), display_name)
        why = f"{why} in this layout"
        raise PrepError(what, why, text("{}", Option("source_layout", fitting.layout)))
    # E.g. `native (layers.attn.q.weight)`.
    examples: list[str] = []
    for name in dict.fromkeys(candidate.layout for candidate in candidates):
        rows = TreeFormat(name, "").rows(family, config)
        path = next(filter(layer_atom_in, rows), "").format(**dict.fromkeys(LAYER_ATOMS, 0))
        examples.append(f"{name} ({path})")
    below = " or ".join(root.removesuffix(".") or "no root" for root in roots)
    hint = f"supported layouts: {' or '.join(examples)}, below {below}"
    raise PrepError(f"{display_name} has no known layout", why, hint)


def _best_format(
    leaves: Leaves, family: Family, config: HFConfig, candidates: Iterable[TreeFormat]
) -> TreeFormat | None:
    """Return the candidate with the highest score, or None if none fits. The first one wins a tie."""
    scores = [(_score_format(each, leaves, family, config), each) for each in candidates]
    score, best = max(scores, key=itemgetter(0))
    return best if score else None


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
        axis_map = bind_row(row, sizes)
        _, indices = next(axis_map.tensors())
        plain = tree_format.root + axis_map.leaf_path(path, indices)
        alias = tree_format.root + axis_map.leaf_path(alias_of.get(path, path), indices)
        names = (plain, plain + BOXED_SUFFIX, alias, alias + BOXED_SUFFIX)
        leaf = next((leaves[name] for name in names if name in leaves), None)
        num_present += leaf is not None
        num_right_shape += leaf is not None and leaf.shape == axis_map.leaf_shape
    # Trees of two formats can share a few names, e.g. the final norm, but not half of them. A tree
    # that lacks the other half is still found, and its missing leaves are reported.
    if 2 * num_present >= len(rows):
        return num_present + num_right_shape
    return 0
