"""Leaves of a checkpoint with their logical dims, the input of the partition rules.

For a Hugging Face folder, these are the leaves of its init checkpoint.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from prepcli.algebra.axis_map import bind_row
from prepcli.core.errors import Command, Option, PrepError, text, usage_error
from prepcli.core.formatting import did_you_mean, join_names
from prepcli.core.json_values import HFConfig
from prepcli.formats.manifest import NO_MANIFEST
from prepcli.formats.registry import FORMATS
from prepcli.inspection.contents import CheckpointContents, name_path
from prepcli.models.manifest_family import manifest_family
from prepcli.models.parameters import Family, StoredShapes, parameter_rows
from prepcli.models.rules import with_default_preset
from prepcli.models.truncation import prediction_names
from prepcli.planning.arrays import Array, whole_array
from prepcli.planning.libraries import find_marked_library
from prepcli.planning.tensors import PARAMS, TOWERS, is_quantization_leaf
from prepcli.sources.foreign_trees import match_foreign_tree
from prepcli.sources.model_family import select_family
from prepcli.sources.references import SourceHints
from prepcli.sources.source import SourceTensor
from prepcli.sources.tensor_match import TensorNames, detect_names, family_tensors
from prepcli.targets.orbax_item import is_tower_leaf

MAX_LISTED = 3  # leaves in a message


@dataclass(frozen=True, slots=True)
class LogicalLeaf:
    """A leaf with the names of the axes in each dim. The first axis of a dim gives the dim its name.

    A projection to heads, [width, heads * head_dim], has the dims (("embed",), ("heads", "head_dim")).
    """

    name: str
    dims: tuple[tuple[str, ...], ...]
    shape: tuple[int, ...]
    dtype: str

    @property
    def path(self) -> str:
        """Dotted path in the tree of parameters."""
        return self.name.removeprefix(f"{PARAMS}.")


def logical_leaves(contents: CheckpointContents) -> dict[str, LogicalLeaf]:
    """Return the leaves of a checkpoint, by dotted name.

    Raises:
        PrepError: The family is unknown, an Orbax checkpoint has no manifest, or a tensor has the wrong shape.
    """
    if contents.kind == "orbax" and not contents.manifest:
        why = "it has no manifest that describes the dims of its leaves"
        hint = text("{} converts it", Command("save-init"))
        raise PrepError(f"{contents.display_name} was not written by prep", why, hint)
    return {leaf.name: leaf for leaf in _iter_logical_leaves(contents)}


def partition_rules(contents: CheckpointContents) -> Sequence[str]:
    """Return the recorded partition rules of a checkpoint. Without a family, the preset `auto` is added."""
    if contents.family is None or _is_kept(contents):
        return with_default_preset(contents.manifest.rules)
    return contents.manifest.rules


def _iter_logical_leaves(contents: CheckpointContents) -> Iterator[LogicalLeaf]:
    """Yield the leaf of each tensor or Orbax leaf of a model, and check the shapes."""
    is_item = contents.kind == "orbax"
    config = contents.config
    if is_item:
        family = manifest_family(contents.manifest | {"config": config})
        layout = contents.manifest
    else:
        if contents.text_part is not None and not _is_kept(contents):
            family = contents.text_part.family
        else:
            types = {entry.name: (entry.dtype, entry.shape) for entry in contents.entries}
            hints = SourceHints(verbatim=True if _is_kept(contents) else None)
            family = select_family(contents.config, hints, types, contents.manifest)
        layout = NO_MANIFEST
    names = detect_names(family, config, full_names=[entry.name for entry in contents.entries])
    # An item has leaves, and a Hugging Face file has tensors: several of them may form one leaf.
    entries: dict[str, SourceTensor] = {}
    for entry in contents.entries:
        name = entry.name
        if not is_item:
            name = names.bare_name(name)
        entries[name] = entry
    sizes = family.sizes(config)
    is_tied = layout.tied if is_item else family.is_tied(config, entries)
    shapes = {name: entry.shape for name, entry in entries.items()}
    rows = parameter_rows(family, config, layout.scan, layout.scan_axis, shapes)
    for path, row in rows.items():
        if is_tied and path == family.tying.head_leaf:
            continue
        axis_map = bind_row(row, sizes)
        dims: list[tuple[str, ...]] = []
        for dim in axis_map.leaf_dims:
            dims.append(tuple(axis.atom for axis in dim))
        for tensor_name, indices in axis_map.tensors():
            # All layers of a stacked leaf give the same name, and the caller's dict keeps one of them.
            # Each tensor's shape is checked all the same.
            leaf_name = f"{PARAMS}.{path.format(**indices)}"
            if is_item:
                entry = entries.get(leaf_name)
                shape = axis_map.leaf_shape
            else:
                entry = entries.get(tensor_name)
                shape = axis_map.source_shape
            if entry is not None:
                if entry.shape != shape:
                    why = f"its shape is {list(entry.shape)}, its config implies {list(shape)}"
                    raise PrepError(
                        f"{contents.display_name}: {entry.name} has the wrong shape",
                        why,
                        "are config.json and the weights of one model?",
                    )
                yield LogicalLeaf(leaf_name, tuple(dims), axis_map.leaf_shape, entry.dtype)
    yield from _other_leaves(contents)


def _other_leaves(contents: CheckpointContents) -> Iterator[LogicalLeaf]:
    """Yield the leaves of towers, and in an item those of the scales of decoded weights."""
    for entry in contents.entries:
        name = entry.name
        if contents.kind == "orbax":
            is_other = is_tower_leaf(name) or is_quantization_leaf(name)
        else:
            part = contents.text_part
            name = name.removeprefix(contents.wrapper_prefix)
            is_other = part is not None and not _is_kept(contents) and name not in part.names
            name = f"{TOWERS}.{name}"
        if is_other and entry.nbytes:
            dims = tuple((f"d{axis}",) for axis in range(len(entry.shape)))
            yield LogicalLeaf(name, dims, entry.shape, entry.dtype)


def _is_kept(contents: CheckpointContents) -> bool:
    """Return whether codes and scales are kept under the names in their files, in the verbatim family."""
    return FORMATS[contents.kind].is_hf_folder and bool(contents.decoders)


def find_leaf(
    leaves: Mapping[str, LogicalLeaf], pattern: str, display_name: str, *, names_command: Command
) -> LogicalLeaf:
    """Find a leaf by name, by consecutive parts of its name, or by wildcard pattern.

    Raises:
        UsageError: No leaf or several leaves match.
    """
    matches = [name for name in leaves if name in (pattern, f"{PARAMS}.{pattern}")]
    # Dots at both ends keep parts whole: `attn` matches `layers.attn.q`, and not `layers.cross_attn.q`.
    matches = matches or [
        name for name in leaves if f".{pattern}." in f".{name}." or fnmatchcase(name, pattern)
    ]
    if len(matches) > 1:
        what = f"`{pattern}` matches {len(matches)} leaves of {display_name}"
        hint = text("one of them: {}", Option("shards", matches[0]))
        raise usage_error(what, join_names(matches, max_names=MAX_LISTED), hint)
    if not matches:
        hint = did_you_mean(pattern, [name.removeprefix(f"{PARAMS}.") for name in leaves])
        hint = hint or text("{} shows the names", names_command)
        why = f"it has {join_names(leaves, len(leaves), max_names=MAX_LISTED)}"
        raise usage_error(f"{display_name} has no leaf `{pattern}`", why, hint)
    return leaves[matches[0]]


def nbytes_below(contents: CheckpointContents, root: str) -> int:
    """Return the bytes of the entries below a root key, such as `opt_state`."""
    return sum(entry.nbytes for entry in contents.entries if name_path(entry)[0] == root)


def count_parameters(contents: CheckpointContents) -> int | None:
    """Count the values of the model's parameters, without buffers, tied duplicates and optimizer state.

    Returns:
        The number of values, or None if the family is unknown, the tensors are not those of the family, or the config
        is invalid.
    """
    family = contents.family
    if family is None:
        return None
    if contents.kind == "orbax":
        params = [entry for entry in contents.entries if name_path(entry)[0] == PARAMS]
        # The items of Tunix and Levanter have other root keys.
        if params:
            return sum(math.prod(entry.shape) for entry in params)
    try:
        if _has_file_names(contents):
            shapes = _file_shapes(family, contents)
            if _first_missing(family, contents.config, shapes):
                return None
        elif FORMATS[contents.kind].has_layouts:
            leaves: dict[str, Array] = {}
            for entry in contents.entries:
                # Only names, dtypes and shapes are matched, not places.
                leaves[entry.name] = whole_array(entry.name, entry.dtype, entry.shape, (0, 0))
            tree = match_foreign_tree(leaves, family, contents.config, contents.display_name)
            shapes = {tensor.name: tensor.shape for tensor in tree.tensors}
        else:
            names = TensorNames(family)
            shapes = {names.bare_name(entry.name): entry.shape for entry in contents.entries}
            shapes |= {names.bare_name(one.name): one.shape for one in contents.decoders}
        # A tied pair counts once, as the embedding. A file that has only the head keeps it.
        if family.is_tied(contents.config, shapes) and family.tying.embedding_tensor in shapes:
            shapes.pop(family.tying.head_tensor, None)
        rows = parameter_rows(family, contents.config, tensors=shapes)
        patterns: list[str] = []
        for row in rows.values():
            # Any number of a layer.
            parts = [re.escape(p) if isinstance(p, str) else "[0-9]+" for p in row.name_parts]
            patterns.append("".join(parts))
        pattern = re.compile("|".join(patterns))
        return sum(math.prod(shape) for name, shape in shapes.items() if pattern.fullmatch(name))
    except PrepError:
        return None


def missing_parameter(contents: CheckpointContents) -> str:
    """Return the name of a tensor of the config's family that the files do not have, or "" if there is none.

    The `model_type` of a config may be that of another model: Chronos-2 states the type of T5, and has other tensors.
    """
    family = contents.family
    if family is None or not _has_file_names(contents):
        return ""
    try:
        shapes = _file_shapes(family, contents)
        return _first_missing(family, contents.config, shapes)
    except PrepError:
        return ""


def _first_missing(family: Family, config: HFConfig, shapes: StoredShapes) -> str:
    """Return the first tensor of a family that a file with tensors of these shapes does not have, or ""."""
    # The config is untrusted: the loop ends at the first tensor without a name in the files.
    for name, _ in family_tensors(family, config, shapes):
        if name not in shapes:
            return TensorNames(family).full_name(name)
    return ""


def _has_file_names(contents: CheckpointContents) -> bool:
    row = FORMATS[contents.kind]
    if row.has_layouts and find_marked_library({entry.name for entry in contents.entries}):
        return False
    return row.has_hf_names


def _file_shapes(family: Family, contents: CheckpointContents) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor with a name of transformers, by bare name. Without multi-token prediction."""
    shapes = {entry.name: entry.shape for entry in contents.entries}
    shapes |= {decoder.name: decoder.shape for decoder in contents.decoders}
    names = detect_names(family, contents.config, full_names=shapes.keys())
    bare_shapes = {names.bare_name(name): shape for name, shape in shapes.items()}
    prediction = prediction_names(family, contents.config, bare_shapes)
    return {name: shape for name, shape in bare_shapes.items() if name not in prediction}
