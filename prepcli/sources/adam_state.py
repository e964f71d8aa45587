"""The neutral form of a training state: the moments of Adam by tensor, counters, and settings of the optimizer.

A training step of prep and a checkpoint of another library have the same names here. The moments of a tensor are
`opt_state.adam.mu/TENSOR` and `opt_state.adam.nu/TENSOR`, as in `planning.tensors`. The state in an item of a JAX
trainer is read here, too: AdamW in optax below `opt_state`, and the step. The trainer's own places, e.g. of averages,
are those of its entry in `planning.libraries`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from prepcli.core.errors import GET_AGAIN_HINT, Command, DamagedError, Key, Option, PrepError, text
from prepcli.core.json_values import HFConfig, quote_name
from prepcli.engine.blobs import MemoryBlob, open_blobs
from prepcli.engine.digest import TensorDigest, algorithm_of, record_digest
from prepcli.engine.fills import numpy_dtype
from prepcli.engine.stream_values import allocate_run_buffers, read_values
from prepcli.formats.manifest import NO_MANIFEST
from prepcli.formats.orbax import (
    STATE_ITEMS,
    OrbaxItem,
    find_name_clash,
    item_metadata_file,
    read_item,
)
from prepcli.models.param_tree import DecayRule
from prepcli.models.parameters import Family
from prepcli.planning.arrays import Array, whole_array
from prepcli.planning.libraries import (
    LIBRARIES_BY_LAYOUT,
    NO_SETTINGS,
    AdamNumbers,
    AdamSettings,
    LayoutScale,
    scaled_digests,
)
from prepcli.planning.manifest_fields import Manifest, ScaleRecord
from prepcli.planning.plan import DroppedTensor, SourceFile, Stream
from prepcli.planning.tensors import (
    COUNTERS,
    FIRST_MOMENT,
    FLOAT_DTYPES,
    MOMENTS,
    NUM_UPDATES,
    OPT_STATE,
    OPT_STATE_RULE,
    SECOND_MOMENT,
    SKIPPED,
    SKIPPED_IN_ROW,
    STEP,
    is_leaf_path,
    qualify,
    split_name,
)
from prepcli.sources.foreign_trees import (
    BOXED_SUFFIX,
    ForeignTree,
    leaf_as_tensor,
    match_foreign_tree,
)
from prepcli.sources.source import (
    AVERAGE_SLOT,
    Source,
    SourceTensor,
    match_source_tensors,
    recorded_digests,
    stored_rows,
)
from prepcli.sources.tensor_match import DEFAULT_MATCH_OPTIONS
from prepcli.stores.paths import AnyPath

WITHOUT_STATE_HINT = text("convert it without {}", Option("training_state", True))
# Counters are stored as int32.
MAX_COUNT = (1 << 31) - 1
# Bytes of a counter in memory.
COUNTER_NBYTES = 1 << 12


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamState(AdamNumbers):
    """The training state of a source, without the parameters.

    Attributes:
        first: First moment of each parameter, by the name of the parameter.
        second: Second moment of each parameter.
        counters: Tensors of the counters, by name.
        batch_size: Sequences of a step. 1 if it is unknown.
        averages: Average of each parameter, by the name of the parameter. Empty if there are none.
        left_out: Other state. No other library has a place for it.
        decay_rule: Rule for the parameters with weight decay. None if it is unknown.
    """

    first: Mapping[str, SourceTensor]
    second: Mapping[str, SourceTensor]
    counters: Mapping[str, SourceTensor]
    batch_size: int
    averages: Mapping[str, SourceTensor]
    left_out: tuple[SourceTensor, ...]
    decay_rule: DecayRule | None = None

    @property
    def tensors(self) -> tuple[SourceTensor, ...]:
        """The moments and the averages of all parameters."""
        return *self.first.values(), *self.second.values(), *self.averages.values()

    def without_averages(self) -> AdamState:
        """Return the state for a library without a place for averages."""
        left_out = (*self.averages.values(), *self.left_out)
        return replace(self, averages={}, left_out=left_out)


def read_adam_state(source: Source) -> AdamState:
    """Return the training state of a source, with the settings that another library stores.

    Only the counters are read.
    """
    if not source.state_tensors:
        hint = text("name a run of {}, or one of its steps", Command("train"))
        what = f"{source.display_name} has no training state"
        raise PrepError(what, "it has parameters only", hint)
    slots: dict[str, dict[str, SourceTensor]] = {slot: {} for slot in (*MOMENTS, AVERAGE_SLOT)}
    counters: dict[str, SourceTensor] = {}
    left_out: list[SourceTensor] = []
    for tensor in source.state_tensors:
        slot, name = split_name(tensor.name)
        if slot in MOMENTS or (slot == AVERAGE_SLOT and not is_leaf_path(name)):
            slots[slot][name] = tensor
        elif not slot and name in COUNTERS:
            counters[name] = tensor
        else:
            left_out.append(tensor)
    name = source.display_name
    trained = trained_tensors(source)
    if not slots[FIRST_MOMENT] and not slots[SECOND_MOMENT]:
        others = sorted({split_name(tensor.name)[0] for tensor in left_out} - {""})
        why = "the step was saved without its optimizer state"
        if others:
            why = f"its optimizer has {', '.join(others)}"
        hint = text("{} chooses the optimizer of a run", Key("optimizer.type", "adamw"))
        raise PrepError(f"{name} has no moments of AdamW", why, hint)
    for slot, moments in slots.items():
        if slot == AVERAGE_SLOT and not moments:
            continue
        # A slot without some of the parameters has paths of leaves as names.
        is_partial = any(map(is_leaf_path, moments))
        for parameter in trained:
            if is_partial or parameter.name not in moments:
                what = f"{name} has no {slot} of {source.file_name(parameter)}"
                why = text("{} leaves parameters without moments", Key("optimizer.freeze"))
                if source.training_record is not None:
                    why = "the parameter was frozen, or the checkpoint is incomplete"
                raise PrepError(what, why, WITHOUT_STATE_HINT)
    return AdamState(
        first=slots[FIRST_MOMENT],
        second=slots[SECOND_MOMENT],
        step=_read_counter(source, counters, STEP),
        num_updates=_read_counter(source, counters, NUM_UPDATES),
        settings=recorded_settings(source),
        counters=counters,
        batch_size=(source.manifest or NO_MANIFEST).batch_size,
        averages=slots[AVERAGE_SLOT],
        left_out=tuple(left_out),
    )


def trained_tensors(source: Source) -> tuple[SourceTensor, ...]:
    """Return the parameters of the model, without a stored copy of a tied embedding and without buffers."""
    match = match_source_tensors(source, stored_rows(source), DEFAULT_MATCH_OPTIONS)
    return tuple(tensor for tensor in source.tensors if tensor.name in match.uses)


def require_settings(source: Source, state: AdamState) -> AdamSettings:
    """Return the settings of the optimizer. Raise PrepError if the source does not have them."""
    if state.settings is not None:
        return state.settings
    hint = text("train a step with {}, and export that one", Key("model.training_state", True))
    raise PrepError(
        f"{source.display_name} has no settings of its optimizer",
        "the framework that wrote the state does not store them",
        hint,
    )


def _read_counter(source: Source, counters: Mapping[str, SourceTensor], name: str) -> int:
    """Return the value of a counter."""
    if name not in counters:
        what = f"{source.display_name} has no {name}"
        raise DamagedError(what, "its training state is incomplete", GET_AGAIN_HINT)
    (value,) = read_scalars(source, [counters[name]])
    return int(value)


def read_scalars(source: Source, tensors: Sequence[SourceTensor]) -> list[float]:
    """Return the values of tensors with one element each, compared with their recorded digests."""
    for tensor in tensors:
        if math.prod(tensor.shape) != 1:
            why = f"{tensor.name} is {list(tensor.shape)}, and must have one element"
            raise DamagedError(f"{source.display_name} is damaged", why, GET_AGAIN_HINT)
    values: list[float] = []
    for tensor, content in zip(tensors, read_small_tensors(source, tensors), strict=True):
        values.append(np.frombuffer(content, numpy_dtype(tensor.dtype))[0].item())
    return values


def read_small_tensors(source: Source, tensors: Sequence[SourceTensor]) -> list[bytes]:
    """Return the bytes of tensors with a few elements, compared with their recorded digests."""
    contents: list[bytes] = []
    buffers = allocate_run_buffers(COUNTER_NBYTES)
    with open_blobs(source.byte_sources) as files:
        for tensor in tensors:
            rows = (0, tensor.shape[0] if tensor.shape else 1)
            stream = Stream(tensor.name, tensor.dtype, tensor.shape, rows, tensor.placement, ())
            pieces = [bytes(data) for _, data in read_values(files, stream, buffers=buffers)]
            contents.append(b"".join(pieces))
            for _, _, expected in tensor.digests:
                if TensorDigest(contents[-1], algorithm_of(expected)).text() != expected:
                    why = f"{tensor.name} differs from its digest"
                    raise DamagedError(f"{source.display_name} is damaged", why, GET_AGAIN_HINT)
    return contents


def check_count(source: Source, value: float, why: str) -> int:
    """Return a counter as an integer. Raise DamagedError with `why` if it is negative, fractional or too large."""
    # A NaN fails the first comparison.
    if not 0 <= value <= MAX_COUNT or value != int(value):
        raise DamagedError(f"{source.display_name} is damaged", why, GET_AGAIN_HINT)
    return int(value)


def recorded_settings(source: Source) -> AdamSettings | None:
    """Return the settings in the record of a state from another library, or of a state for one."""
    record = source.training_record or (source.manifest or NO_MANIFEST).training_state
    if not record or not record["optimizer"]:
        return None
    return AdamSettings(**record["optimizer"])


def moment_names(parameter: str) -> tuple[str, str]:
    """Return the names of a parameter's first and second moment."""
    return qualify(FIRST_MOMENT, parameter), qualify(SECOND_MOMENT, parameter)


