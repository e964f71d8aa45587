"""Trees of other libraries: the layout of a stored tree, found by the names and shapes of its leaves."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from prepcli.algebra.axis_map import LAYER_ATOMS, ParsedAxisMap, bind_row
from prepcli.core.errors import GET_AGAIN_HINT, Option, PrepError, text
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
from prepcli.planning.arrays import Array
from prepcli.planning.layout_scales import LayoutScale, bind_scale
from prepcli.planning.libraries import LIBRARIES
from prepcli.planning.manifest_fields import Manifest
from prepcli.planning.plan import DroppedTensor
from prepcli.planning.state_names import OPT_STATE, OPT_STATE_RULE, TRAINING_STATE_RULE
from prepcli.planning.tensor_match import TensorNames
from prepcli.planning.tensors import itemsize
from prepcli.sources.source import SourceTensor
from prepcli.sources.tree_tensors import (
    LeafTensor,
    Leaves,
    bound_leaf_tensors,
    check_leaf_shape,
    iter_tensors,
    leaf_as_tensor,
    recorded_shapes,
)

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

        Args:
            family: Model family.
            config: The model's config.json.
            tensors: Shapes of the model's tensors, by bare name. They decide between a row and its alternate.
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

    Raises:
        PrepError: No layout fits, a leaf has the wrong shape, or a tensor occurs twice.
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
    outside = [
        (name, leaf) for name, leaf in leaves.items() if not name.startswith(tree_format.root)
    ]
    scales = _scales_by_path(tree_format, family, config)
    return ForeignTree(
        tree_format,
        names,
        tensors,
        (*_extra_entries(outside), *ignored),
        _scales_by_leaf(leaves, tree_format.root, scales),
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
            nbytes = math.prod(leaf.shape) * itemsize(leaf.dtype)
            ignored.append(DroppedTensor(name, nbytes, NON_PARAMETER_RULE))
        elif not tree_format.root and name.partition(".")[0] in layout.state_keys:
            state.append((name, leaf))
        else:
            kept[name] = leaf
    return kept, [*ignored, *_extra_entries(state)]


def _scales_by_path(
    tree_format: TreeFormat, family: Family, config: HFConfig
) -> dict[str, LayoutScale]:
    """Return the scale of each scaled leaf, by path below the tree's root."""
    sizes = family.sizes(config)
    scales: dict[str, LayoutScale] = {}
    for path, row in tree_format.rows(family, config).items():
        if row.scale:
            scale = bind_scale(row.scale, sizes)
            axis_map = bind_row(row, sizes)
            for _, indices in axis_map.tensors():
                scales[axis_map.leaf_path(path, indices)] = scale
    return scales


def _scales_by_leaf(
    leaves: Leaves, root: str, scales: Mapping[str, LayoutScale]
) -> dict[str, LayoutScale]:
    """Return the scale of each scaled leaf, by the leaf's whole name."""
    scales_by_leaf: dict[str, LayoutScale] = {}
    for name in leaves:
        path = name.removeprefix(root).removesuffix(BOXED_SUFFIX)
        if name.startswith(root) and path in scales:
            scales_by_leaf[name] = scales[path]
    return scales_by_leaf


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
        raise PrepError(
            f"{display_name} has too few layers",
            why,
            "are config.json and the weights of one model?",
        )
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
    """Return the best format for the leaves.

    Raises:
        PrepError: No format fits, or the layout is unknown.
    """
    all_formats = _candidate_formats(family, roots)
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
    names = dict.fromkeys(candidate.layout for candidate in candidates)
    examples = _example_leaves(family, config, names)
    hint = f"supported layouts: {examples}, below {_roots_text(roots)}"
    raise PrepError(f"{display_name} has no known layout", why, hint)


def _best_format(
    leaves: Leaves, family: Family, config: HFConfig, candidates: Iterable[TreeFormat]
) -> TreeFormat | None:
    """Return the candidate with the highest score, or None if none fits. The first one wins a tie."""
    best = None
    best_score = 0
    for tree_format in candidates:
        score = _score_format(tree_format, leaves, family, config)
        if score > best_score:
            best = tree_format
            best_score = score
    return best


def _example_leaves(family: Family, config: HFConfig, layouts: Iterable[str]) -> str:
    """Describe each layout by one of its leaves, as in `native (layers.attn.q.weight)`."""
    examples: list[str] = []
    for name in layouts:
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


def _candidate_formats(family: Family, roots: Collection[str]) -> list[TreeFormat]:
    """Return all formats of a family's trees."""
    # A tree with as many layers as the first dim has rows fits both axes by its shapes, so the usual axis 0 comes
    # first.
    candidates: list[TreeFormat] = []
    for root in roots:
        candidates += [TreeFormat(NATIVE_LAYOUT, root, axis) for axis in (0, 1, None)]
        for name, layout in family.layouts.items():
            candidates += [TreeFormat(name, root, axis) for axis in layout.readable_axes]
            # A base model, saved without its head, has the paths below the prefix.
            if family.prefix and layout.follows_prefix:
                candidates.append(TreeFormat(name, root, None, has_prefix=False))
    return candidates
