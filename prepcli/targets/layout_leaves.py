"""The tree of another library: the leaves of tensors, the scales of their values, and the config."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Set
from dataclasses import replace

from prepcli.algebra.axis_map import AxisMap, ParsedAxisMap, bind_row
from prepcli.core.errors import Option, PrepError, text
from prepcli.models.parameters import layout_rows
from prepcli.planning.arrays import MappedArray, whole_array
from prepcli.planning.libraries import HF_LAYOUT, LayoutScale, bind_scale
from prepcli.planning.tensors import MOMENTS, itemsize, qualify
from prepcli.sources.adam_state import slot_scales
from prepcli.sources.source import Source, SourceTensor
from prepcli.targets.planner import Draft

MAX_NAMES = 4

# Path of the leaf, its axis map, stacked indices
LayoutLeaf = tuple[str, AxisMap, tuple[tuple[str, int], ...]]


def in_tree(draft: Draft, tree: str) -> Draft:
    """Return a draft with the config and the scales of values of the tree of another library.

    Raises:
        PrepError: The library would compute another model, because it ignores some of the config.
    """
    source = draft.source
    layout = source.family.layouts[tree]
    is_tied = draft.match.is_tied
    config = dict(draft.config or {})
    if layout.allows_tied_head and source.family.is_tied(config) != is_tied:
        config["tie_word_embeddings"] = is_tied
    read = {name: value for name, value in config.items() if name not in layout.ignored_fields}
    arch_config = source.family.arch_config
    if arch_config(read) != arch_config(config):
        ignored = [f"{name} {config[name]}" for name in layout.ignored_fields if name in config]
        why = f"the config has {', '.join(ignored)}, which its classes ignore, so that they compute another model"
        hint = text("{} supports it", Option("layout", HF_LAYOUT))
        raise PrepError("the model is not supported in Flax", why, hint)
    scales = _find_scales(draft, tree)
    moments: dict[str, LayoutScale] = {}
    if draft.state is not None:
        for slot in MOMENTS:
            for name, scale in slot_scales(slot, scales).items():
                moments[qualify(slot, name)] = scale
    return replace(draft, config=config, scales=scales | moments)


def find_layout_leaves(draft: Draft, tree: str) -> dict[str, list[LayoutLeaf]]:
    """Return the leaves of each tensor in the tree of another library, by the name of the tensor.

    Raises:
        PrepError: A tensor has no leaf in the tree, or a leaf has no tensor.
    """
    source = draft.source
    family = source.family
    layout = family.layouts[tree]
    sizes = family.sizes(source.config) | {"vocab": draft.vocabulary.stored_size}
    leaves: dict[str, list[LayoutLeaf]] = {}
    for path, row in _layout_rows(source, tree, draft.tensors).items():
        axis_map = bind_row(row, sizes)
        # A layout of Flax has the paths of a model with a head, e.g. `transformer.h.0` of GPT-2.
        # A base model has the same leaf as `h.0`.
        path_template = path
        if layout.follows_prefix and not source.names.is_prefixed:
            path_template = path.removeprefix(family.prefix)
        for tensor, indices in axis_map.tensors():
            leaf_path = axis_map.leaf_path(path_template, indices)
            leaves.setdefault(tensor, []).append((leaf_path, axis_map, tuple(indices.items())))
    _check_layout_complete(source, tree, leaves, {tensor.name for tensor in draft.tensors})
    return leaves


def whole_leaf_location(leaf: LayoutLeaf, *, file: int, offset: int, dtype: str) -> MappedArray:
    """Return the location of a tensor in a leaf with contiguous elements.

    Args:
        leaf: The leaf of the tensor.
        file: Number of the file.
        offset: Offset of the first element of the leaf.
        dtype: Dtype of the leaf.
    """
    path, axis_map, stacked_indices = leaf
    array = whole_array(path, dtype, axis_map.leaf_shape, (file, offset))
    return MappedArray(axis_map, stacked_indices, array)


def _find_scales(draft: Draft, tree: str) -> dict[str, LayoutScale]:
    """Return the scale of each tensor with one in a tree, such as MaxText's queries."""
    source = draft.source
    sizes = source.family.sizes(source.config)
    scales: dict[str, LayoutScale] = {}
    for row in _layout_rows(source, tree, draft.tensors).values():
        if row.scale:
            names = (name for name, _ in bind_row(row, sizes).tensors())
            scales |= dict.fromkeys(names, bind_scale(row.scale, sizes))
    read_dtypes = {tensor.dtype for tensor in source.tensors if tensor.name in scales}
    written_dtypes = {tensor.dtype for tensor in draft.tensors if tensor.name in scales}
    significant = ""
    # The way back rounds all tensors to one dtype: a leaf may stack the queries of all layers.
    if len(read_dtypes) == len(written_dtypes) == 1:
        (read,) = read_dtypes
        (written,) = written_dtypes
        if itemsize(read) < itemsize(written):
            significant = read
    return {name: replace(scale, significant=significant) for name, scale in scales.items()}


def _layout_rows(
    source: Source, layout: str, tensors: Collection[SourceTensor]
) -> dict[str, ParsedAxisMap]:
    """Return the axis-map rows of the layout, without the row of a tied head."""
    family = source.family
    tree = family.layouts[layout]
    shapes = {tensor.name: tensor.shape for tensor in tensors}
    rows = layout_rows(
        tree,
        source.config,
        tree.stack_axis,
        sizes=family.sizes(source.config),
        tensors=shapes,
    )
    # Flax computes a tied head with the embedding, and transformers expects no leaf for it.
    head_tensor = family.tying.head_tensor
    if not family.is_tied(source.config) or head_tensor in shapes:
        return rows
    return {path: row for path, row in rows.items() if row.name_parts != (head_tensor,)}


def _check_layout_complete(
    source: Source,
    layout: str,
    leaves: Mapping[str, object],
    tensors: Set[str],
) -> None:
    """Raise PrepError unless tensors and leaves of the layout match one to one."""
    problems = {
        "the layout has no place for": tensors - leaves.keys(),
        "the layout needs": leaves.keys() - tensors,
    }
    for start, names in problems.items():
        if not names:
            continue
        listed = ", ".join(map(source.names.full_name, sorted(names)[:MAX_NAMES]))
        if len(names) > MAX_NAMES:
            listed += f" and {len(names) - MAX_NAMES} more"
        raise PrepError(
            f"{source.display_name} cannot be written in the layout {layout}",
            f"{start} {listed}",
            "use another layout, e.g. a Hugging Face folder",
        )
