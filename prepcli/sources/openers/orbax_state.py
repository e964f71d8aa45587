"""The training state in an item of MaxText or Levanter: the state of AdamW below `opt_state`, and the step."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from prepcli.core.errors import GET_AGAIN_HINT, DamagedError, PrepError
from prepcli.core.json_types import HFConfig
from prepcli.formats.manifest import NO_MANIFEST, Manifest
from prepcli.models.parameters import Family
from prepcli.planning.layout_scales import LayoutScale, scaled_digests
from prepcli.planning.manifest_fields import ScaleRecord
from prepcli.planning.plan import DroppedTensor
from prepcli.planning.state_names import OPT_STATE, OPT_STATE_RULE, qualify
from prepcli.sources.adam_state import (
    FIRST_MOMENT,
    SECOND_MOMENT,
    AdamSettings,
    read_scalar,
    read_small_tensor,
)
from prepcli.sources.averages import AVERAGE_KEY, AVERAGE_ROOT, AVERAGE_SLOT
from prepcli.sources.foreign_state import (
    MAX_COUNT,
    NO_SETTINGS,
    WITHOUT_STATE_HINT,
    ForeignState,
    add_foreign_state,
    check_count,
)
from prepcli.sources.foreign_trees import BOXED_SUFFIX, ForeignTree, match_foreign_tree
from prepcli.sources.source import Source, SourceTensor, recorded_digests
from prepcli.sources.tree_tensors import StoredLeaf, leaf_as_tensor

# A leaf of the first moment, e.g. `opt_state.0.mu.params.decoder.decoder_norm.scale` in MaxText,
# `opt_state.inner_state.1.mu.lm_head.weight` in Levanter, and `opt_state.0.mu.final_norm.w.value` in Tunix.
FIRST_MOMENT_LEAF = re.compile(
    r"(opt_state(?:\.(?:inner_state|inner_opt_state|\d+))*)\.mu\.(params\.)?"
)
# The count of a state of optax: of Adam, of the schedule, or of `optax.inject_hyperparams`.
COUNT_LEAF = re.compile(rf"opt_state(?:\.\w+)*\.count(?:{re.escape(BOXED_SUFFIX)})?")
# Settings in the state of `optax.inject_hyperparams`, e.g. the learning rate of the last step.
SETTINGS_PART = "opt_state.hyperparams"
STEP_LEAF = "step"
# The number of updates in `optax.MultiSteps`. It accumulates gradients, so that the step counts batches.
GRADIENT_STEP_LEAF = "opt_state.gradient_step"
# Levanter's average with a decay that depends on the step has a weight.
AVERAGE_WEIGHT_LEAF = f"{AVERAGE_KEY}.tot_weight"
# Orders of the moments. See `LayoutScale.of_moment`.
ORDERS = {FIRST_MOMENT: 1, SECOND_MOMENT: 2}


@dataclass(frozen=True, slots=True)
class MomentTrees:
    """The trees of both moments, with the leaves of one state of optax.

    Attributes:
        trees: First moments, second moments and averages by slot, with the names of the parameters.
        state: Prefix of the state.
    """

    trees: Mapping[str, ForeignTree]
    state: str


def moment_scales(moments: MomentTrees | None) -> dict[str, LayoutScale]:
    """Return the scale of each leaf of a moment with one. Empty without moments."""
    scales: dict[str, LayoutScale] = {}
    if moments is not None:
        for slot, tree in moments.trees.items():
            scales |= _slot_scales(slot, tree.scales)
    return scales


def scaled_moments(moments: MomentTrees | None) -> dict[str, LayoutScale]:
    """Return the scale of each moment with one, by its name in a manifest. Empty without moments."""
    scales: dict[str, LayoutScale] = {}
    if moments is not None:
        for slot, tree in moments.trees.items():
            for name, scale in _slot_scales(slot, tree.scaled_tensors).items():
                scales[qualify(slot, tree.names.full_name(name))] = scale
    return scales


def _slot_scales(slot: str, parameter_scales: Mapping[str, LayoutScale]) -> dict[str, LayoutScale]:
    """Return the scales of a slot, by the names of the parameters' scales."""
    scales: dict[str, LayoutScale] = {}
    for name, parameter_scale in parameter_scales.items():
        # An average has the scale of its parameter.
        scale = parameter_scale
        if slot != AVERAGE_SLOT:
            scale = parameter_scale.of_moment(ORDERS[slot])
        if scale:
            scales[name] = scale
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
    what = f"{display_name} has no moments of AdamW"
    found_leaf = next(filter(None, map(FIRST_MOMENT_LEAF.match, leaves)), None)
    if found_leaf is None:
        raise PrepError(what, "no leaf is in opt_state.*.mu", WITHOUT_STATE_HINT)
    state = found_leaf[1]
    collection = found_leaf[2] or ""
    roots = {
        FIRST_MOMENT: f"{state}.mu.{collection}",
        SECOND_MOMENT: f"{state}.nu.{collection}",
    }
    if _has_averages(leaves):
        roots[AVERAGE_SLOT] = AVERAGE_ROOT
    trees: dict[str, ForeignTree] = {}
    for slot, root in roots.items():
        # E.g. Lion has first moments only.
        if not any(name.startswith(root) for name in leaves):
            raise PrepError(what, f"no leaf is in {root.removesuffix('.')}", WITHOUT_STATE_HINT)
        trees[slot] = match_foreign_tree(
            leaves, family, config, display_name, roots=(root,), manifest=manifest
        )
    return MomentTrees(trees, state)


