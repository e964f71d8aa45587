"""The training state in an export: its checks, its files and its record."""

# pyright: reportTypedDictNotRequiredAccess=false
# The decorator `public` has added the default of each option.

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from prepcli.errors import Option, PrepError, text, usage_error
from prepcli.formats.safetensors_layout import LayoutEntry
from prepcli.operations.conversion import PlannedConversion
from prepcli.operations.export_layouts import (
    DCP_FORMAT,
    HF_LAYOUT,
    WeightFiles,
    file_format,
    lay_out_weights,
)
from prepcli.operations.export_quantized import writes_quantized
from prepcli.operations.options import ExportOptions
from prepcli.planning.manifest_fields import (
    TRAINING_STATE_KEY,
    ManifestFields,
    TrainingStateRecord,
)
from prepcli.planning.plan import Locations
from prepcli.planning.state_names import split_name
from prepcli.planning.tensors import itemsize
from prepcli.sources.adam_state import AdamState, moment_names, read_adam_state
from prepcli.sources.source import Source, SourceTensor
from prepcli.targets.dcp_state import ENTRIES, lay_out_dcp_state, model_name, moment_name
from prepcli.targets.hf_folder import header_entries, resized_shape_and_nbytes
from prepcli.targets.trainer_checkpoint import (
    MomentLayout,
    lay_out_optimizer_file,
    scheduler_file,
    trainer_state_file,
)
from trainer.models.module_order import OptimizerGroups, optimizer_groups


@dataclass(frozen=True, slots=True)
class StateContent:
    """The content of a training state in a framework.

    Attributes:
        missing: Parts of the framework's own checkpoints that prep does not have.
        folder_name: Default name of the output, with the step. Empty for the name of other exports.
        schedule_note: The way to set the learning rate schedule.
    """

    missing: tuple[str, ...]
    folder_name: str
    schedule_note: str


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


@dataclass(frozen=True, slots=True)
class StateExport:
    """The part of an export about the training state.

    Attributes:
        weight_files: Files of the parameters and the moments. Empty without a state.
        state: The training state, or None.
        content: Content of the state in the output.
    """

    weight_files: WeightFiles
    state: AdamState | None = None
    content: StateContent = CONTENT_OF_TRAINER

    @property
    def moments(self) -> tuple[SourceTensor, ...]:
        """The moments to write."""
        return self.state.moments if self.state else ()

    def settings(self) -> ManifestFields:
        """Return the fields of the manifest about the state."""
        if self.state is None:
            return {}
        record: TrainingStateRecord = {
            "step": self.state.step,
            "updates": self.state.num_updates,
            "optimizer": self.state.settings.to_json(),
            "left_out": self._unconverted(self.state),
        }
        return {TRAINING_STATE_KEY: record}

    def left_source(self, source: Source) -> Source:
        """Return the source with only the state that is not converted."""
        if self.state is None:
            return source
        return replace(source, state_tensors=self.state.left_out)

    def describe(self, planned: PlannedConversion) -> PlannedConversion:
        """Return a planned export with the default name and the notes of its training state."""
        if self.state is None:
            return planned
        name = self.content.folder_name.format(step=self.state.step) or planned.default_out_name
        notes = (*planned.notes, *self._notes(self.state))
        return replace(planned, default_out_name=name, notes=notes)

    def _unconverted(self, state: AdamState) -> list[str]:
        """Return the names of the parts that are not converted."""
        names: dict[str, None] = {}
        for tensor in state.left_out:
            slot, name = split_name(tensor.name)
            names[slot or name] = None
        return [*names, *self.content.missing]

    def _notes(self, state: AdamState) -> Iterator[str]:
        """Yield lines for the user."""
        yield f"training state of step {state.step}: moments, counters and settings of AdamW"
        yield self.content.schedule_note.format(step=state.step, peak_lr=state.settings.peak_lr)
        yield f"not converted: {', '.join(self._unconverted(state))}"


