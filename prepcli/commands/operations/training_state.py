"""The training state of a source: read it, import it with `prep save-init`, and write it with `prep export`."""

# pyright: reportTypedDictNotRequiredAccess=false
# The decorator `public` has added the default of each option.

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from prepcli.commands.operations.conversion import PlannedConversion
from prepcli.commands.operations.export_layouts import (
    WeightFiles,
    file_format,
    item_files,
    lay_out_weights,
    written_storage,
)
from prepcli.commands.operations.options import ExportOptions, SaveInitOptions
from prepcli.core.errors import (
    GET_AGAIN_HINT,
    DamagedError,
    Key,
    Option,
    PrepError,
    text,
    usage_error,
)
from prepcli.formats.manifest import NO_MANIFEST
from prepcli.models.decayed_leaves import DecayRule
from prepcli.planning.arrays import Locations
from prepcli.planning.layout_scales import LayoutScale
from prepcli.planning.libraries import (
    DCP_FORMAT,
    LIBRARIES_BY_LAYOUT,
    NO_SETTINGS,
    AdamSettings,
    Case,
    TrainerState,
    find_library,
)
from prepcli.planning.manifest_fields import Manifest, TrainingStateRecord
from prepcli.planning.state_names import MOMENTS, qualify, split_name
from prepcli.sources.adam_state import (
    AdamState,
    read_adam_state,
    require_settings,
    slot_scales,
)
from prepcli.sources.multimodal import models_title, towers_title
from prepcli.sources.source import Source, SourceTensor
from prepcli.targets.torch_state import (
    TorchAdam,
    lay_out_dcp_state,
    lay_out_trainer_state,
    prepare_torch_adam,
)
from prepcli.targets.trainer_item import lay_out_item_state

OPTION = Option("training_state", True)
REMOVE_HINT = text("remove {}", OPTION)


def read_training_state(source: Source) -> AdamState:
    """Return the training state of a source. Only the counters are read.

    A step of a run has the settings of its optimizer in the recipe of its manifest.

    Args:
        source: The opened source.

    Raises:
        PrepError: The source has no state of AdamW, or moments of some parameters are missing.
        DamagedError: The recipe in the manifest is broken.
    """
    state = read_adam_state(source)
    manifest = source.manifest or NO_MANIFEST
    schedule = manifest.rate
    if "recipe" not in manifest or schedule is None:
        return state
    # The tables of a recipe take 0.3 s to import. Every export imports this module.
    from trainer.recipe.lr_schedule import rate_at_step
    from trainer.recipe.optimizer_tables import AdamWTable

    try:
        table = AdamWTable.model_validate(tomllib.loads(manifest.recipe)["optimizer"])
    except (KeyError, ValueError) as error:
        what = f"the recipe in the manifest of {source.display_name} is broken"
        raise DamagedError(what, f"its table `optimizer`: {error}"[:200], GET_AGAIN_HINT) from error
    settings = state.settings
    if settings is None:
        settings = AdamSettings(
            lr=rate_at_step(schedule, state.step),
            peak_lr=float(schedule["peak"]),
            b1=table.b1,
            b2=table.b2,
            eps=table.eps,
            weight_decay=table.weight_decay,
        )
    decay_rule = DecayRule(
        table.decay_embeddings, exclude=table.decay_exclude, include=table.decay_include
    )
    return replace(state, settings=settings, clip_norm=table.clip_norm, decay_rule=decay_rule)


# --- prep save-init ---


def check_imported_state(options: SaveInitOptions, source: Source) -> None:
    """Check a source for a training state, and the options for conflicts with it.

    Raises:
        UsageError: An option contradicts the state.
        PrepError: The source has no moments of AdamW.
    """
    conflicts = [
        (options["layers"], Option("layers"), "the moments of the other layers would be lost"),
        (options["init"] != "zeros", Option("init"), "new rows have moments of zeros"),
        (options["untie"], Option("untie"), "a tied head has no moments of its own"),
        (options["dtype"], Option("dtype"), "moments belong to the values that were trained"),
        (source.family.is_verbatim, Option("verbatim"),
         "prep trains models of known families only"),
    ]  # fmt: skip
    _check_conflicts(conflicts)
    if source.wrapper is not None:
        towers = f"the {towers_title(source)} as well"
        why = f"the optimizer of {source.display_name} numbers {towers}"
        raise _multimodal_error(source, why, REMOVE_HINT)
    read_training_state(source)