def slot_scales(slot: str, parameter_scales: Mapping[str, LayoutScale]) -> dict[str, LayoutScale]:
    """Return the scales of a slot, by the names of the parameters' scales."""
    scales: dict[str, LayoutScale] = {}
    for name, parameter_scale in parameter_scales.items():
        # An average has the scale of its parameter.
        scale = parameter_scale
        if slot != AVERAGE_SLOT:
            scale = parameter_scale.of_moment(1 + MOMENTS.index(slot))
        if scale:
            scales[name] = scale
    return scales


def add_training_state(
    source: Source,
    numbers: AdamNumbers,
    moments: Sequence[SourceTensor],
    left_out: Sequence[str],
    *,
    files: tuple[AnyPath, ...] = (),
    stamps: tuple[SourceFile, ...] = (),
) -> Source:
    """Return a source with the training state of another library.

    Args:
        source: The source with the parameters.
        numbers: Counters and settings.
        moments: Both moments of each parameter, and averages. Their files follow the byte sources of `source`.
        left_out: Names of the parts without a counterpart.
        files: Files of the moments, in addition to those of the source.
        stamps: Size, time and digest of these files.
    """
    for moment in moments:
        if moment.dtype not in FLOAT_DTYPES:
            what = f"the moments of {source.display_name} are not supported"
            why = f"{moment.name} is {moment.dtype}, and must be a float"
            raise PrepError(what, why, WITHOUT_STATE_HINT)
    if numbers.num_updates > numbers.step:
        # The learning rate of prep is that of `step - skipped`, which must be the number of updates.
        what = f"{source.display_name} has more updates than steps"
        why = f"it is at step {numbers.step}, and its moments have {numbers.num_updates} updates"
        raise PrepError(what, why, WITHOUT_STATE_HINT)
    # Steps with a loss that is not finite have no update. Trainer counts them, and Adam does not.
    counters = {
        NUM_UPDATES: numbers.num_updates,
        STEP: numbers.step,
        SKIPPED: numbers.step - numbers.num_updates,
        SKIPPED_IN_ROW: 0,
    }
    values = np.array([*counters.values()], np.dtype("<i4"))
    blobs = (*source.byte_sources, *files)
    tensors: list[SourceTensor] = []
    for number, name in enumerate(counters):
        counter = whole_array(name, "int32", (), (len(blobs), number * values.itemsize))
        whole = ((0, 1, TensorDigest(values[number].tobytes()).text()),)
        tensors.append(SourceTensor(qualify("", name), "int32", (), (counter,), whole))
    return replace(
        source,
        state_tensors=(*source.state_tensors, *moments, *tensors),
        blobs=(*blobs, MemoryBlob("counters", values.tobytes())),
        files=(*source.files, *files),
        file_stamps=(*source.file_stamps, *stamps),
        training_record=numbers.record(left_out),
    )


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
    """Match the leaves of the moments with the layout of the parameters."""
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
    # Averages with a constant decay, as in prep
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
    num_updates = _read_counter_leaf(source, leaves, f"{moments.adam}.count")
    # E.g. after skipped steps. The schedule of prep is at the number of updates.
    other_counts: dict[str, int] = {}
    for leaf in filter(COUNT_LEAF.fullmatch, leaves):
        count = _read_counter_leaf(source, leaves, leaf)
        if count != num_updates:
            other_counts[leaf] = count
    if source.manifest is not None:
        what = f"{source.display_name} is damaged"
        for leaf, count in other_counts.items():
            why = f"{leaf} is {count}, and the moments have {num_updates} updates"
            raise DamagedError(what, why, GET_AGAIN_HINT)
        constants: list[SourceTensor] = []
        for name in sorted(source.manifest.others.keys() & leaves.keys()):
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
            return _read_counter_leaf(source, leaves, name)
    return _read_counter_leaf(source, leaves, STEP_LEAF)


def _read_counter_leaf(source: Source, leaves: Mapping[str, Array], name: str) -> int:
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
