"""The training state of a source: read it, import it with `prep save-init`, and write it with `prep export`."""

# pyright: reportTypedDictNotRequiredAccess=false
# The decorator `public` has added the default of each option.

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import replace

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
from prepcli.models.param_tree import DecayRule
from prepcli.planning.libraries import (
    LIBRARIES_BY_LAYOUT,
    NO_SETTINGS,
    AdamSettings,
    Case,
    TrainerState,
    find_library,
)
from prepcli.planning.manifest_fields import Manifest, TrainingStateRecord
from prepcli.planning.tensors import split_name
from prepcli.sources.adam_state import (
    AdamState,
    read_adam_state,
    require_settings,
)
from prepcli.sources.model_family import models_title, towers_title
from prepcli.sources.source import Source
from prepcli.targets.planner import Draft, with_state
from prepcli.targets.torch_folder import prepare_torch_adam
from prepcli.targets.trees import with_item_state

OPTION = Option("training_state", True)
REMOVE_HINT = text("remove {}", OPTION)


def read_training_state(source: Source) -> AdamState:
    """Return the training state of a source. Only the counters are read.

    A step of a run has the settings of its optimizer in the recipe of its manifest.

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


def draft_state(options: ExportOptions, draft: Draft) -> Draft:
    """Return a draft with the training state of its source in the form of another library."""
    source = draft.source
    state = read_training_state(source)
    kind = _state_kind(options)
    if not kind.optax or not kind.optax.averages:
        state = state.without_averages()
    missing = kind.missing
    if kind.optax:
        if kind.has_settings:
            require_settings(source, state)
        draft = with_item_state(draft, state, options["layout"])
    else:
        draft = with_state(draft, state)
        missing = (*missing, *prepare_torch_adam(draft).decay_differences(source))
    unconverted = [*_unconverted_parts(source, state, kind, missing)]
    settings = Manifest(training_state=state.record(unconverted))
    return replace(draft, settings=settings | draft.settings)


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


def state_folder_name(options: ExportOptions, state: AdamState) -> str:
    """Return the default name of an output with a training state. Empty for the name of other exports."""
    return _state_kind(options).folder_name.format(step=state.step)


def exported_state_notes(options: ExportOptions, draft: Draft) -> Iterator[str]:
    """Yield lines for the user about the training state of a draft."""
    state = draft.state
    record = draft.settings.training_state
    assert state is not None
    assert record is not None
    kind = _state_kind(options)
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
    yield f"not converted: {', '.join(record['left_out'])}"


def _state_kind(options: ExportOptions) -> TrainerState:
    """Return the training states of the library of an export."""
    kind = find_library(options["layout"], options["format"]).state
    assert kind is not None
    return kind