def imported_state_notes(record: TrainingStateRecord) -> Iterator[str]:
    """Yield lines for the user about the state of another library."""
    line = f"training state of step {record['step']}"
    if record["updates"] != record["step"]:
        line += f" and update {record['updates']}"
    line += ", with AdamW"
    if record["optimizer"]:
        settings = ", ".join(f"{name} {value:g}" for name, value in record["optimizer"].items())
        line += f": {settings}"
    yield line
    yield text("a recipe with {} continues it", Key("model.training_state", True))
    if record["left_out"]:
        yield f"not converted: {', '.join(record['left_out'])}"


# --- prep export ---


@dataclass(frozen=True, slots=True)
class StateExport:
    """The weight files of an export, and the part of the export about the training state, if there is one.

    Attributes:
        weight_files: Files of the parameters and of the state.
        source: The source with all tensors to write.
        state: The training state, or None.
        others: Counters and constants with a tensor in the output.
        unconverted: Parts of the source without a place in the output, and of the output without a source.
        folder_name: Default name of the output. Empty for the name of other exports.
        notes: Lines for the user.
    """

    weight_files: WeightFiles
    source: Source
    state: AdamState | None = None
    others: tuple[SourceTensor, ...] = ()
    unconverted: tuple[str, ...] = ()
    folder_name: str = ""
    notes: tuple[str, ...] = ()

    @property
    def tensors(self) -> tuple[SourceTensor, ...]:
        """The tensors of the state to write."""
        if self.state is None:
            return ()
        return *self.state.tensors, *self.others

    @property
    def left_source(self) -> Source:
        """The source with only the unconverted state."""
        if self.state is None:
            return self.source
        return replace(self.source, state_tensors=self.state.left_out)

    def scales(self, scales: Mapping[str, LayoutScale]) -> dict[str, LayoutScale]:
        """Return the scales of the moments, given the scales of the parameters by name."""
        moments: dict[str, LayoutScale] = {}
        if self.state is not None:
            for slot in MOMENTS:
                for name, scale in slot_scales(slot, scales).items():
                    moments[qualify(slot, name)] = scale
        return moments

    def settings(self) -> Manifest:
        """Return the fields of the manifest about the state."""
        if self.state is None:
            return Manifest()
        return Manifest(training_state=self.state.record(list(self.unconverted)))

    def describe(self, planned: PlannedConversion) -> PlannedConversion:
        """Return a planned export with the source, the default name and the notes of its training state."""
        if self.state is None:
            return planned
        return replace(
            planned,
            default_out_name=self.folder_name or planned.default_out_name,
            notes=(*planned.notes, *self.notes),
            source_view=self.source,
        )


def check_state_request(options: ExportOptions, source: Source) -> None:
    """Raise UsageError for options in conflict with a training state."""
    layouts: list[str] = []
    for layout, libraries in LIBRARIES_BY_LAYOUT.items():
        if any(library.state for library in libraries):
            layouts.append(layout)
    conflicts = [
        (options["layout"] not in layouts, Option("layout", options["layout"]),
         f"training states have the layouts {', '.join(layouts)}"),
        (options["map"] is not None, Option("map"), "a map has no names for moments"),
        (options["dtype"] is not None, Option("dtype", options["dtype"]),
         "moments belong to the values that were trained"),
        (source.has_averages, Option("ema", True), "moments belong to the trained parameters"),
        (source.quantized and options["quantized"] == "keep", Option("quantized", "keep"),
         "moments belong to the decoded weights"),
    ]  # fmt: skip
    _check_conflicts(conflicts)
    if source.wrapper is not None:
        why = f"there are no moments for the {towers_title(source)} of {source.display_name}"
        hint = text("{} leaves them out", Option("text_only", True))
        raise _multimodal_error(source, why, hint)


def check_no_adapter(options: ExportOptions, source: Source) -> None:
    """Raise PrepError for the training state of adapters."""
    if options["training_state"]:
        what = text("{} is not supported for adapters", OPTION)
        why = f"{source.display_name} has only adapters, with moments of their own"
        raise PrepError(what, why, REMOVE_HINT)


