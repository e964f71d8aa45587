"""Tensors of a parameter tree (Orbax, Flax, EasyLM), and the part of a leaf with the values of each tensor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from prepcli.algebra.axis_map import AxisMap, ParsedAxisMap, Sizes, bind_row
from prepcli.core.errors import GET_AGAIN_HINT, DamagedError, PrepError
from prepcli.models.parameters import (
    parameter_rows,
)
from prepcli.planning.arrays import Array, Locations, identity_axis_map, whole_array
from prepcli.planning.manifest_fields import Manifest, TensorRecords
from prepcli.planning.quantization_leaves import (
    QUANTIZATION,
    is_quantization_leaf,
    quantization_leaves,
)
from prepcli.planning.state_names import (
    PARAMS,
    TOWERS,
    find_slots,
    qualify,
)
from prepcli.planning.state_rows import PathLeaf, find_state_leaves, state_axis_map
from prepcli.planning.tensor_match import TensorNames
from prepcli.planning.tensors import ITEM_BITS
from prepcli.sources.source import SourceTensor, recorded_digests

Leaves = Mapping[str, Array]  # by dotted name
# Leaf path, its row, tensor name, stacked indices.
LeafTensor = tuple[str, AxisMap, str, tuple[tuple[str, int], ...]]


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
            yield SourceTensor(name, dtype, shape, _no_bytes(name, dtype, shape), digests)


def _no_bytes(name: str, dtype: str, shape: tuple[int, ...]) -> Locations:
    """Return the location of a tensor without elements: no byte of it is read."""
    return (whole_array(name, dtype, shape, (0, 0)),)


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
            location = _no_bytes(name, dtype, shape)
            yield SourceTensor(qualify(QUANTIZATION, name), dtype, shape, location, digests)
    for name, leaf_name, axis_map, indices in quantization_leaves(types):
        dtype, shape = types[name]
        leaf = leaves.get(leaf_name)
        if leaf is None or (leaf.dtype, leaf.shape) != (dtype, axis_map.leaf_shape):
            what = f"{folder} lacks the leaf {leaf_name} of {dtype} {[*axis_map.leaf_shape]}"
            raise DamagedError(what, "its manifest and its tree differ", GET_AGAIN_HINT)
        region = leaf.part(axis_map, indices)
        digests = recorded_digests(records, name)
        yield SourceTensor(qualify(QUANTIZATION, name), dtype, shape, (region,), digests)


def verbatim_tensors(leaves: Leaves) -> tuple[SourceTensor, ...]:
    """Return each leaf of a tree as a tensor of its own name and shape."""
    tensors: list[SourceTensor] = []
    for name, leaf in leaves.items():
        tensors.append(replace(leaf_as_tensor(name, leaf, {}), name=name))
    return tuple(tensors)


def _state_leaf_tensors(
    state_leaf: PathLeaf, leaf: Array, row: AxisMap, records: Mapping[str, TensorRecords]
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
        region = leaf.part(axis_map, tuple(indices.items()))
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
        leaf_tensors: Pairs of leaf and tensor. A tensor in several leaves occurs several times.
        records: The manifest's records of tensors, by name.
        names: Naming scheme of the tensors in `records`.
    """
    tensors: dict[str, SourceTensor] = {}
    # One tensor may be stored in several leaves, e.g. the fused `c_attn` of GPT-2 in q, k and v. Each
    # of them adds a region.
    for path, row, name, stacked_indices in leaf_tensors:
        region = leaves[path].part(row, stacked_indices)
        if name in tensors:
            placement = (*tensors[name].placement, region)
        else:
            placement = (region,)
        digests = recorded_digests(records, names.full_name(name))
        tensors[name] = SourceTensor(name, leaves[path].dtype, row.source_shape, placement, digests)
    yield from tensors.values()


def leaf_as_tensor(name: str, leaf: Array, records: TensorRecords) -> SourceTensor:
    """Convert a leaf without parameter or slot to a training-state tensor of the same shape."""
    region = leaf.part(identity_axis_map(name, leaf.shape))
    return SourceTensor(
        qualify("", name), leaf.dtype, leaf.shape, (region,), recorded_digests(records, name)
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
    """Raise PrepError if a leaf has another shape than its row.

    Args:
        name: Name of the leaf.
        leaf: The stored leaf.
        row: Axis map of the leaf.
        config_source: Where the sizes of the row come from, for the message.
        display_name: Name of the checkpoint.
    """
    if leaf.shape != row.leaf_shape:
        why = f"its shape is {list(leaf.shape)}, its {config_source} implies {list(row.leaf_shape)}"
        raise PrepError(
            f"{display_name}: the leaf {name} has the wrong shape",
            why,
            "are config.json and the weights of one model?",
        )
