"""The training state in an export: its checks, its files and its record."""

# pyright: reportTypedDictNotRequiredAccess=false
# The decorator `public` has added the default of each option.

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from prepcli.commands.operations.conversion import PlannedConversion
from prepcli.commands.operations.export_layouts import (
    DCP_FORMAT,
    HF_LAYOUT,
    LEVANTER_LAYOUTS,
    TUNIX_LAYOUT,
    WeightFiles,
    file_format,
    lay_out_weights,
)
from prepcli.commands.operations.export_quantized import writes_quantized
from prepcli.commands.operations.options import ExportOptions
from prepcli.commands.operations.training_state import read_training_state
from prepcli.core.errors import Option, PrepError, text, usage_error
from prepcli.formats.safetensors_layout import LayoutEntry
from prepcli.models.module_order import OptimizerGroups, optimizer_groups
from prepcli.planning.layout_scales import LayoutScale
from prepcli.planning.manifest_fields import Manifest, TrainingStateRecord
from prepcli.planning.plan import Locations
from prepcli.planning.state_names import split_name
from prepcli.planning.tensors import itemsize
from prepcli.sources.adam_state import (
    AdamSettings,
    AdamState,
    moment_names,
    require_settings,
)
from prepcli.sources.decayed_tensors import decay_differences
from prepcli.sources.foreign_state import NO_SETTINGS
from prepcli.sources.multimodal import models_title, towers_title
from prepcli.sources.source import Source, SourceTensor
from prepcli.targets.dcp_folder import DcpLayout
from prepcli.targets.dcp_state import ENTRIES, lay_out_dcp_state, model_name, moment_name
from prepcli.targets.hf_folder import header_entries, resized_shape_and_nbytes
from prepcli.targets.trainer_checkpoint import (
    MomentLayout,
    lay_out_optimizer_file,
    scheduler_file,
    trainer_state_file,
)
from prepcli.targets.trainer_item import TRAINER_ITEMS
from prepcli.targets.trainer_item_state import (
    StateTree,
    constant_blob,
    constant_tensors,
    lay_out_item_state,
    levanter_clip_norm,
    levanter_state_tree,
    maxtext_state_tree,
    tunix_state_tree,
)

STATE_LAYOUTS = (HF_LAYOUT, "maxtext", "maxtext-unscanned", *LEVANTER_LAYOUTS, TUNIX_LAYOUT)
NO_STATE_LAYOUT = f"training states have the layouts {', '.join(STATE_LAYOUTS)}"


@dataclass(frozen=True, slots=True)
class StateContent:
    """The content of a training state in a framework.

    Attributes:
        missing: Parts of the framework's own checkpoints without a counterpart in prep.
        folder_name: Default name of the output, with the step. Empty for the name of other exports.
        schedule_note: The way to set the learning rate schedule.
        structure_notes: Required settings of the framework to restore the state.
    """

    missing: tuple[str, ...]
    folder_name: str
    schedule_note: str
    structure_notes: tuple[str, ...] = ()


CONTENT_OF_TRAINER = StateContent(
    missing=("rng_state.pth", "training_args.bin"),
    folder_name="checkpoint-{step}",
    schedule_note="Trainer makes the schedule from its own arguments: set learning_rate {peak_lr:g}, the warm-up and"
    " the steps of the run",
)
CONTENT_OF_DCP = StateContent(
    missing=("the state of a scheduler", "random state"),
    folder_name="",
    schedule_note="a scheduler starts at step {step}, with the learning rate {peak_lr:g} after warm-up",
)
CONTENT_OF_MAXTEXT = StateContent(
    missing=("random state", NO_SETTINGS),
    folder_name="",
    schedule_note="MaxText makes schedule and optimizer from its settings: opt_type=adamw, learning_rate={peak_lr:g}",
)
CONTENT_OF_LEVANTER = StateContent(
    missing=("random state", NO_SETTINGS),
    folder_name="",
    schedule_note="Levanter makes schedule and optimizer from its settings, e.g. optimizer.learning_rate={peak_lr:g}",
)
CONTENT_OF_TUNIX = StateContent(
    missing=("random state", "mask of weight decay"),
    folder_name="",
    schedule_note="Tunix makes the schedule from its settings, e.g. with the learning rate {peak_lr:g} after warm-up",
    structure_notes=(
        "Tunix restores it into optax.inject_hyperparams(optax.adamw)(learning_rate=SCHEDULE)",
    ),
)


