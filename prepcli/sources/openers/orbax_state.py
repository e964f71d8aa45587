"""The training state in an Orbax item of MaxText: the moments of AdamW below `opt_state`, and the counters."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from prepcli.errors import GET_AGAIN_HINT, DamagedError, PrepError
from prepcli.formats.manifest import NO_MANIFEST, Manifest
from prepcli.planning.layout_scales import LayoutScale, scaled_digests
from prepcli.planning.manifest_fields import TRAINING_STATE_KEY, ScaleRecord
from prepcli.planning.plan import DroppedTensor
from prepcli.planning.state_names import OPT_STATE_RULE, qualify
from prepcli.sources.adam_state import MOMENTS, AdamSettings, read_scalar
from prepcli.sources.foreign_state import WITHOUT_STATE_HINT, ForeignState, add_foreign_state
from prepcli.sources.foreign_trees import ForeignTree, match_foreign_tree
from prepcli.sources.source import Source, SourceTensor, recorded_digests
from prepcli.sources.tree_tensors import StoredLeaf, leaf_as_tensor
from trainer.models.json_types import HFConfig
from trainer.models.parameters import Family

# A leaf of the first moment, e.g. `opt_state.0.mu.params.decoder.decoder_norm.scale`.
FIRST_MOMENT_LEAF = re.compile(r"(opt_state(?:\.\d+)?)\.mu\.(params\.)?")
# The count of a state of optax.
COUNT_LEAF = re.compile(r"opt_state\.\d+\.count")
STEP_LEAF = "step"


@dataclass(frozen=True, slots=True)
class MomentTrees:
    """The trees of both moments, with the leaves of one state of optax.

    Attributes:
        trees: First and second moments, with the names of the parameters.
        state: Prefix of the state.
    """

    trees: tuple[ForeignTree, ...]
    state: str


def moment_scales(moments: MomentTrees | None) -> dict[str, LayoutScale]:
    """Return the scale of each leaf of a moment with one. Empty without moments."""
    scales: dict[str, LayoutScale] = {}
    if moments is None:
        return scales
    for order, tree in enumerate(moments.trees, 1):
        for leaf, parameter_scale in tree.scales.items():
            scale = parameter_scale.of_moment(order)
            if scale:
                scales[leaf] = scale
    return scales


def scaled_moments(moments: MomentTrees | None) -> dict[str, LayoutScale]:
    """Return the scale of each moment with one, by its name in a manifest. Empty without moments."""
    scales: dict[str, LayoutScale] = {}
    if moments is None:
        return scales
    for order, (slot, tree) in enumerate(zip(MOMENTS, moments.trees, strict=True), 1):
        for name, parameter_scale in tree.scaled_tensors.items():
            scale = parameter_scale.of_moment(order)
            if scale:
                scales[qualify(slot, tree.names.full_name(name))] = scale
    return scales


def match_moment_trees(
    leaves: Mapping[str, StoredLeaf],
    family: Family,
    config: HFConfig,
    display_name: str,
    manifest: Manifest,
) -> MomentTrees:
    """Match the leaves of the moments with the layout of the parameters.

    Args:
        leaves: Leaves of the item, by dotted name.
        family: Model family.
        config: Config of the model.
        display_name: Name of the checkpoint in messages.
        manifest: Manifest of an item written by prep, else NO_MANIFEST.

    Raises:
        PrepError: The item has no moments of AdamW, or they fit no layout.
    """
    found_leaf = next(filter(None, map(FIRST_MOMENT_LEAF.match, leaves)), None)
    if found_leaf is None:
        what = f"{display_name} has no moments of AdamW"
        raise PrepError(what, "no leaf is in opt_state.*.mu", WITHOUT_STATE_HINT)
    state = found_leaf[1]
    collection = found_leaf[2] or ""
    trees: list[ForeignTree] = []
    for name in ("mu", "nu"):
        root = f"{state}.{name}.{collection}"
        tree = match_foreign_tree(
            leaves, family, config, display_name, roots=(root,), manifest=manifest
        )
        trees.append(tree)
    return MomentTrees(tuple(trees), state)


def add_item_state(
    source: Source,
    moments: MomentTrees,
    leaves: Mapping[str, StoredLeaf],
    scale_records: Mapping[str, ScaleRecord],
) -> Source:
    """Return the source of an item with its training state.

    Args:
        source: The parameters of the item.
        moments: The moments.
        leaves: Leaves of the item, by dotted name.
        scale_records: Records of scaled tensors, if they are read as they are stored.

    Raises:
        PrepError: A counter is missing.
    """
    manifest = source.manifest or NO_MANIFEST
    entries = tuple(entry for entry in source.extra_entries if not _is_state(entry))
    source = replace(source, extra_entries=entries)
    num_updates = _read_counter(source, leaves, f"{moments.state}.count")
    if source.manifest is not None:
        _check_counts(source, leaves, num_updates)
    state = ForeignState(
        moments=tuple(_moment_tensors(moments, manifest, scale_records)),
        step=_read_counter(source, leaves, STEP_LEAF),
        num_updates=num_updates,
        settings=_recorded_settings(manifest),
        left_out=tuple(entry.name for entry in entries),
    )
    return add_foreign_state(source, state)


def _check_counts(source: Source, leaves: Mapping[str, StoredLeaf], num_updates: int) -> None:
    """Check the counts of an output of prep. That of the schedule is no part of the training state.

    Raises:
        DamagedError: A count differs from the number of updates.
    """
    for name in filter(COUNT_LEAF.fullmatch, leaves):
        count = _read_counter(source, leaves, name)
        if count != num_updates:
            why = f"{name} is {count}, and the moments have {num_updates} updates"
            raise DamagedError(f"{source.display_name} is damaged", why, GET_AGAIN_HINT)


def _is_state(entry: DroppedTensor) -> bool:
    """Return whether an entry is a part of the training state."""
    return entry.rule == OPT_STATE_RULE or entry.name == STEP_LEAF


def _moment_tensors(
    moments: MomentTrees, manifest: Manifest, scale_records: Mapping[str, ScaleRecord]
) -> Iterator[SourceTensor]:
    """Yield the moments with their recorded digests."""
    for slot, tree in zip(MOMENTS, moments.trees, strict=True):
        records = manifest.slots.get(slot, {})
        for tensor in tree.tensors:
            name = tree.names.full_name(tensor.name)
            digests = recorded_digests(records, name)
            if qualify(slot, name) in scale_records:
                digests = scaled_digests(scale_records[qualify(slot, name)], tensor.shape[0])
            yield replace(tensor, name=qualify(slot, tensor.name), digests=digests)


def _read_counter(source: Source, leaves: Mapping[str, StoredLeaf], name: str) -> int:
    """Return the value of a leaf."""
    if name not in leaves:
        what = f"{source.display_name} has no {name}"
        raise PrepError(what, "its training state is incomplete", WITHOUT_STATE_HINT)
    return int(read_scalar(source, leaf_as_tensor(name, leaves[name], {})))


def _recorded_settings(manifest: Manifest) -> AdamSettings | None:
    """Return the settings of an export of prep. MaxText stores none."""
    record = manifest.fields.get(TRAINING_STATE_KEY)
    if not record or not record["optimizer"]:
        return None
    return AdamSettings(**record["optimizer"])
