"""Checks of the recipe keys that turn records into examples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prepcli.core.errors import Key, PrepError, text, usage_error
from trainer.recipe.data_table import Data
from trainer.recipe.field_grammar import parse_fields
from trainer.recipe.formatting import format_value
from trainer.recipe.problems import Problem, problem_if_raised
from trainer.recipe.span_corruption import SPAN_CORRUPTION, recipe_span_sizes
from trainer.recipe.tables import Recipe, value_of
from trainer.recipe.text_fields import (
    AUTO,
    CHAT_FORMATS,
    CONCATENATED,
    DEFAULT_FIELDS,
    FORMAT_FIELDS,
    PLAIN,
    TRAINING,
    WHOLE_TOKENS,
)

SOURCE_KEYS = ("data.source_length", "data.source_prefix")
NOISE_KEYS = ("data.noise_density", "data.mean_noise_span_length")
COLUMN_KEYS = ("data.fields", "data.fields_from_example", "data.format", "data.subfield_separator")
# Keys of conversations.
CHAT_KEYS = (
    "data.chat_template",
    "data.template_args",
    "data.template_date",
    "data.loss",
    "data.loss_reasoning",
)
# The loss of turns that `TRAINING` can find.
TRAINING_LOSS = (("assistant",), ("last",))
TEXT_KEYS = ("data.prepend_text", "data.subfield_separator")


def field_problems(recipe: Recipe) -> Iterator[Problem]:
    """Yield the problems of the data's columns and fields."""
    if recipe.data.type not in DEFAULT_FIELDS:
        yield from _column_problems(recipe)
    else:
        yield from _list_problems(recipe)
    if not recipe.data.has_auto_shape:
        yield from _source_problems(recipe)
    yield from _objective_problems(recipe)


def chat_problems(data: Data, *, is_only: bool = True) -> Iterator[Problem]:
    """Yield keys that do not fit conversations, and keys of conversations for other data.

    Args:
        data: Data of one source. Any of it may be found by its columns, if it names no format.
        is_only: Whether it is the only source. In a mixture the keys may be meant for another one.
    """
    if data.format == AUTO:
        return
    if data.format not in CHAT_FORMATS:
        if is_only:
            why = f"there are no conversations: `data.format` is {data.format}"
            yield from _set_key_problems(data, CHAT_KEYS, why)
        return
    if data.type in DEFAULT_FIELDS and data.fields_from_example is None:
        why = f"`data.format` is {data.format}, and its template makes the text"
        yield from _set_key_problems(data, TEXT_KEYS, why)
    if data.chat_template == TRAINING and data.loss not in TRAINING_LOSS:
        why = "`data.chat_template` is training, which finds the turns of the assistant only"
        yield Problem(
            ("data.loss",),
            f"`data.loss` is {format_value(data.loss)}",
            why,
            '"assistant" or "last"',
        )


def _set_key_problems(data: Data, keys: Sequence[str], why: str) -> Iterator[Problem]:
    """Yield the keys that do not have their default."""
    for key in keys:
        # A default counts as absent, even if it is written: the complete recipe that a run keeps
        # has all keys, and must load without errors.
        name = key.removeprefix("data.")
        value = getattr(data, name)
        if value != type(data).model_fields[name].default:
            yield Problem((key,), f"`{key}` is {format_value(value)}", why, "remove it")


def check_source_length(data: Data, *, has_encoder: bool) -> None:
    """Raise UsageError if an encoder reads sources of the data and the recipe does not limit their length."""
    if not has_encoder or data.source_length is not None:
        return
    if data.fields_from_example is not None or (data.fields and parse_fields(data.fields).source):
        why = "the model has an encoder, which reads at most that number of tokens of a source"
        raise usage_error(
            "`data.source_length` is missing", why, text("{}", Key("data.source_length", 512))
        )


