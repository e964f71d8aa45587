"""The training state in an Orbax item of MaxText: the moments of AdamW below `opt_state`, and the counters."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from prepcli.errors import PrepError
from prepcli.formats.manifest import NO_MANIFEST, Manifest
from prepcli.planning.manifest_fields import TRAINING_STATE_KEY, ScaleRecord
from prepcli.planning.plan import DroppedTensor, RootScale
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
STEP_LEAF = "step"
# Powers of the parameters' scale. See `RootScale`.
POWERS = (-1, -2)


@dataclass(frozen=True, slots=True)
class MomentTrees:
    """The trees of both moments, with the leaves of one state of optax.

    Attributes:
        trees: First and second moments, with the names of the parameters.
        state: Prefix of the state.
    """

    trees: tuple[ForeignTree, ...]
    state: str


def moment_scales(moments: MomentTrees | None) -> dict[str, RootScale]:
    """Return the scale of each leaf of a moment with one. Empty without moments."""
    scales: dict[str, RootScale] = {}
    if moments is None:
        return scales
    for tree, power in zip(moments.trees, POWERS, strict=True):
        for leaf, number in tree.scales.items():
            scales[leaf] = RootScale(number, power=power)
    return scales


def moment_powers(moments: MomentTrees | None) -> dict[str, int]:
    """Return the power of the parameters' scale in each scaled moment, by its name in a manifest."""
    powers: dict[str, int] = {}
    if moments is None:
        return powers
    for slot, tree, power in zip(MOMENTS, moments.trees, POWERS, strict=True):
        for name in tree.scaled_tensors:
            powers[qualify(slot, tree.names.full_name(name))] = power
    return powers


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
    state = ForeignState(
        moments=tuple(_moment_tensors(moments, manifest, scale_records)),
        step=_read_counter(source, leaves, STEP_LEAF),
        num_updates=_read_counter(source, leaves, f"{moments.state}.count"),
        settings=_recorded_settings(manifest),
        left_out=tuple(entry.name for entry in entries),
    )
    return add_foreign_state(source, state)


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
                digests = ((0, tensor.shape[0], scale_records[qualify(slot, name)]["digest"]),)
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
