"""The training state of another framework in `prep save-init`: its checks, its notes and its record."""

# pyright: reportTypedDictNotRequiredAccess=false
# The decorator `public` has added the default of each option.

from __future__ import annotations

from collections.abc import Iterator

from prepcli.commands.operations.options import SaveInitOptions
from prepcli.commands.operations.training_state import read_training_state
from prepcli.core.errors import Key, Option, text, usage_error
from prepcli.planning.manifest_fields import Manifest, TrainingStateRecord
from prepcli.sources.multimodal import models_title, towers_title
from prepcli.sources.source import Source


def check_imported_state(options: SaveInitOptions, source: Source) -> None:
    """Check a source for a training state, and the options for conflicts with it.

    Raises:
        UsageError: An option contradicts the state.
        PrepError: The source has no moments of AdamW.
    """
    option = Option("training_state", True)
    conflicts = [
        (options["layers"], Option("layers"), "the moments of the other layers would be lost"),
        (options["init"] != "zeros", Option("init"), "new rows have moments of zeros"),
        (options["untie"], Option("untie"), "a tied head has no moments of its own"),
        (options["dtype"], Option("dtype"), "moments belong to the values that were trained"),
        (
            source.family.is_verbatim,
            Option("verbatim"),
            "prep trains models of known families only",
        ),
    ]
    for is_conflict, other, why in conflicts:
        if is_conflict:
            what = text("{} is not supported with {}", option, other)
            raise usage_error(what, why, text("remove {}", option))
    if source.wrapper is not None:
        raise usage_error(
            text("{} is not supported for {}", option, models_title(source)),
            f"the optimizer of {source.display_name} numbers the {towers_title(source)} as well",
            text("remove {}", option),
        )
    read_training_state(source)


def imported_step_fields(record: TrainingStateRecord) -> Manifest:
    """Return the fields of a step's manifest for the state of another framework."""
    return Manifest(step=record["step"], training_state=record)


def imported_state_notes(record: TrainingStateRecord) -> Iterator[str]:
    """Yield lines for the user."""
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
