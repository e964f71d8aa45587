"""Read the training state in an item of a JAX trainer: the state of AdamW in optax below `opt_state`, and the step.

The trainer's own places, e.g. of averages, are those of its entry in `planning.libraries`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from prepcli.core.errors import GET_AGAIN_HINT, DamagedError, PrepError
from prepcli.core.json_values import HFConfig, quote_name
from prepcli.engine.digest import record_digest
from prepcli.formats.manifest import NO_MANIFEST
from prepcli.formats.orbax import (
    STATE_ITEMS,
    OrbaxItem,
    find_name_clash,
    item_metadata_file,
    read_item,
)
from prepcli.models.parameters import Family
from prepcli.planning.arrays import Array
from prepcli.planning.libraries import (
    LIBRARIES_BY_LAYOUT,
    NO_SETTINGS,
    AdamNumbers,
    LayoutScale,
    scaled_digests,
)
from prepcli.planning.manifest_fields import Manifest, ScaleRecord
from prepcli.planning.plan import DroppedTensor
from prepcli.planning.tensors import (
    FIRST_MOMENT,
    OPT_STATE,
    OPT_STATE_RULE,
    SECOND_MOMENT,
    qualify,
)
from prepcli.sources.adam_state import (
    MAX_COUNT,
    WITHOUT_STATE_HINT,
    add_training_state,
    check_count,
    read_scalars,
    read_small_tensors,
    recorded_settings,
    slot_scales,
)
from prepcli.sources.foreign_trees import (
    BOXED_SUFFIX,
    ForeignTree,
    leaf_as_tensor,
    match_foreign_tree,
)
from prepcli.sources.source import AVERAGE_SLOT, Source, SourceTensor, recorded_digests

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


@dataclass(frozen=True, slots=True)
class MomentTrees:
    """The trees of both moments and of the averages, with the leaves of one state of optax.

    Attributes:
        trees: First moments, second moments and averages by slot, with the names of the parameters.
        adam: Prefix of the state of Adam.
        averages: First key of the averages. Empty without averages.
    """

    trees: Mapping[str, ForeignTree]
    adam: str
    averages: str

    def leaf_scales(self) -> dict[str, LayoutScale]:
        """Return the scale of each leaf with one."""
        scales: dict[str, LayoutScale] = {}
        for slot, tree in self.trees.items():
            scales |= slot_scales(slot, tree.scales)
        return scales

    def tensor_scales(self) -> dict[str, LayoutScale]:
        """Return the scale of each moment with one, by its name in a manifest."""
        scales: dict[str, LayoutScale] = {}
        for slot, tree in self.trees.items():
            for name, scale in slot_scales(slot, tree.scaled_tensors).items():
                scales[qualify(slot, tree.names.full_name(name))] = scale
        return scales


def match_moment_trees(
    leaves: Mapping[str, Array],
    family: Family,
    config: HFConfig,
    display_name: str,
    *,
    manifest: Manifest,
    layout: str,
) -> MomentTrees:
    """Match the leaves of the moments with the layout of the parameters.

    Raises:
        PrepError: The item has no moments of AdamW, or they fit no layout.
    """
    what = f"{display_name} has no moments of AdamW"
    found_leaf = next(filter(None, map(FIRST_MOMENT_LEAF.match, leaves)), None)
    if found_leaf is None:
        raise PrepError(what, "no leaf is in opt_state.*.mu", WITHOUT_STATE_HINT)
    adam = found_leaf[1]
    collection = found_leaf[2] or ""
    roots = {
        FIRST_MOMENT: f"{adam}.mu.{collection}",
        SECOND_MOMENT: f"{adam}.nu.{collection}",
    }
    averages = ""
    for library in LIBRARIES_BY_LAYOUT.get(layout, ()):
        optax = library.state and library.state.optax
        if not optax or not optax.averages or optax.average_weight in leaves:
            continue
        if any(name.startswith(optax.averages) for name in leaves):
            averages = optax.averages
            break
    if averages:
        roots[AVERAGE_SLOT] = averages
    trees: dict[str, ForeignTree] = {}
    for slot, root in roots.items():
        # E.g. Lion has first moments only.
        if not any(name.startswith(root) for name in leaves):
            raise PrepError(what, f"no leaf is in {root.removesuffix('.')}", WITHOUT_STATE_HINT)
        trees[slot] = match_foreign_tree(
            leaves, family, config, display_name, roots=(root,), manifest=manifest
        )
    return MomentTrees(trees, adam, averages.partition(".")[0])


def add_item_state(
    source: Source,
    moments: MomentTrees,
    leaves: Mapping[str, Array],
    scale_records: Mapping[str, ScaleRecord],
) -> Source:
    """Return the source of an item with its training state."""
    num_updates = _read_counter(source, leaves, f"{moments.adam}.count")
    # E.g. after skipped steps. The schedule of prep is at the number of updates.
    other_counts: dict[str, int] = {}
    for leaf in filter(COUNT_LEAF.fullmatch, leaves):
        count = _read_counter(source, leaves, leaf)
        if count != num_updates:
            other_counts[leaf] = count
    if source.manifest is not None:
        what = f"{source.display_name} is damaged"
        for leaf, count in other_counts.items():
            why = f"{leaf} is {count}, and the moments have {num_updates} updates"
            raise DamagedError(what, why, GET_AGAIN_HINT)
        constants: list[SourceTensor] = []
        for name in source.manifest.others.keys() & leaves.keys():
            constants.append(leaf_as_tensor(name, leaves[name], source.manifest.others))
        read_small_tensors(source, constants)
    # E.g. the moments of a value head.
    parameters = {tensor.name for tensor in source.tensors}
    other_moments: list[str] = []
    state_tensors: list[SourceTensor] = []
    for slot, tree in moments.trees.items():
        records = (source.manifest or NO_MANIFEST).slots.get(slot, {})
        for tensor in tree.tensors:
            if tensor.name not in parameters:
                other_moments.append(f"{tree.format.root}{tensor.name}")
                continue
            name = tree.names.full_name(tensor.name)
            digests = recorded_digests(records, name)
            if qualify(slot, name) in scale_records:
                digests = scaled_digests(scale_records[qualify(slot, name)], tensor.shape[0])
            state_tensors.append(replace(tensor, name=qualify(slot, tensor.name), digests=digests))
    left_out = [
        *_unread_parts(moments, leaves),
        *other_moments,
        *(f"{leaf.removesuffix(BOXED_SUFFIX)} {count}" for leaf, count in other_counts.items()),
    ]
    others: list[DroppedTensor] = []
    for entry in source.extra_entries:
        if entry.rule != OPT_STATE_RULE and entry.name not in (STEP_LEAF, moments.averages):
            others.append(entry)
            left_out.append(entry.name)
    settings = recorded_settings(source)
    if settings is None:
        left_out.append(NO_SETTINGS)
    numbers = AdamNumbers(
        step=_read_step(source, leaves), num_updates=num_updates, settings=settings
    )
    return add_training_state(
        replace(source, extra_entries=tuple(others)),
        numbers,
        tuple(state_tensors),
        tuple(left_out),
    )


def _unread_parts(moments: MomentTrees, leaves: Mapping[str, Array]) -> Iterator[str]:
    """Yield the unread parts of the optimizer state and of the averages, except settings.

    A part is a subtree next to the path of Adam's state, e.g. `opt_state.inner_state.1.mog` or `opt_state.acc_grads`.
    """
    roots = tuple(tree.format.root for tree in moments.trees.values())
    parts: dict[str, None] = {}
    for name in leaves:
        if name.startswith(roots) or COUNT_LEAF.fullmatch(name):
            continue
        key, _, _ = name.partition(".")
        if key == OPT_STATE:
            parts[_part(name.removesuffix(BOXED_SUFFIX), moments.adam)] = None
        elif key == moments.averages:
            parts[name] = None
    for part in parts:
        if part not in (SETTINGS_PART, GRADIENT_STEP_LEAF):
            yield part


def _part(name: str, adam: str) -> str:
    """Return the keys shared by a leaf and Adam's state, and the next key of the leaf.

    >>> _part("opt_state.inner_state._skipstep_losses", "opt_state.inner_state.1")
    'opt_state.inner_state._skipstep_losses'
    """
    keys = name.split(".")
    num_shared = 0
    for key, adam_key in zip(keys, adam.split("."), strict=False):
        if key != adam_key:
            break
        num_shared += 1
    return ".".join(keys[: num_shared + 1])


def _read_step(source: Source, leaves: Mapping[str, Array]) -> int:
    """Return the number of steps."""
    record = (source.manifest or NO_MANIFEST).training_state
    if record is not None and STEP_LEAF + BOXED_SUFFIX in leaves:
        # Tunix counts updates, and an export may have skipped steps.
        return record["step"]
    for name in (GRADIENT_STEP_LEAF + BOXED_SUFFIX, GRADIENT_STEP_LEAF):
        if name in leaves:
            return _read_counter(source, leaves, name)
    return _read_counter(source, leaves, STEP_LEAF)


def _read_counter(source: Source, leaves: Mapping[str, Array], name: str) -> int:
    """Return the value of a counter."""
    if name + BOXED_SUFFIX in leaves:
        name += BOXED_SUFFIX
    if name not in leaves:
        what = f"{source.display_name} has no {name}"
        raise PrepError(what, "its training state is incomplete", WITHOUT_STATE_HINT)
    (value,) = read_scalars(source, [leaf_as_tensor(name, leaves[name], {})])
    leaf = name.removesuffix(BOXED_SUFFIX)
    why = f"{leaf} is {value:g}, and must be an integer from 0 to {MAX_COUNT:,}"
    return check_count(source, value, why)


def with_state_item(item: OrbaxItem) -> OrbaxItem:
    """Return an item of parameters with the arrays of the optimizer state in the item next to it, if there is one."""
    name = STATE_ITEMS.get(item.folder.name)
    if name is None or item_metadata_file(item.folder.parent / name) is None:
        return item
    state = read_item(item.folder.parent / name)
    clash = find_name_clash(array.path for array in (*item.arrays, *state.arrays))
    if clash is not None:
        what = f"{item.folder.parent} has {quote_name(clash[0])} twice"
        raise DamagedError(what, f"it is in {item.folder.name} and in {name}", GET_AGAIN_HINT)
    arrays = [array.moved(len(item.files)) for array in state.arrays]
    return replace(
        item,
        arrays=(*item.arrays, *arrays),
        files=(*item.files, *state.files),
        value_types=(*item.value_types, *state.value_types),
        non_arrays=(*item.non_arrays, *state.non_arrays),
        unlisted_names=(*item.unlisted_names, *state.unlisted_names),
        metadata_digest=record_digest((item.metadata_digest + state.metadata_digest).encode()),
    )
