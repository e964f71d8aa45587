"""Trees of other libraries: the leaves of tensors, and the files of Flax, MaxText, Tunix and Levanter."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import replace

import numpy as np

from prepcli.algebra.axis_map import ParsedAxisMap, bind_row
from prepcli.algebra.grids import run_parts
from prepcli.core.errors import Option, PrepError, text
from prepcli.engine.blobs import MemoryBlob
from prepcli.formats.manifest import EXPORTED_STEP
from prepcli.formats.msgpack import INDEX_FILE, STEM, STREAM_FILE, SUFFIX
from prepcli.formats.msgpack_layout import (
    MsgpackLayout,
    MsgpackLeaf,
    lay_out_flax,
    lay_out_stream,
    sort_paths,
)
from prepcli.formats.safetensors import LayoutEntry, split_into_shards
from prepcli.models.parameters import layout_rows
from prepcli.models.rules import DEFAULT_RULES
from prepcli.planning.arrays import (
    Locations,
    MappedArray,
    identity_axis_map,
    parted_array,
    whole_array,
)
from prepcli.planning.item_storage import ItemStorage
from prepcli.planning.libraries import (
    HF_LAYOUT,
    STREAM_FORMAT,
    LayoutScale,
    OptaxState,
    bind_scale,
    find_library,
)
from prepcli.planning.plan import OutputFile, OutputLeaf, PlacedChunks, SmallFile
from prepcli.planning.tensors import MOMENTS, OPT_STATE, itemsize, qualify, split_name
from prepcli.sources.adam_state import AdamState, slot_scales
from prepcli.sources.source import Source, SourceTensor
from prepcli.sources.tensor_match import TensorUse
from prepcli.targets.orbax_item import LeafMember, Partitioning, place_leaves
from prepcli.targets.planner import Draft, Placed, with_state

MAX_NAMES = 4

# Path of the leaf, its axis map, stacked indices


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


def find_layout_leaves(draft: Draft, tree: str) -> dict[str, list[TensorUse]]:
    """Return the leaves of each tensor in the tree of another library, by the name of the tensor."""
    source = draft.source
    family = source.family
    layout = family.layouts[tree]
    sizes = family.sizes(source.config) | {"vocab": draft.vocabulary.stored_size}
    leaves: dict[str, list[TensorUse]] = {}
    for path, row in _layout_rows(source, tree, draft.tensors).items():
        axis_map = bind_row(row, sizes)
        # A layout of Flax has the paths of a model with a head, e.g. `transformer.h.0` of GPT-2.
        # A base model has the same leaf as `h.0`.
        path_template = path
        if layout.follows_prefix and not source.names.is_prefixed:
            path_template = path.removeprefix(family.prefix)
        for tensor, indices in axis_map.tensors():
            leaf_path = axis_map.leaf_path(path_template, indices)
            use = TensorUse(leaf_path, path, axis_map, tuple(indices.items()))
            leaves.setdefault(tensor, []).append(use)
    _check_layout_complete(source, tree, leaves, {tensor.name for tensor in draft.tensors})
    return leaves


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


# --- Files of Flax and EasyLM


def place_flax(draft: Draft, tree: str, container: str, shard_nbytes: int) -> Placed:
    """Place the tensors of a draft in the leaves of a Flax folder."""
    tensors = {tensor.name: tensor for tensor in draft.tensors}
    uses_by_tensor = find_layout_leaves(draft, tree)
    leaves: dict[tuple[str, ...], MsgpackLeaf] = {}
    for name, uses in uses_by_tensor.items():
        for use in uses:
            keys = tuple(use.path.split("."))
            leaves[keys] = MsgpackLeaf(keys, tensors[name].dtype, use.axis_map.leaf_shape)
    if container == STREAM_FORMAT:
        groups = [(STREAM_FILE, list(leaves))]
        lay_out = lay_out_stream
    else:
        groups = _split_into_files(leaves, shard_nbytes)
        lay_out = lay_out_flax
    layouts: list[MsgpackLayout] = []
    files: list[OutputFile] = []
    file_numbers: dict[tuple[str, ...], int] = {}
    for number, (name, paths) in enumerate(groups):
        file_layout = lay_out(leaves[path] for path in paths)
        layouts.append(file_layout)
        files.append(OutputFile(name, file_layout.size, constant_ranges=file_layout.fixed_bytes))
        file_numbers |= dict.fromkeys(file_layout.runs, number)
    locations: dict[str, Locations] = {}
    for name, uses in uses_by_tensor.items():
        parts = [_leaf_location(use, tensors[name], file_numbers, layouts) for use in uses]
        locations[name] = tuple(parts)
    index: tuple[SmallFile, ...] = ()
    if len(groups) > 1:
        # In the format of transformers
        weight_map: dict[str, str] = {}
        for name, paths in groups:
            weight_map |= dict.fromkeys(map("/".join, paths), name)
        total = sum(leaf.nbytes for leaf in leaves.values())
        content = {"metadata": {"total_size": total}, "weight_map": weight_map}
        index_text = json.dumps(content, indent=2, sort_keys=True)
        index = (SmallFile(INDEX_FILE, index_text.encode() + b"\n"),)
    return Placed(files=tuple(files), locations=locations, index=index)


def _split_into_files(
    leaves: Mapping[tuple[str, ...], MsgpackLeaf], limit_nbytes: int
) -> list[tuple[str, list[tuple[str, ...]]]]:
    entries: list[LayoutEntry] = []
    for path in sort_paths(leaves):
        leaf = leaves[path]
        # `split_into_shards` takes one text per tensor. The parts come from dotted names of the layout and
        # have no slash, so `split` below gives the same path.
        entries.append(("/".join(path), leaf.dtype, leaf.shape, leaf.nbytes))
    shards: list[tuple[str, list[tuple[str, ...]]]] = []
    for name, group in split_into_shards(entries, limit_nbytes, STEM, SUFFIX):
        shards.append((name, [tuple(path.split("/")) for path, *_ in group]))
    return shards


def _leaf_location(
    use: TensorUse,
    tensor: SourceTensor,
    file_numbers: Mapping[tuple[str, ...], int],
    layouts: Sequence[MsgpackLayout],
) -> MappedArray:
    """Return the location of a tensor in a leaf of a file."""
    keys = tuple(use.path.split("."))
    file = file_numbers[keys]
    runs = layouts[file].runs[keys]
    # Flax stores a large array as several runs, separated by msgpack headers.
    shape = use.axis_map.leaf_shape
    leaf = whole_array(use.path, tensor.dtype, shape, (file, runs[0][0]))
    if len(runs) > 1:
        parts = run_parts(shape, itemsize(tensor.dtype), runs, file)
        leaf = parted_array(use.path, tensor.dtype, shape, parts)
    return MappedArray(use.axis_map, use.stacked_indices, leaf)


# --- Items of MaxText, Tunix and Levanter


# No rule applies without a mesh.
UNSPLIT = Partitioning(mesh=None, rules=DEFAULT_RULES)


def place_trainer_item(draft: Draft, tree: str, storage: ItemStorage) -> Placed:
    """Place the parameters of a draft, and its training state if it has one, in the item of a trainer.

    The chunks have bounded sizes.
    """
    library = find_library(tree)
    place = library.item
    assert place is not None
    state = draft.state
    tensors = {tensor.name: tensor for tensor in draft.tensors}
    members: list[LeafMember] = []
    for name, uses in find_layout_leaves(draft, tree).items():
        for use in uses:
            leaf = f"{place.root}{use.path}{place.suffix}"
            members.append(
                LeafMember(tensors[name], leaf, use.axis_map, use.stacked_indices, use.path)
            )
    if state is None:
        placed = place_leaves(draft.source, members, UNSPLIT, storage=storage)
        return replace(placed, folder=place.folder(EXPORTED_STEP))
    optax = _optax_of(tree, state)
    # Moments and averages have the leaves of their parameters.
    slots = dict(zip(optax.slots, (state.first, state.second, state.averages), strict=True))
    state_members: list[LeafMember] = []
    for member in members:
        path = member.name.removeprefix(place.root)
        for prefix, slot in slots.items():
            if slot:
                tensor = slot[member.tensor.name]
                state_members.append(replace(member, tensor=tensor, name=f"{prefix}{path}"))
    by_name = {split_name(tensor.name)[1]: tensor for tensor in draft.state_tensors}
    others = {
        f"{leaf}{place.suffix}": state.counters[name] for leaf, name in optax.counters.items()
    }
    for leaf in optax.constants:
        others[f"{leaf}{place.suffix}"] = by_name[f"{leaf}{place.suffix}"]
    for leaf, tensor in others.items():
        state_members.append(LeafMember(tensor, leaf, identity_axis_map(leaf, tensor.shape)))
    if place.state_item:
        items = {place.item: members, place.state_item: state_members}
        placed = _join_items(
            {
                name: place_leaves(draft.source, item_members, UNSPLIT, storage=storage)
                for name, item_members in items.items()
            }
        )
    else:
        placed = place_leaves(draft.source, [*members, *state_members], UNSPLIT, storage=storage)
    if optax.has_lists:
        listed = tuple(replace(leaf, path=list_path(leaf.path)) for leaf in placed.leaves)
        placed = replace(placed, leaves=listed)
    folder = place.folder(state.step, has_state=True)
    return replace(placed, folder=folder, empty_nodes=optax.empty_nodes)


def with_item_state(draft: Draft, state: AdamState, tree: str) -> Draft:
    """Return a draft with a training state, and with the constant leaves of a trainer as tensors of its source.

    A tensor has one place in an output. The counts of a state are equal, and have a tensor each.
    """
    place = find_library(tree).item
    assert place is not None
    optax = _optax_of(tree, state)
    source = draft.source
    content = bytearray()
    constants: list[SourceTensor] = []
    for leaf, (dtype, number) in optax.constants.items():
        value = np.array(number, dtype)
        name = qualify("", f"{leaf}{place.suffix}")
        position = (len(source.byte_sources), len(content))
        array = whole_array(leaf, dtype, value.shape, position)
        constants.append(SourceTensor(name, dtype, value.shape, (array,)))
        content += value.tobytes()
    counters = [state.counters[name] for name in optax.counters.values()]
    draft = with_state(draft, state, [*counters, *constants])
    full_source = replace(
        source,
        state_tensors=(*source.state_tensors, *constants),
        blobs=(*source.byte_sources, MemoryBlob("constants", bytes(content))),
    )
    return replace(draft, source=full_source)


def _optax_of(tree: str, state: AdamState) -> OptaxState:
    """Return the leaves of a training state in the items of a trainer."""
    library = find_library(tree)
    assert library.state is not None
    assert library.state.optax is not None
    return library.state.optax.bind(state)


def _join_items(items: Mapping[str, Placed]) -> Placed:
    """Return several items as one, by the name of the item. No tensor is in two items."""
    leaves: list[OutputLeaf] = []
    files: list[OutputFile] = []
    locations: dict[str, Locations] = {}
    for name, item in items.items():
        first_file = len(files)
        for leaf in item.leaves:
            boxes: list[PlacedChunks] = []
            for box in leaf.placed_chunks:
                boxes.append(replace(box, chunks=box.chunks.moved(first_file)))
            leaves.append(replace(leaf, placed_chunks=tuple(boxes), item=name))
        for tensor, parts in item.locations.items():
            locations[tensor] = tuple(part.moved(first_file) for part in parts)
        files += [replace(file, path=f"{name}/{file.path}") for file in item.files]
    return Placed(files=tuple(files), locations=locations, leaves=tuple(leaves))


def list_path(path: tuple[str | int, ...]) -> tuple[str | int, ...]:
    """Return a path with the index of a list as a number.

    >>> list_path(("opt_state", "0", "count"))
    ('opt_state', 0, 'count')
    """
    if path[0] != OPT_STATE:
        return path
    return (path[0], int(path[1]), *path[2:])
