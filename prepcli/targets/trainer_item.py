"""Layout of an item for another trainer (MaxText, Tunix, Levanter): the parameters, and a training state of AdamW.

The names of leaves are those of the trainer's entry in `planning.libraries`, and of its layout in `models`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from prepcli.engine.blobs import MemoryBlob
from prepcli.formats.manifest import EXPORTED_STEP
from prepcli.models.rules import DEFAULT_RULES
from prepcli.planning.arrays import identity_axis_map, whole_array
from prepcli.planning.item_storage import ItemStorage
from prepcli.planning.libraries import ItemPlace, OptaxState, find_library
from prepcli.planning.plan import Locations, OutputFile, OutputLeaf, PlacedChunks
from prepcli.planning.tensors import OPT_STATE, qualify, split_name
from prepcli.sources.adam_state import AdamState
from prepcli.sources.source import SourceTensor
from prepcli.targets.layout_leaves import find_layout_leaves
from prepcli.targets.orbax_item import LeafUse, Partitioning, place_leaves
from prepcli.targets.planner import Draft, Placed, with_state

# No rule applies without a mesh.
UNSPLIT = Partitioning(mesh=None, rules=DEFAULT_RULES)


def place_trainer_item(draft: Draft, tree: str, storage: ItemStorage) -> Placed:
    """Place the parameters of a draft, and its training state if it has one, in the item of a trainer.

    The chunks have bounded sizes.

    Args:
        draft: The draft. Its state has the constants of the trainer. See `with_item_state`.
        tree: Name of the tree.
        storage: Storage of the chunks.

    Raises:
        PrepError: A tensor has no leaf in the tree, or a leaf has no tensor.
    """
    library = find_library(tree)
    place = library.item
    assert place is not None
    state = draft.state
    uses = list(_parameter_uses(draft, tree, place))
    if state is None:
        placed = place_leaves(draft.source, uses, UNSPLIT, storage=storage)
        return replace(placed, folder=place.folder(EXPORTED_STEP))
    optax = _optax_of(tree, state)
    state_uses = list(_slot_uses(uses, state, optax, place))
    by_name = {split_name(tensor.name)[1]: tensor for tensor in draft.state_tensors}
    others = {
        f"{leaf}{place.suffix}": state.counters[name] for leaf, name in optax.counters.items()
    }
    for leaf in optax.constants:
        others[f"{leaf}{place.suffix}"] = by_name[f"{leaf}{place.suffix}"]
    for leaf, tensor in others.items():
        state_uses.append(LeafUse(tensor, leaf, identity_axis_map(leaf, tensor.shape)))
    if place.state_item:
        items = {place.item: uses, place.state_item: state_uses}
        placed = _join_items(
            {
                name: place_leaves(draft.source, item_uses, UNSPLIT, storage=storage)
                for name, item_uses in items.items()
            }
        )
    else:
        placed = place_leaves(draft.source, [*uses, *state_uses], UNSPLIT, storage=storage)
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


def _parameter_uses(draft: Draft, tree: str, place: ItemPlace) -> Iterator[LeafUse]:
    """Yield each tensor with its leaf."""
    by_name = {tensor.name: tensor for tensor in draft.tensors}
    for name, leaves in find_layout_leaves(draft, tree).items():
        for path, axis_map, indices in leaves:
            leaf = f"{place.root}{path}{place.suffix}"
            yield LeafUse(by_name[name], leaf, axis_map, indices, path)


def _slot_uses(
    uses: Sequence[LeafUse], state: AdamState, optax: OptaxState, place: ItemPlace
) -> Iterator[LeafUse]:
    """Yield the moments and averages with their leaves, given those of the parameters."""
    slots = dict(zip(optax.slots, (state.first, state.second, state.averages), strict=True))
    for use in uses:
        path = use.name.removeprefix(place.root)
        for prefix, tensors in slots.items():
            if tensors:
                yield replace(use, tensor=tensors[use.tensor.name], name=f"{prefix}{path}")


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
