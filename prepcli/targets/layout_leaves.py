"""Leaves of tensors in the tree of another library."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from prepcli.algebra.axis_map import AxisMap, ParsedAxisMap, bind_row
from prepcli.core.errors import PrepError
from prepcli.models.parameters import layout_rows
from prepcli.planning.arrays import MappedArray, whole_array
from prepcli.planning.layout_scales import LayoutScale, bind_scale
from prepcli.sources.source import Source, SourceTensor

MAX_NAMES = 4

# Path of the leaf, its axis map, stacked indices
LayoutLeaf = tuple[str, AxisMap, tuple[tuple[str, int], ...]]


def find_layout_leaves(
    source: Source, layout: str, tensors: Mapping[str, SourceTensor], *, vocab_size: int
) -> dict[str, list[LayoutLeaf]]:
    """Return the leaves of each tensor in the tree of another library, by the name of the tensor.

    Args:
        source: The opened source.
        layout: Name of the layout.
        tensors: The tensors to write, by name.
        vocab_size: Vocabulary rows in the output.

    Raises:
        PrepError: A tensor has no leaf in the layout, or a leaf has no tensor.
    """
    family = source.family
    tree = family.layouts[layout]
    sizes = family.sizes(source.config) | {"vocab": vocab_size}
    leaves: dict[str, list[LayoutLeaf]] = {}
    for path, row in _layout_rows(source, layout, tensors.values()).items():
        axis_map = bind_row(row, sizes)
        # A layout of Flax has the paths of a model with a head, e.g. `transformer.h.0` of GPT-2.
        # A base model has the same leaf as `h.0`.
        path_template = path
        if tree.follows_prefix and not source.names.is_prefixed:
            path_template = path.removeprefix(family.prefix)
        for tensor, indices in axis_map.tensors():
            leaf_path = axis_map.leaf_path(path_template, indices)
            leaves.setdefault(tensor, []).append((leaf_path, axis_map, tuple(indices.items())))
    _check_layout_complete(source, layout, leaves, tensors)
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


def find_layout_scales(
    source: Source, layout: str, tensors: Collection[SourceTensor]
) -> dict[str, LayoutScale]:
    """Return the tensors with a scale in the tree of another library.

    Args:
        source: The opened source.
        layout: Name of the layout.
        tensors: The tensors to write.

    Returns:
        Name of the tensor -> its scale.
    """
    sizes = source.family.sizes(source.config)
    scales: dict[str, LayoutScale] = {}
    for row in _layout_rows(source, layout, tensors).values():
        if row.scale:
            names = (name for name, _ in bind_row(row, sizes).tensors())
            scales |= dict.fromkeys(names, bind_scale(row.scale, sizes))
    return scales


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
    tensors: Mapping[str, SourceTensor],
) -> None:
    """Raise PrepError unless tensors and leaves of the layout match one to one."""
    problems = {
        "the layout has no place for": tensors.keys() - leaves.keys(),
        "the layout needs": leaves.keys() - tensors.keys(),
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
