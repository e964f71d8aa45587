"""Layout of an item for another trainer (MaxText, Tunix, Levanter): the parameters, and a training state of AdamW.

The names of leaves are those of the trainer's entry in `planning.libraries`, and of its layout in `models`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from prepcli.engine.blobs import MemoryBlob
from prepcli.models.rules import DEFAULT_RULES
from prepcli.planning.arrays import identity_axis_map, whole_array
from prepcli.planning.item_storage import ItemStorage
from prepcli.planning.libraries import ItemPlace, OptaxState, find_library
from prepcli.planning.state_names import OPT_STATE, qualify, split_name
from prepcli.sources.adam_state import AdamState
from prepcli.sources.source import Source, SourceTensor
from prepcli.targets.joined_items import join_items
from prepcli.targets.layout_leaves import find_layout_leaves
from prepcli.targets.orbax_item import LeafUse, OrbaxItemLayout, Partitioning, lay_out_uses

# No rule applies without a mesh.
UNSPLIT = Partitioning(mesh=None, rules=DEFAULT_RULES)


@dataclass(frozen=True, slots=True)
class ItemWithState:
    """The parameters and the training state in the item of a trainer.

    Attributes:
        layout: Leaves and files. Parameters and state may be in two items.
        others: Counters and constants, which belong to no parameter.
        source: The source with the constants of the trainer.
    """

    layout: OrbaxItemLayout
    others: tuple[SourceTensor, ...]
    source: Source


def lay_out_trainer_item(
    source: Source,
    tensors: Sequence[SourceTensor],
    *,
    layout: str,
    vocab_size: int,
    storage: ItemStorage,
) -> OrbaxItemLayout:
    """Lay out the tensors of a source as the leaves of a trainer's item, in chunks of bounded size.

    Args:
        source: The opened source.
        tensors: The tensors to write, with the dtypes of the output.
        layout: Name of the layout.
        vocab_size: Vocabulary rows in the output.
        storage: ItemStorage of the chunks.

    Raises:
        PrepError: A tensor has no leaf in the layout, or a leaf has no tensor.
    """
    uses = list(_parameter_uses(source, tensors, layout, vocab_size))
    return lay_out_uses(source, uses, UNSPLIT, storage=storage)


def lay_out_item_state(
    source: Source,
    parameters: Sequence[SourceTensor],
    state: AdamState,
    *,
    layout: str,
    vocab_size: int,
    storage: ItemStorage,
) -> ItemWithState:
    """Lay out parameters and training state. The other arguments are as for `lay_out_trainer_item`."""
    library = find_library(layout)
    place = library.item
    assert place is not None
    assert library.state is not None
    assert library.state.optax is not None
    optax = library.state.optax.bind(state)
    uses = list(_parameter_uses(source, parameters, layout, vocab_size))
    constants, blob = _constant_tensors(source, optax, place)
    others = {
        f"{leaf}{place.suffix}": state.counters[name] for leaf, name in optax.counters.items()
    }
    others |= {split_name(tensor.name)[1]: tensor for tensor in constants}
    state_uses = list(_slot_uses(uses, state, optax, place))
    for leaf, tensor in others.items():
        state_uses.append(LeafUse(tensor, leaf, identity_axis_map(leaf, tensor.shape)))
    items = {"": [*uses, *state_uses]}
    if place.state_item:
        items = {place.item: uses, place.state_item: state_uses}
    layouts: dict[str, OrbaxItemLayout] = {}
    for name, item_uses in items.items():
        layouts[name] = lay_out_uses(source, item_uses, UNSPLIT, storage=storage)
    item = join_items(layouts) if place.state_item else layouts[""]
    if optax.has_lists:
        listed = tuple(replace(leaf, path=list_path(leaf.path)) for leaf in item.leaves)
        item = replace(item, leaves=listed)
    full_source = replace(
        source,
        state_tensors=(*source.state_tensors, *constants),
        blobs=(*source.byte_sources, blob),
    )
    return ItemWithState(item, tuple(others.values()), full_source)


def _parameter_uses(
    source: Source, tensors: Sequence[SourceTensor], layout: str, vocab_size: int
) -> Iterator[LeafUse]:
    """Yield each tensor with its leaf."""
    by_name = {tensor.name: tensor for tensor in tensors}
    place = find_library(layout).item
    assert place is not None
    for name, leaves in find_layout_leaves(source, layout, by_name, vocab_size=vocab_size).items():
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


def _constant_tensors(
    source: Source, optax: OptaxState, place: ItemPlace
) -> tuple[tuple[SourceTensor, ...], MemoryBlob]:
    """Return the constant leaves as tensors, and their bytes, which follow the byte sources of the source.

    A tensor has one place in an output. The counts of a state are equal, and have a tensor each.
    """
    content = bytearray()
    tensors: list[SourceTensor] = []
    for leaf, (dtype, number) in optax.constants.items():
        value = np.array(number, dtype)
        name = qualify("", f"{leaf}{place.suffix}")
        position = (len(source.byte_sources), len(content))
        array = whole_array(leaf, dtype, value.shape, position)
        tensors.append(SourceTensor(name, dtype, value.shape, (array,)))
        content += value.tobytes()
    return tuple(tensors), MemoryBlob("constants", bytes(content))


def list_path(path: tuple[str | int, ...]) -> tuple[str | int, ...]:
    """Return a path with the index of a list as a number.

    >>> list_path(("opt_state", "0", "count"))
    ('opt_state', 0, 'count')
    """
    if path[0] != OPT_STATE:
        return path
    return (path[0], int(path[1]), *path[2:])