def _has_averages(leaves: Mapping[str, StoredLeaf]) -> bool:
    """Return whether an item has averages of the parameters with a constant decay, as in prep."""
    if AVERAGE_WEIGHT_LEAF in leaves:
        return False
    return any(name.startswith(AVERAGE_ROOT) for name in leaves)


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
        PrepError: A counter is missing or invalid.
    """
    manifest = source.manifest or NO_MANIFEST
    num_updates = _read_counter(source, leaves, f"{moments.state}.count")
    if source.manifest is not None:
        _check_written_leaves(source, leaves, num_updates)
    settings = _recorded_settings(manifest)
    left_out = [
        *_unread_parts(moments, leaves),
        *_other_moments(source, moments),
        *_other_counts(source, leaves, num_updates),
    ]
    others: list[DroppedTensor] = []
    for entry in source.extra_entries:
        if entry.rule == OPT_STATE_RULE or entry.name == STEP_LEAF:
            continue
        if entry.name == AVERAGE_KEY and AVERAGE_SLOT in moments.trees:
            continue
        others.append(entry)
        left_out.append(entry.name)
    if settings is None:
        left_out.append(NO_SETTINGS)
    state = ForeignState(
        moments=tuple(_moment_tensors(source, moments, scale_records)),
        step=_read_step(source, leaves),
        num_updates=num_updates,
        settings=settings,
        left_out=tuple(left_out),
    )
    return add_foreign_state(replace(source, extra_entries=tuple(others)), state)


def _check_written_leaves(
    source: Source, leaves: Mapping[str, StoredLeaf], num_updates: int
) -> None:
    """Check the constant leaves in an output of prep, e.g. the count of the schedule.

    Raises:
        DamagedError: A count differs from the number of updates, or a leaf from its digest.
    """
    for name in filter(COUNT_LEAF.fullmatch, leaves):
        count = _read_counter(source, leaves, name)
        if count != num_updates:
            why = f"{name} is {count}, and the moments have {num_updates} updates"
            raise DamagedError(f"{source.display_name} is damaged", why, GET_AGAIN_HINT)
    records = (source.manifest or NO_MANIFEST).others
    for name in records.keys() & leaves.keys():
        read_small_tensor(source, leaf_as_tensor(name, leaves[name], records))


def _other_counts(
    source: Source, leaves: Mapping[str, StoredLeaf], num_updates: int
) -> Iterator[str]:
    """Yield a description of each count with another value than the number of updates, e.g. after skipped steps.

    The schedule of prep is at the number of updates.
    """
    for name in filter(COUNT_LEAF.fullmatch, leaves):
        count = _read_counter(source, leaves, name)
        if count != num_updates:
            yield f"{name.removesuffix(BOXED_SUFFIX)} {count}"


def _unread_parts(moments: MomentTrees, leaves: Mapping[str, StoredLeaf]) -> Iterator[str]:
    """Yield the unread parts of the optimizer state and of the averages, except settings.

    A part is a subtree next to the path of Adam's state, e.g. `opt_state.inner_state.1.mog` or `opt_state.acc_grads`.
    """
    roots = tuple(tree.format.root for tree in moments.trees.values())
    parts: dict[str, None] = {}
    for name in leaves:
        if name.startswith(roots) or COUNT_LEAF.fullmatch(name):
            continue
        if name.startswith(f"{OPT_STATE}."):
            parts[_part(name.removesuffix(BOXED_SUFFIX), moments.state)] = None
        elif name.startswith(f"{AVERAGE_KEY}.") and AVERAGE_SLOT in moments.trees:
            parts[name] = None
    for part in parts:
        if part not in (SETTINGS_PART, GRADIENT_STEP_LEAF):
            yield part


def _other_moments(source: Source, moments: MomentTrees) -> Iterator[str]:
    """Yield the leaves of moments and averages without a parameter, e.g. of a value head."""
    parameters = {tensor.name for tensor in source.tensors}
    for tree in moments.trees.values():
        for tensor in tree.tensors:
            if tensor.name not in parameters:
                yield f"{tree.format.root}{tensor.name}"


def _part(name: str, state: str) -> str:
    """Return the keys shared by a leaf and Adam's state, and the next key of the leaf.

    >>> _part("opt_state.inner_state._skipstep_losses", "opt_state.inner_state.1")
    'opt_state.inner_state._skipstep_losses'
    """
    keys = name.split(".")
    num_shared = 0
    for key, state_key in zip(keys, state.split("."), strict=False):
        if key != state_key:
            break
        num_shared += 1
    return ".".join(keys[: num_shared + 1])


def _moment_tensors(
    source: Source, moments: MomentTrees, scale_records: Mapping[str, ScaleRecord]
) -> Iterator[SourceTensor]:
    """Yield the moments and averages of the parameters with their recorded digests."""
    manifest = source.manifest or NO_MANIFEST
    parameters = {tensor.name for tensor in source.tensors}
    for slot, tree in moments.trees.items():
        records = manifest.slots.get(slot, {})
        for tensor in tree.tensors:
            if tensor.name not in parameters:
                continue
            name = tree.names.full_name(tensor.name)
            digests = recorded_digests(records, name)
            if qualify(slot, name) in scale_records:
                digests = scaled_digests(scale_records[qualify(slot, name)], tensor.shape[0])
            yield replace(tensor, name=qualify(slot, tensor.name), digests=digests)


def _read_step(source: Source, leaves: Mapping[str, StoredLeaf]) -> int:
    """Return the number of steps."""
    record = (source.manifest or NO_MANIFEST).training_state
    if record is not None and STEP_LEAF + BOXED_SUFFIX in leaves:
        # Tunix counts updates, and an export may have skipped steps.
        return record["step"]
    for name in (GRADIENT_STEP_LEAF + BOXED_SUFFIX, GRADIENT_STEP_LEAF):
        if name in leaves:
            return _read_counter(source, leaves, name)
    return _read_counter(source, leaves, STEP_LEAF)


def _read_counter(source: Source, leaves: Mapping[str, StoredLeaf], name: str) -> int:
    """Return the value of a counter.

    Raises:
        PrepError: The leaf is missing.
        DamagedError: The value is not a count.
    """
    if name + BOXED_SUFFIX in leaves:
        name += BOXED_SUFFIX
    if name not in leaves:
        what = f"{source.display_name} has no {name}"
        raise PrepError(what, "its training state is incomplete", WITHOUT_STATE_HINT)
    value = read_scalar(source, leaf_as_tensor(name, leaves[name], {}))
    leaf = name.removesuffix(BOXED_SUFFIX)
    why = f"{leaf} is {value:g}, and must be an integer from 0 to {MAX_COUNT:,}"
    return check_count(source, value, why)


def _recorded_settings(manifest: Manifest) -> AdamSettings | None:
    """Return the settings of an export of prep. MaxText and Levanter store none."""
    record = manifest.training_state
    if not record or not record["optimizer"]:
        return None
    return AdamSettings(**record["optimizer"])