def _check_conflicts(conflicts: Sequence[tuple[object, Option, str]]) -> None:
    """Raise UsageError for the first option in conflict with a training state: whether it is, the option, and why."""
    for is_conflict, other, why in conflicts:
        if is_conflict:
            what = text("{} is not supported with {}", OPTION, other)
            raise usage_error(what, why, REMOVE_HINT)


def _multimodal_error(source: Source, why: str, hint: str) -> PrepError:
    what = text("{} is not supported for {}", OPTION, models_title(source))
    return usage_error(what, why, hint)


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
    library = find_library(options["layout"], file_format(options))
    kind = library.state
    assert kind is not None
    if not kind.optax or not kind.optax.averages:
        state = state.without_averages()
    missing = kind.missing
    if library.item and kind.optax:
        if kind.has_settings:
            require_settings(source, state)
        item = lay_out_item_state(
            source,
            parameters,
            state,
            layout=options["layout"],
            vocab_size=vocab_rows,
            storage=written_storage(options),
        )
        folder = library.item.folder(state.step, has_state=True)
        files = item_files(item.layout, folder, kind.optax.empty_nodes)
        export = StateExport(files, item.source, state, item.others)
    else:
        adam = prepare_torch_adam(source, parameters, state, row_counts)
        missing = (*missing, *adam.decay_differences(source))
        if library.file_format == DCP_FORMAT:
            dcp, locations = lay_out_dcp_state(adam, shard_nbytes)
            files = WeightFiles(dcp.files, locations, (dcp.metadata,))
        else:
            files = lay_out_weights(
                options,
                source,
                parameters,
                row_counts,
                vocab_rows=vocab_rows,
                shard_nbytes=shard_nbytes,
            )
            files = _with_trainer_files(files, adam)
        export = StateExport(files, source, state)
    unconverted = tuple(_unconverted_parts(source, state, kind, missing))
    name = kind.folder_name.format(step=state.step)
    notes = tuple(_export_notes(state, kind, unconverted))
    return replace(export, unconverted=unconverted, folder_name=name, notes=notes)


def _with_trainer_files(files: WeightFiles, adam: TorchAdam) -> WeightFiles:
    """Return the files of a checkpoint of Trainer, given those of its parameters."""
    optimizer, moments, small_files = lay_out_trainer_state(adam, len(files.files))
    locations: dict[str, Locations] = {name: (place,) for name, place in moments.items()}
    return replace(
        files,
        files=(*files.files, optimizer),
        locations={**files.locations, **locations},
        index=(*files.index, *small_files),
    )


def _unconverted_parts(
    source: Source, state: AdamState, kind: TrainerState, missing: Sequence[str]
) -> dict[str, None]:
    """Return the names of the unconverted parts, each once."""
    parts: dict[str, None] = {}
    if source.training_record is not None:
        parts |= dict.fromkeys(source.training_record["left_out"])
    for tensor in state.left_out:
        slot, name = split_name(tensor.name)
        parts[slot or name] = None
    parts |= dict.fromkeys(missing)
    if kind.lost_clipping and state.clip_norm:
        parts[kind.lost_clipping.format(clip_norm=state.clip_norm)] = None
    if not kind.has_settings:
        parts[NO_SETTINGS] = None
    return parts


def _export_notes(
    state: AdamState, kind: TrainerState, unconverted: Sequence[str]
) -> Iterator[str]:
    """Yield lines for the user."""
    parts = "moments, counters and settings" if kind.has_settings else "moments and counters"
    yield f"training state of step {state.step}: {parts} of AdamW"
    if state.settings is not None:
        yield kind.schedule_note.format(step=state.step, peak_lr=state.settings.peak_lr)
    if kind.optax is not None:
        numbers = kind.optax.numbers(state)
        cases: list[Case] = ["always", "clipped" if numbers["clips"] else "unclipped"]
        if state.averages:
            cases.append("averages")
        for case in cases:
            if case in kind.restore_notes:
                yield kind.restore_notes[case].format(**numbers)
    yield f"not converted: {', '.join(unconverted)}"