@dataclass(frozen=True, slots=True)
class StateExport:
    """The part of an export about the training state.

    Attributes:
        weight_files: Files of the parameters and the moments. Empty without a state.
        state: The training state, or None.
        content: Content of the state in the output.
        unread: Parts of the source without a counterpart in prep.
        counters: Counters with a tensor in the output.
        tree: Leaves of the state in the item of a JAX trainer. None for other frameworks.
    """

    weight_files: WeightFiles
    state: AdamState | None = None
    content: StateContent = CONTENT_OF_TRAINER
    unread: Sequence[str] = ()
    counters: tuple[SourceTensor, ...] = ()
    tree: StateTree | None = None

    @property
    def tensors(self) -> tuple[SourceTensor, ...]:
        """The tensors of the state to write."""
        if self.state is None:
            return ()
        return *self.state.tensors, *self.counters

    def scales(self, scales: Mapping[str, LayoutScale]) -> dict[str, LayoutScale]:
        """Return the scales of the moments, given the scales of the parameters by name."""
        if self.state is None:
            return {}
        moment_scales: dict[str, LayoutScale] = {}
        for name, scale in scales.items():
            for order, moment in enumerate(moment_names(name), 1):
                moment_scale = scale.of_moment(order)
                if moment_scale:
                    moment_scales[moment] = moment_scale
        return moment_scales

    def settings(self) -> Manifest:
        """Return the fields of the manifest about the state."""
        if self.state is None:
            return Manifest()
        record: TrainingStateRecord = {
            "step": self.state.step,
            "updates": self.state.num_updates,
            "optimizer": self.state.settings.to_json() if self.state.settings else {},
            "left_out": self._unconverted(self.state),
        }
        return Manifest(training_state=record)

    def full_source(self, source: Source) -> Source:
        """Return the source with all tensors to write."""
        if self.tree is None:
            return source
        return replace(
            source,
            state_tensors=(*source.state_tensors, *constant_tensors(source, self.tree)),
            blobs=(*source.byte_sources, constant_blob(self.tree)),
        )

    def left_source(self, source: Source) -> Source:
        """Return the source with only the unconverted state."""
        if self.state is None:
            return source
        return replace(source, state_tensors=self.state.left_out)

    def describe(self, planned: PlannedConversion, source: Source) -> PlannedConversion:
        """Return a planned export with the source, the default name and the notes of its training state."""
        if self.state is None:
            return planned
        name = self.content.folder_name.format(step=self.state.step) or planned.default_out_name
        notes = (*planned.notes, *self._notes(self.state))
        return replace(planned, default_out_name=name, notes=notes, source_view=source)

    def _unconverted(self, state: AdamState) -> list[str]:
        """Return the names of the unconverted parts."""
        names = dict.fromkeys(self.unread)
        for tensor in state.left_out:
            slot, name = split_name(tensor.name)
            names[slot or name] = None
        return list(names | dict.fromkeys(self.content.missing))

    def _notes(self, state: AdamState) -> Iterator[str]:
        """Yield lines for the user."""
        parts = "moments, counters and settings"
        if NO_SETTINGS in self.content.missing:
            parts = "moments and counters"
        yield f"training state of step {state.step}: {parts} of AdamW"
        if state.settings is not None:
            peak = state.settings.peak_lr
            yield self.content.schedule_note.format(step=state.step, peak_lr=peak)
        yield from self.content.structure_notes
        yield f"not converted: {', '.join(self._unconverted(state))}"


def check_state_request(options: ExportOptions, source: Source) -> None:
    """Raise UsageError for options in conflict with a training state.

    Args:
        options: Options of the export.
        source: The opened source.
    """
    option = Option("training_state", True)
    conflicts = [
        (options["layout"] not in STATE_LAYOUTS, Option("layout", options["layout"]), NO_STATE_LAYOUT),
        (options["map"] is not None, Option("map"), "a map has no names for moments"),
        (options["dtype"] is not None, Option("dtype", options["dtype"]),
         "moments belong to the values that were trained"),
        (source.has_averages, Option("ema", True), "moments belong to the trained parameters"),
        (writes_quantized(options, source), Option("quantized", "keep"),
         "moments belong to the decoded weights"),
    ]  # fmt: skip
    for is_conflict, other, why in conflicts:
        if is_conflict:
            what = text("{} is not supported with {}", option, other)
            raise usage_error(what, why, text("remove {}", option))
    if source.wrapper is not None:
        raise usage_error(
            text("{} is not supported for {}", option, models_title(source)),
            f"there are no moments for the {towers_title(source)} of {source.display_name}",
            text("{} leaves them out", Option("text_only", True)),
        )


