"""The tables `[[data.sources]]` of a recipe: datasets that are mixed by weight."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from pydantic import BaseModel, Field, ValidationError

from prepcli.core.errors import PrepError, usage_error
from trainer.recipe.data_table import Data
from trainer.recipe.formatting import describe_type, example_value, format_value, suggest
from trainer.recipe.key_schema import KeySchema
from trainer.recipe.key_types import STRICT, NonNegativeInt, Paths, PositiveFloat, if_absent
from trainer.recipe.text_fields import (
    AUTO,
    DEFAULT_FIELDS,
    FORMAT_FIELDS,
    DataFormat,
    DataType,
    IdsDtype,
)

SOURCES_KEY = "data.sources"
EVAL_KEYS = ("eval_path", "eval_split")
# Keys of `[data]` that name one dataset. With sources each source has its own.
DATASET_KEYS = ("path", "eval_path", "eval_split", "config", "split", "revision")
# Paths in which `~` and `${NAME}` are expanded.
SOURCE_PATHS = ("path", "eval_path")
NonEmptyText = Annotated[str, Field(min_length=1)]


def _as_in_data(key: str, example: str = "") -> Any:
    """Return the pydantic field for a key of a source, with the examples of the same key in `[data]`.

    Args:
        key: Name of the key in `[data]`.
        example: Example to show instead of the one of `[data]`.
    """
    field = Data.model_fields[key]
    # A source without a key has the value of `[data]`, except for the keys that name a
    # dataset: with sources, `[data]` cannot have them.
    absent = None
    if key in DATASET_KEYS:
        absent = field.json_schema_extra
    examples = field.examples
    if example:
        examples = [example]
    return Field(
        default=None,
        description=f"as `data.{key}`",
        examples=examples,
        json_schema_extra=absent,
    )


class DataSource(BaseModel):
    """A dataset of a mixture. Missing keys have the values of `[data]`."""

    model_config = STRICT

    name: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$",
        description="name in messages and metrics",
        examples=["wiki"],
    )
    path: Paths = Field(description="as `data.path`", examples=["wiki/*.jsonl"])
    weight: PositiveFloat | None = Field(
        default=None,
        description="share of the sequences, relative to the other sources. All sources have one, or none",
        examples=[3],
        json_schema_extra=if_absent("all sequences of all sources are shuffled together"),
    )
    eval_path: Paths | None = _as_in_data("eval_path", example="wiki-validation.jsonl")
    eval_split: NonEmptyText | None = _as_in_data("eval_split")
    type: DataType | None = _as_in_data("type", example="json")
    format: DataFormat | None = _as_in_data("format", example="chat")
    fields: NonEmptyText | None = _as_in_data("fields")
    config: NonEmptyText | None = _as_in_data("config", example="en")
    split: NonEmptyText | None = _as_in_data("split")
    revision: NonEmptyText | None = _as_in_data("revision")
    ids_dtype: IdsDtype | None = _as_in_data("ids_dtype")
    bad_lines: NonNegativeInt | None = _as_in_data("bad_lines")


SOURCE_SCHEMAS: Mapping[str, KeySchema] = DataSource.model_json_schema()["properties"]


def parse_sources(data: Data) -> tuple[DataSource, ...]:
    """Return the sources of a recipe's data, or () if it has a `path`.

    Raises:
        UsageError: A table is invalid, two have the same name, or only some have a weight.
    """
    tables = data.sources or ()
    sources = tuple(_parse_source(number, table) for number, table in enumerate(tables, start=1))
    names = [source.name for source in sources]
    if len({*names}) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise usage_error(
            f"two tables of `{SOURCES_KEY}` have the name {twice!r}", "", "give each its own name"
        )
    unweighted = [source.name for source in sources if source.weight is None]
    if 0 < len(unweighted) < len(names):
        why = f"without one: {', '.join(unweighted)}"
        raise usage_error(
            f"only some tables of `{SOURCES_KEY}` have a weight",
            why,
            "give all of them one, or none",
        )
    return sources


def source_data(data: Data, source: DataSource) -> Data:
    """Return the data of a recipe with one source of its mixture, as if it were the only dataset."""
    keys = source.model_dump(exclude={"name", "weight"}, exclude_none=True)
    data_type = source.type or data.type
    # A source of texts or token ids has no columns, whatever `[data]` says about them.
    from_example = None
    fields = None
    if data_type in DEFAULT_FIELDS:
        from_example = data.fields_from_example
        fields = data.fields
        if from_example is None:
            fields = _source_fields(source.format, fields, DEFAULT_FIELDS[data_type])
    columns = {"fields": fields, "fields_from_example": from_example}
    # Keys of the source have priority over the columns of `[data]`. `model_copy` validates nothing,
    # and both models are valid.
    return data.model_copy(update={**columns, **keys, "sources": None})


def _source_fields(data_format: DataFormat | None, fields: str | None, default: str) -> str | None:
    """Return the columns of a source that names none. None if those of its first record decide.

    Args:
        data_format: Format of the source. None for the one of `[data]`.
        fields: Columns of `[data]`.
        default: Columns of the type of the source.
    """
    if data_format is None:
        return fields
    if data_format == AUTO:
        return None
    return FORMAT_FIELDS.get(data_format, fields or default)


def has_eval_data(data: Data) -> bool:
    """Return whether a run has data to evaluate on: held out, or a separate dataset."""
    has_own = bool(data.eval_paths) or any({*EVAL_KEYS} & {*table} for table in data.sources or ())
    return bool(data.holdout) or has_own


def split_sources(data: Data) -> Iterator[tuple[DataSource | None, Data]]:
    """Yield each source of a recipe with its data, or None with the data if it has no sources."""
    if data.sources is None:
        yield None, data
    for source in parse_sources(data):
        yield source, source_data(data, source)


def _parse_source(number: int, table: Mapping[str, object]) -> DataSource:
    try:
        return DataSource.model_validate(table)
    except ValidationError as error:
        details = error.errors(include_url=False)[0]
    # Outside of the `except` block, so that the error has no pydantic error as its context.
    raise _key_error(number, str(details["loc"][0]), details["type"], table)


def _key_error(number: int, key: str, error_type: str, table: Mapping[str, object]) -> PrepError:
    """Return the error for a key of a table that is unknown, missing or invalid."""
    place = f"table {number} of `{SOURCES_KEY}`"
    if key not in SOURCE_SCHEMAS:
        similar = suggest(key, SOURCE_SCHEMAS)
        hint = f"known: {', '.join(SOURCE_SCHEMAS)}"
        if similar:
            hint = f"did you mean `{similar}`?"
        return usage_error(f"{place}: unknown key `{key}`", "", hint)
    schema = SOURCE_SCHEMAS[key]
    if error_type == "missing" and key not in table:
        state = "missing"
    else:
        state = format_value(table.get(key))
    why = f"it takes {describe_type(schema)}: {schema['description']}"
    return usage_error(f"{place}: `{key}` is {state}", why, f"`{key} = {example_value(schema)}`")
