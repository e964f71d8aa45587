"""Numbers of parameters and bytes in the contents of a checkpoint."""

from __future__ import annotations

import math
import re

from prepcli.algebra.axis_map import ParsedAxisMap, bind_row
from prepcli.core.errors import PrepError
from prepcli.core.json_values import HFConfig
from prepcli.inspection.checkpoint_contents import CheckpointContents, name_path
from prepcli.models.parameters import Family, StoredShapes, parameter_rows
from prepcli.models.prediction import prediction_names
from prepcli.planning.arrays import Array, whole_array
from prepcli.planning.libraries import find_marked_library
from prepcli.planning.state_names import PARAMS
from prepcli.planning.tensor_match import TensorNames, detect_names
from prepcli.sources.foreign_trees import match_foreign_tree
from prepcli.sources.multimodal import MULTIMODAL_KINDS


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
        return _count_parameters(family, contents)
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
    rows = parameter_rows(family, config, tensors=shapes)
    if family.is_tied(config, shapes.keys()):
        rows.pop(family.tying.head_leaf, None)
    sizes = family.sizes(config)
    for row in rows.values():
        # The config is untrusted: a row ends the loop at its first tensor without a name in the files.
        for name, _ in bind_row(row, sizes).tensors():
            if name not in shapes:
                return TensorNames(family).full_name(name)
    return ""


def _has_file_names(contents: CheckpointContents) -> bool:
    """Return whether the tensors have the names of transformers."""
    if contents.kind == "dcp":
        return find_marked_library({entry.name for entry in contents.entries}) is None
    return contents.kind in MULTIMODAL_KINDS


def _file_shapes(family: Family, contents: CheckpointContents) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor with a name of transformers, by bare name. Without multi-token prediction."""
    shapes = {entry.name: entry.shape for entry in contents.entries}
    shapes |= {decoder.name: decoder.shape for decoder in contents.decoders}
    names = detect_names(family, contents.config, full_names=shapes.keys())
    bare_shapes = {names.bare_name(name): shape for name, shape in shapes.items()}
    prediction = prediction_names(family, contents.config, bare_shapes)
    return {name: shape for name, shape in bare_shapes.items() if name not in prediction}


def _count_parameters(family: Family, contents: CheckpointContents) -> int | None:
    if _has_file_names(contents):
        shapes = _file_shapes(family, contents)
        if _first_missing(family, contents.config, shapes):
            return None
    elif contents.kind in ("orbax", "flax", "easylm", "dcp"):
        shapes = _tree_tensor_shapes(family, contents)
    else:
        names = TensorNames(family)
        shapes = {names.bare_name(entry.name): entry.shape for entry in contents.entries}
        shapes |= {names.bare_name(one.name): one.shape for one in contents.decoders}
    # A tied pair counts once, as the embedding. A file that has only the head keeps it.
    if family.is_tied(contents.config, shapes) and family.tying.embedding_tensor in shapes:
        shapes.pop(family.tying.head_tensor, None)
    rows = parameter_rows(family, contents.config, tensors=shapes)
    pattern = re.compile("|".join(_name_pattern(row) for row in rows.values()))
    return sum(math.prod(shape) for name, shape in shapes.items() if pattern.fullmatch(name))


def _tree_tensor_shapes(family: Family, contents: CheckpointContents) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the family's tensors in another library's tree, by bare name."""
    leaves: dict[str, Array] = {}
    for entry in contents.entries:
        # Only names, dtypes and shapes are matched, not places.
        leaves[entry.name] = whole_array(entry.name, entry.dtype, entry.shape, (0, 0))
    tree = match_foreign_tree(leaves, family, contents.config, contents.display_name)
    return {tensor.name: tensor.shape for tensor in tree.tensors}


def _name_pattern(row: ParsedAxisMap) -> str:
    """Return a regular expression for the tensor names of an axis-map row, with any layer number."""
    return "".join(
        re.escape(part) if isinstance(part, str) else "[0-9]+" for part in row.name_parts
    )