def check_state_request(options: ExportOptions, source: Source) -> None:
    """Raise UsageError for options that contradict a training state.

    Args:
        options: Options of the export.
        source: The opened source.
    """
    option = Option("training_state", True)
    conflicts = [
        (options["layout"] != HF_LAYOUT, Option("layout", options["layout"]), "it has no training state"),
        (options["map"] is not None, Option("map"), "a map has no names for moments"),
        (options["dtype"] is not None, Option("dtype", options["dtype"]),
         "moments belong to the values that were trained"),
        (source.has_averages, Option("ema", True), "moments belong to the trained parameters"),
        (source.wrapper is not None, Option("text_only", False),
         "Trainer orders the moments with the towers, which have none"),
        (writes_quantized(options, source), Option("quantized", "keep"),
         "moments belong to the decoded weights"),
    ]  # fmt: skip
    for is_conflict, other, why in conflicts:
        if is_conflict:
            what = text("{} is not supported with {}", option, other)
            raise usage_error(what, why, text("remove {}", option))


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
    state = read_adam_state(source)
    names = {source.file_name(parameter): parameter.name for parameter in parameters}
    groups = optimizer_groups(source.family.name, names)
    if file_format(options) == DCP_FORMAT:
        entries = header_entries(source, parameters, rows=row_counts)
        weight_files = _dcp_files(state, names, groups, entries, shard_nbytes)
        return StateExport(weight_files, state, CONTENT_OF_DCP)
    weight_files = lay_out_weights(
        options, source, parameters, row_counts, vocab_rows=vocab_rows, shard_nbytes=shard_nbytes
    )
    layouts: dict[str, MomentLayout] = {}
    for file_name, name in names.items():
        first = state.first[name]
        shape, _ = resized_shape_and_nbytes(first, row_counts[name])
        layouts[file_name] = MomentLayout(first.dtype, state.second[name].dtype, shape)
    optimizer = lay_out_optimizer_file(state, groups, layouts, file_number=len(weight_files.files))
    locations = dict(weight_files.locations)
    for file_name, name in names.items():
        for written, moment in zip(moment_names(file_name), moment_names(name), strict=True):
            locations[moment] = (optimizer.locations[written],)
    weight_files = replace(
        weight_files,
        files=(*weight_files.files, optimizer.file),
        locations=locations,
        index=(*weight_files.index, scheduler_file(state), trainer_state_file(state)),
    )
    return StateExport(weight_files, state, CONTENT_OF_TRAINER)


def _dcp_files(
    state: AdamState,
    names: Mapping[str, str],
    groups: OptimizerGroups,
    parameters: Sequence[LayoutEntry],
    shard_nbytes: int,
) -> WeightFiles:
    """Return the files of a torch distributed checkpoint.

    Args:
        state: The training state.
        names: Name of each parameter in the source, by its name in files.
        groups: Names of the parameters with and without weight decay.
        parameters: Entries of the parameters in the output.
        shard_nbytes: Maximum size of a file.
    """
    moments: dict[str, list[LayoutEntry]] = {}
    for file_name, _, shape, _ in parameters:
        entries: list[LayoutEntry] = []
        for tensor in (state.first[names[file_name]], state.second[names[file_name]]):
            nbytes = math.prod(shape) * itemsize(tensor.dtype)
            entries.append((file_name, tensor.dtype, shape, nbytes))
        moments[file_name] = entries
    layout = lay_out_dcp_state(parameters, moments, state, groups, shard_nbytes=shard_nbytes)
    locations: dict[str, Locations] = {}
    for file_name, name in names.items():
        locations[name] = (layout.locations[model_name(file_name)],)
        for entry, moment in zip(ENTRIES, moment_names(name), strict=True):
            locations[moment] = (layout.locations[moment_name(file_name, entry)],)
    return WeightFiles(layout.files, locations, (layout.metadata,))


def check_no_adapter(options: ExportOptions, source: Source) -> None:
    """Raise PrepError for the training state of adapters."""
    if options["training_state"]:
        what = text("{} is not supported for adapters", Option("training_state", True))
        why = f"{source.display_name} has only adapters, with moments of their own"
        raise PrepError(what, why, text("remove {}", Option("training_state", True)))