def check_packing(data: Data, *, has_encoder: bool) -> None:
    """Raise UsageError if a model with or without an encoder cannot train on the sequences of the data."""
    if has_encoder and data.packing != CONCATENATED:
        why = (
            "the model has an encoder: each pair of a source and a target is a sequence of its own"
        )
        raise usage_error(f"`data.packing` is {format_value(data.packing)}", why, "remove it")
    if data.overlong != WHOLE_TOKENS and (has_encoder or data.type not in DEFAULT_FIELDS):
        why = "files of this type have no records, whose tokens can be cut"
        if has_encoder:
            why = "the model has an encoder: sources and targets are truncated"
        raise usage_error(f"`data.overlong` is {format_value(data.overlong)}", why, "remove it")
    if data.objective == SPAN_CORRUPTION and not has_encoder:
        why = "the model has no encoder to read the text without the spans"
        raise usage_error(
            f"`data.objective` is {format_value(data.objective)}",
            why,
            "remove it, or take a T5 model",
        )


def _column_problems(recipe: Recipe) -> Iterator[Problem]:
    """Yield the column keys of a recipe with a data type that has no columns."""
    data = recipe.data
    defaults = {
        key: type(data).model_fields[key.removeprefix("data.")].default for key in COLUMN_KEYS
    }
    for key, default in defaults.items():
        # The recipes that earlier versions kept with a run have the format `text` for all types.
        if value_of(recipe, key) not in (default, PLAIN):
            use = "names a column" if key.startswith("data.fields") else "is for columns"
            why = f"it {use} of json objects, but `data.type` is {data.type}"
            yield Problem(
                (key,),
                f"`{key}` is {format_value(value_of(recipe, key))}",
                why,
                text("{}", Key("data.type", "json")),
            )


def _list_problems(recipe: Recipe) -> Iterator[Problem]:
    data = recipe.data
    if data.fields_from_example is not None:
        for key, is_set in (
            ("data.fields", data.fields is not None),
            ("data.format", data.format in FORMAT_FIELDS),
        ):
            if is_set:
                why = f"`data.fields_from_example` is {format_value(data.fields_from_example)}"
                yield Problem(
                    (key,),
                    f"`{key}` is {format_value(value_of(recipe, key))}",
                    why,
                    "remove one of them",
                )
    elif data.format not in CHAT_FORMATS and not data.has_auto_shape:
        yield from problem_if_raised(lambda: parse_fields(data.fields or ""), "data.fields")


def _source_problems(recipe: Recipe) -> Iterator[Problem]:
    """Yield the keys that are for sources of an encoder, if the recipe has no source."""
    data = recipe.data
    if data.fields_from_example is not None:
        return
    try:
        has_columns = data.type in DEFAULT_FIELDS and data.format not in CHAT_FORMATS
        has_source = has_columns and bool(parse_fields(data.fields or "").source)
    except PrepError:
        # Reported by _list_problems.
        return
    # Span corruption makes sources from the text itself, and needs their length.
    keys = ("data.source_prefix",) if data.objective == SPAN_CORRUPTION else SOURCE_KEYS
    for key in keys:
        if value_of(recipe, key) is not None and not has_source:
            what = f"`{key}` is {format_value(value_of(recipe, key))}"
            why = "`data.fields` has no source in brackets"
            yield Problem((key,), what, why, text("{}", Key("data.fields", "[article], summary")))


def _objective_problems(recipe: Recipe) -> Iterator[Problem]:
    """Yield keys that span corruption does not support, and keys of span corruption without it."""
    data = recipe.data
    if data.objective != SPAN_CORRUPTION:
        for key in NOISE_KEYS:
            if value_of(recipe, key) != type(data).model_fields[key.removeprefix("data.")].default:
                what = f"`{key}` is {format_value(value_of(recipe, key))}"
                why = f"`data.objective` is {data.objective}"
                yield Problem((key,), what, why, text("{}", Key("data.objective", SPAN_CORRUPTION)))
        return
    yield from problem_if_raised(
        lambda: recipe_span_sizes(data), "data.source_length", "data.seq_length", *NOISE_KEYS
    )
    is_set = {
        "data.format": data.format not in (AUTO, PLAIN),
        "data.fields": data.fields is not None and "[" in data.fields,
        "data.fields_from_example": data.fields_from_example is not None,
        "data.packing": data.packing != "concatenate",
        "data.always_start_with_bos": data.always_start_with_bos,
    }
    for key in (key for key, value in is_set.items() if value):
        what = f"`{key}` is {format_value(value_of(recipe, key))}"
        yield Problem(
            (key,), what, "span corruption takes blocks of concatenated text", "remove it"
        )
