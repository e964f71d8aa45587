"""A complete recipe as text: as TOML, and as sentences about what a run will do. No data or devices are needed."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from prepcli.core.formatting import count_text
from trainer.recipe.data_table import Data, split_sources
from trainer.recipe.key_types import to_toml, types_of
from trainer.recipe.lr_schedule import DECAYS, LRSchedule, build_lr_schedule, warmup_steps_of
from trainer.recipe.tables import EVAL_LOSS, Recipe, key_schemas_of, value_of
from trainer.recipe.text_fields import CHAT_FORMATS, FORMAT_FIELDS, WHOLE_TOKENS

# Column of the comments of a written recipe, unless a value is longer.
COMMENT_COLUMN = 48
# The table that differs between the processes of a run.
PROCESS_TABLE = "cluster"
# Turns of a conversation by the value of `data.loss`.
TURNS: Mapping[tuple[str, ...], str] = {
    ("assistant",): "the turns of the assistant",
    ("last",): "the last turn of the assistant",
    ("all",): "all turns",
}
# What becomes of records longer than a sequence, by `data.overlong`.
OVERLONG_TEXTS = {
    "truncate": "lose their end",
    "truncate_prompt": "lose the start of their prompt",
    "drop": "are left out",
}
# A field without loss, e.g. `[question+context]`.
BRACKETED_FIELD = re.compile(r"\[[^\[\]]*\]")


def recipe_to_toml(recipe: Recipe, origins: Mapping[str, str]) -> str:
    """Return TOML text with every key of a recipe except those of `cluster`, which `load_recipe` can read.

    Args:
        recipe: The recipe.
        origins: Origins of values from outside the file, by dotted key. Written as comments.
    """
    lines: list[str] = []
    current_table = ""
    for key, key_schema in key_schemas_of(recipe.optimizer.type).items():
        table, _, name = key.rpartition(".")
        if table == PROCESS_TABLE:
            continue
        if table != current_table:
            lines += ["", f"[{table}]"]
            current_table = table
        value = value_of(recipe, key)
        # A list of one text becomes the text if the key takes it.
        is_one = isinstance(value, tuple) and len(value) == 1 and isinstance(value[0], str)
        if is_one and "string" in types_of(key_schema):
            value = value[0]
        line = f"{name} = {to_toml(value)}"
        if value is None:
            line = f"# {name}: {key_schema.get('absent')}"
        lines.append(f"{line:<{COMMENT_COLUMN}}# {origins[key]}" if key in origins else line)
    return "\n".join(lines) + "\n"


def recipe_lines(recipe: Recipe) -> Iterator[str]:
    """Yield the schedule, and the settings of the data and of evaluations that the recipe has."""
    yield _planned_schedule_text(recipe)
    yield from data_lines(recipe.data)
    if text := evaluation_text(recipe):
        yield text


def _planned_schedule_text(recipe: Recipe) -> str:
    """Return the learning rate of a run as text. Its steps are unknown if they depend on the data."""
    if recipe.train.steps is not None:
        return schedule_text(build_lr_schedule(recipe.optimizer, recipe.train.steps))
    table = recipe.optimizer
    # A recipe has steps or epochs.
    assert recipe.train.epochs is not None
    length = f"over {_epochs_text(recipe.train.epochs)}"
    if DECAYS[table.schedule].is_open and not table.warmup_ratio:
        # It does not depend on the steps of the run.
        return f"{schedule_text(build_lr_schedule(table, 1))} {length}"
    parts = [f"learning rate {table.lr:g}"]
    start = f"{table.warmup_shape} warm-up from {table.init_lr:g} in"
    if steps := warmup_steps_of(table, 0):
        parts.append(f"{start} {count_text(steps, 'step')}")
    elif table.warmup_ratio:
        parts.append(f"{start} {100 * table.warmup_ratio:g} % of the steps")
    decay = str(table.schedule)
    if not DECAYS[table.schedule].is_open:
        decay += f" to {table.end_lr:g}"
    if table.decay_steps:
        decay += f" at step {table.decay_steps:,}"
    parts.append(f"{decay} {length}")
    return ", ".join(parts)


def schedule_text(schedule: LRSchedule) -> str:
    """Return the learning rate at the start, after warm-up and at the end as text."""
    parts = [f"learning rate {schedule.peak:g}"]
    if schedule.warmup:
        parts.append(
            f"{schedule.warmup_shape} warm-up from {schedule.initial:g} in {count_text(schedule.warmup, 'step')}"
        )
    parts.append(DECAYS[schedule.kind].text.format(schedule))
    return ", ".join(parts)


def evaluation_text(recipe: Recipe, n_rows: int | None = None) -> str:
    """Return when a run evaluates, on which windows, and whether this ends it early, as text.

    Args:
        recipe: The recipe.
        n_rows: Rows of an evaluation. None if they are unknown. The text is then empty without settings.
    """
    train = recipe.train
    stride = recipe.eval.stride
    parts = ["evaluation"]
    if train.eval_every_epochs is not None:
        parts.append(f"every {_epochs_text(train.eval_every_epochs)}")
    elif train.eval_every:
        parts.append(f"every {count_text(train.eval_every, 'step')}")
    rows = "sequences" if stride is None else "windows"
    if n_rows is not None:
        parts.append(f"on {n_rows:,} {rows}")
    elif stride is not None:
        parts.append(f"on {rows}")
    if stride is not None:
        parts.append(f"with stride {stride:,}")
    text = " ".join(parts)
    if recipe.eval.patience:
        metric = recipe.checkpoint.best or EVAL_LOSS
        text += f"; the run ends after {recipe.eval.patience} without a better {metric}"
    if text == "evaluation":
        return ""
    return text


def _epochs_text(epochs: float) -> str:
    """Return a number of epochs as text."""
    return "1 epoch" if epochs == 1 else f"{epochs:g} epochs"


def data_lines(data: Data, *, is_read: bool = False) -> Iterator[str]:
    """Yield which tokens have loss, unless all have, and what becomes of long records, unless they are split.

    Args:
        data: The data of a recipe.
        is_read: Whether the data was read. If so, other lines name the shape that its columns have.
    """
    # Text -> the sources that it describes
    names: dict[str, list[str]] = {}
    count = 0
    for source, part in split_sources(data):
        count += 1
        if is_read and part.has_auto_shape:
            continue
        if text := _loss_text(part):
            names.setdefault(text, []).append("" if source is None else source.name)
    for text, sources in names.items():
        line = f"loss on {text}"
        if len(sources) < count:
            line = f"{', '.join(sources)}: {line}"
        yield line
    if data.overlong != WHOLE_TOKENS:
        outcome = OVERLONG_TEXTS[data.overlong]
        yield f"records of more than {count_text(data.seq_length, 'token')} {outcome}"


def _loss_text(data: Data) -> str:
    """Return which tokens of a dataset have loss as text. Empty if all have."""
    if data.objective == "span_corruption":
        return "the spans that the encoder does not read"
    turns = TURNS.get(data.loss, f"the turns of {', '.join(data.loss)}")
    if not data.loss_reasoning:
        turns += " without their reasoning"
    if data.has_auto_shape:
        return f"{turns}, on completions or on all of a text: the columns of the data decide"
    if data.fields_from_example is not None:
        return "the fields of each example outside of brackets"
    if data.format == "alpaca":
        return turns
    fields = data.fields or FORMAT_FIELDS.get(data.format, "")
    masked = BRACKETED_FIELD.findall(fields)
    others = [field.strip() for field in BRACKETED_FIELD.sub("", fields).split(",")]
    if data.format in CHAT_FORMATS:
        others = [turns]
    elif not masked:
        return ""
    text = ", ".join(field for field in others if field)
    if masked:
        text += f", none on {', '.join(masked)}"
    return text