def lay_out_training_state(
    options: ExportOptions,
    source: Source,
    parameters: Sequence[SourceTensor],
    row_counts: Mapping[str, int],
    *,
    vocab_rows: int,
    shard_nbytes: int,
) -> StateExport:
    """Lay out the parameters and the training state of a source.

    Args:
        options: Layout and format.
        source: The opened source.
        parameters: The parameters to write.
        row_counts: Rows of each parameter in the output.
        vocab_rows: Rows of the vocabulary in the output.
        shard_nbytes: Maximum size of a weight file.

    Raises:
        PrepError: The source has no state of AdamW, or its order in the output is unknown.
    """
    state = read_training_state(source)
    unread: Sequence[str] = ()
    if source.training_record is not None:
        unread = source.training_record["left_out"]
    if options["layout"] in TRAINER_ITEMS:
        export = _lay_out_item(options, source, parameters, state, vocab_rows=vocab_rows)
        return replace(export, unread=unread)
    state = state.without_averages()
    written_names = {source.file_name(parameter): parameter.name for parameter in parameters}
    # A tied head has no moments of its own.
    names = {key: name for key, name in written_names.items() if name in state.first}
    groups = optimizer_groups(source.family.name, names)
    settings = require_settings(source, state)
    differences = _decay_differences(source, state, settings, groups)
    if file_format(options) == DCP_FORMAT:
        entries = header_entries(source, parameters, rows=row_counts)
        lay_out = partial(lay_out_dcp_state, groups=groups, shard_nbytes=shard_nbytes)
        content = replace(CONTENT_OF_DCP, missing=(*CONTENT_OF_DCP.missing, *differences))
        return StateExport(
            _dcp_files(state, settings, written_names, entries, lay_out), state, content, unread
        )
    weight_files = lay_out_weights(
        options, source, parameters, row_counts, vocab_rows=vocab_rows, shard_nbytes=shard_nbytes
    )
    content = replace(CONTENT_OF_TRAINER, missing=(*CONTENT_OF_TRAINER.missing, *differences))
    return StateExport(
        _trainer_files(weight_files, state, settings, names, groups, row_counts),
        state,
        content,
        unread,
    )


def _lay_out_item(
    options: ExportOptions,
    source: Source,
    parameters: Sequence[SourceTensor],
    state: AdamState,
    *,
    vocab_rows: int,
) -> StateExport:
    """Lay out the parameters and the training state as an item of a JAX trainer.

    Args:
        options: Layout and storage.
        source: The opened source.
        parameters: The parameters to write.
        state: The training state.
        vocab_rows: Rows of the vocabulary in the output.
    """
    layout = options["layout"]
    if layout in LEVANTER_LAYOUTS:
        tree = levanter_state_tree(state)
        content = replace(CONTENT_OF_LEVANTER, structure_notes=_levanter_notes(state))
    elif layout == TUNIX_LAYOUT:
        state = state.without_averages()
        tree = tunix_state_tree(state, require_settings(source, state))
        content = _content_of_tunix(state)
    else:
        state = state.without_averages()
        tree = maxtext_state_tree(state)
        content = CONTENT_OF_MAXTEXT
    item = lay_out_item_state(
        source,
        parameters,
        state,
        tree,
        layout=layout,
        vocab_size=vocab_rows,
        storage=options["storage"],
    )
    files = WeightFiles(
        item.files,
        item.regions,
        leaves=item.leaves,
        folder=TRAINER_ITEMS[layout].state_folder(state.step),
        empty_nodes=tree.empty_nodes,
    )
    counters = (*tree.counters(state).values(), *constant_tensors(source, tree))
    return StateExport(files, state, content, counters=counters, tree=tree)


