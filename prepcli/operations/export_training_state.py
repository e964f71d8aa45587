"""The training state in an export: its checks, its files and its record."""

# pyright: reportTypedDictNotRequiredAccess=false
# The decorator `public` has added the default of each option.

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from prepcli.errors import Option, PrepError, text, usage_error
from prepcli.operations.conversion import PlannedConversion
from prepcli.operations.export_layouts import (
    DCP_FORMAT,
    HF_LAYOUT,
    WeightFiles,
    file_format,
)
from prepcli.operations.export_quantized import writes_quantized
from prepcli.operations.options import ExportOptions
from prepcli.planning.manifest_fields import (
    TRAINING_STATE_KEY,
    ManifestFields,
    TrainingStateRecord,
)
from prepcli.planning.state_names import split_name
from prepcli.sources.adam_state import AdamState, moment_names, read_adam_state
from prepcli.sources.source import Source, SourceTensor
from prepcli.targets.hf_folder import resized_shape_and_nbytes
from prepcli.targets.trainer_checkpoint import (
    MomentLayout,
    lay_out_optimizer_file,
    scheduler_file,
    trainer_state_file,
)
from trainer.models.module_order import optimizer_groups

LayOut = Callable[[ExportOptions, Source, Sequence[SourceTensor], Mapping[str, int]], WeightFiles]
# What a training state of prep does not have, by the name of its file in a checkpoint of Trainer.
NOT_WRITTEN = ("rng_state.pth", "training_args.bin")


@dataclass(frozen=True, slots=True)
class StateExport:
    """The part of an export about the training state.

    Attributes:
        weight_files: Files of the parameters and the moments. Empty without a state.
        state: The training state, or None.
    """

    weight_files: WeightFiles
    state: AdamState | None

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
            "left_out": _unconverted(self.state),
        }
        return {TRAINING_STATE_KEY: record}

    def left_source(self, source: Source) -> Source:
        """Return the source with only the state that is not converted."""
        if self.state is None:
            return source
        return replace(source, state_tensors=self.state.left_out)

    def describe(self, planned: PlannedConversion) -> PlannedConversion:
        """Return a planned export with the name that Trainer gives to a checkpoint, and with notes about the state."""
        if self.state is None:
            return planned
        notes = (*planned.notes, *_notes(self.state))
        return replace(planned, default_out_name=f"checkpoint-{self.state.step}", notes=notes)


NO_STATE = StateExport(WeightFiles((), {}), None)


def _unconverted(state: AdamState) -> list[str]:
    """Return the names of the parts that have no place in the output."""
    names: dict[str, None] = {}
    for tensor in state.left_out:
        slot, name = split_name(tensor.name)
        names[slot or name] = None
    return [*names, *NOT_WRITTEN]


def _notes(state: AdamState) -> Iterator[str]:
    """Yield lines for the user."""
    yield f"training state of step {state.step}: moments, counters and settings of AdamW"
    yield (
        "Trainer makes the schedule from its own arguments: set learning_rate"
        f" {state.settings.peak_lr:g}, the warm-up and the steps of the run"
    )
    yield f"not converted: {', '.join(_unconverted(state))}"


def check_state_request(options: ExportOptions, source: Source) -> None:
    """Raise UsageError for options that contradict a training state.

    Args:
        options: Options of the export.
        source: The opened source.
    """
    option = Option("training_state", True)
    is_trainer = options["layout"] == HF_LAYOUT and file_format(options) != DCP_FORMAT
    conflicts = [
        (not is_trainer, Option("layout", options["layout"]), "it has no training state"),
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
    lay_out: LayOut,
) -> StateExport:
    """Lay out the parameters and the training state of a source.

    Args:
        options: Layout and format.
        source: The opened source.
        parameters: The parameters to write.
        row_counts: Rows of each parameter in the output.
        lay_out: Returns the files of the parameters.

    Raises:
        PrepError: The source has no state of AdamW, or its order in the output is unknown.
    """
    state = read_adam_state(source)
    weight_files = lay_out(options, source, parameters, row_counts)
    names = {source.file_name(parameter): parameter.name for parameter in parameters}
    groups = optimizer_groups(source.family.name, names)
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
    return StateExport(
        replace(
            weight_files,
            files=(*weight_files.files, optimizer.file),
            locations=locations,
            index=(*weight_files.index, scheduler_file(state), trainer_state_file(state)),
        ),
        state,
    )


def check_no_adapter(options: ExportOptions, source: Source) -> None:
    """Raise PrepError for the training state of adapters."""
    if options["training_state"]:
        what = text("{} is not supported for adapters", Option("training_state", True))
        why = f"{source.display_name} has only adapters, with moments of their own"
        raise PrepError(what, why, text("remove {}", Option("training_state", True)))