def _content_of_tunix(state: AdamState) -> StateContent:
    """Return the content of a training state of Tunix. The settings in it name no clipping of gradients."""
    missing = list(CONTENT_OF_TUNIX.missing)
    if state.clip_norm:
        missing.append(f"clipping to the norm {state.clip_norm:g}")
    return replace(CONTENT_OF_TUNIX, missing=tuple(missing))


def _levanter_notes(state: AdamState) -> tuple[str, ...]:
    """Return the settings of Levanter for a restore of the state. They determine its tree."""
    clip_norm = levanter_clip_norm(state)
    notes = ["Levanter restores it with optimizer.max_grad_norm=null"]
    if clip_norm:
        notes = [f"Levanter restores it with optimizer.max_grad_norm={clip_norm:g}"]
    if state.averages:
        notes.append("Levanter restores the averages with trainer.model_averaging.type=ema")
    return tuple(notes)


def _decay_differences(
    source: Source, state: AdamState, settings: AdamSettings, groups: OptimizerGroups
) -> tuple[str, ...]:
    """Return a description of the parameters with weight decay only in the recipe or only in Trainer."""
    if state.decay_rule is None or not settings.weight_decay:
        return ()
    return tuple(decay_differences(source, groups.decayed, state.decay_rule))


def _trainer_files(
    weight_files: WeightFiles,
    state: AdamState,
    settings: AdamSettings,
    names: Mapping[str, str],
    groups: OptimizerGroups,
    row_counts: Mapping[str, int],
) -> WeightFiles:
    """Return the files of a checkpoint of Trainer.

    Args:
        weight_files: Files of the parameters.
        state: The training state.
        settings: Settings of the optimizer.
        names: Name of each parameter in the source, by its name in files.
        groups: Names of the parameters with and without weight decay.
        row_counts: Rows of each parameter in the output.
    """
    moments: dict[str, MomentLayout] = {}
    for file_name, name in names.items():
        first = state.first[name]
        shape, _ = resized_shape_and_nbytes(first, row_counts[name])
        moments[file_name] = MomentLayout(first.dtype, state.second[name].dtype, shape)
    optimizer = lay_out_optimizer_file(
        state, settings, groups, moments=moments, file_number=len(weight_files.files)
    )
    locations = dict(weight_files.locations)
    for file_name, name in names.items():
        for written, moment in zip(moment_names(file_name), moment_names(name), strict=True):
            locations[moment] = (optimizer.locations[written],)
    state_files = (scheduler_file(state, settings), trainer_state_file(state))
    return replace(
        weight_files,
        files=(*weight_files.files, optimizer.file),
        locations=locations,
        index=(*weight_files.index, *state_files),
    )


def _dcp_files(
    state: AdamState,
    settings: AdamSettings,
    names: Mapping[str, str],
    parameters: Sequence[LayoutEntry],
    lay_out: Callable[..., DcpLayout],
) -> WeightFiles:
    """Return the files of a torch distributed checkpoint.

    Args:
        state: The training state.
        settings: Settings of the optimizer.
        names: Name of each parameter in the source, by its name in files.
        parameters: Entries of the parameters in the output.
        lay_out: `lay_out_dcp_state` with the groups and the size of files.
    """
    moments: dict[str, list[LayoutEntry]] = {}
    for file_name, _, shape, _ in parameters:
        name = names[file_name]
        if name not in state.first:
            continue
        moments[file_name] = []
        for tensor in (state.first[name], state.second[name]):
            nbytes = math.prod(shape) * itemsize(tensor.dtype)
            moments[file_name].append((file_name, tensor.dtype, shape, nbytes))
    layout = lay_out(parameters, moments, state, settings)
    locations: dict[str, Locations] = {}
    for file_name, name in names.items():
        locations[name] = (layout.locations[model_name(file_name)],)
        if name not in state.first:
            continue
        for entry, moment in zip(ENTRIES, moment_names(name), strict=True):
            locations[moment] = (layout.locations[moment_name(file_name, entry)],)
    return WeightFiles(layout.files, locations, (layout.metadata,))


def check_no_adapter(options: ExportOptions, source: Source) -> None:
    """Raise PrepError for the training state of adapters."""
    if options["training_state"]:
        what = text("{} is not supported for adapters", Option("training_state", True))
        why = f"{source.display_name} has only adapters, with moments of their own"
        raise PrepError(what, why, text("remove {}", Option("training_state", True)))
