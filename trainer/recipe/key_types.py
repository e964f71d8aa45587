"""Types of recipe keys with their JSON schemas, and their values: from TOML, as TOML, and in messages."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from datetime import date, datetime, time
from decimal import Decimal
from enum import Enum, auto
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, WithJsonSchema

from prepcli.core.errors import usage_error
from prepcli.core.formatting import did_you_mean
from prepcli.models.activation_memory import ActivationName

# TOML has types, so `"8"` for a number is a mistake and is not converted. It also has `inf` and `nan`,
# which no key can use.
STRICT = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)
# Steps and lengths are int32 on devices.
MAX_INT32 = 2**31 - 1
MAX_VALUE_CHARS = 60
# Deepest nesting of tables and lists.
MAX_DEPTH = 100
# TOML guarantees only 64 bits. Python cannot print an integer of more than 4,300 digits in an error message.
MAX_INTEGER_BITS = 1024
BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
# A comment or a string. Strings of several lines come first: `""` begins them too.
QUOTED = re.compile(
    r'''#[^\n]*|"""(?:\\.|[^\\])*?"{3,5}|\'{3}.*?\'{3,5}|"(?:\\.|[^"\\\n])*"|\'[^\'\n]*\'''',
    re.DOTALL,
)
KEY_PART = re.compile(r"""[\w-]+|"(?:\\.|[^"\\])*"|\'[^\']*\'""")
# `[a.b]`, `[[a.b]]` or `a.b =` at the start of a line
KEY_START = re.compile(
    r"[ \t]*(?:(?P<table>\[\[?)[ \t]*)?"
    rf"(?P<key>(?:{KEY_PART.pattern})(?:[ \t]*\.[ \t]*(?:{KEY_PART.pattern}))*)[ \t]*[=\]]"
)
TYPE_NAMES = {
    "integer": "an integer",
    "number": "a number",
    "boolean": "true or false",
    "string": "text",
    "object": "a table",
    "path": "a path",
}
BOUND_SIGNS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
TomlValue = (
    str | int | float | bool | datetime | date | time | list["TomlValue"] | dict[str, "TomlValue"]
)
TomlTable = dict[str, TomlValue]
AnyTable = TypeVar("AnyTable", bound=BaseModel)


# --- Keys that may differ between two starts of a run. Every other key changes the computation or the data.


class OnResume(Enum):
    """How a key that may differ is checked."""

    # Not as a key: its results are equal within rounding, or its content is compared, such as the identity of the
    # tokens and the size of the batch.
    FREE = auto()
    # By the learning rate schedule that it produces
    SCHEDULE = auto()


AnyType = TypeVar("AnyType")
MayChange = Annotated[AnyType, OnResume.FREE]
InSchedule = Annotated[AnyType, OnResume.SCHEDULE]


# --- Types of keys. pydantic derives the schema from a tuple alone, without the text that `_as_tuple` takes. Such
# schemas are written out: error messages and the reference page are made from them.


def _as_tuple(value: object) -> object:
    if isinstance(value, str):
        return (value,)
    # In strict mode pydantic takes no list for a tuple, and TOML has only lists.
    if isinstance(value, list):
        return tuple(value)
    return value


def _any_of(*schemas: dict[str, Any]) -> WithJsonSchema:
    return WithJsonSchema({"anyOf": [*schemas]})


def _list_of(items: dict[str, Any], **bounds: int) -> dict[str, Any]:
    return {"type": "array", "items": items, **bounds}


def if_absent(meaning: str) -> dict[str, Any]:
    """Return JSON schema extras that describe the value of an absent key."""
    return {"absent": meaning}


PATH_PATTERN = r"^[^\x00]+$"
PATH_SCHEMA = {"type": "string", "format": "path", "pattern": PATH_PATTERN}
TEXT_SCHEMA = {"type": "string"}
NON_EMPTY_SCHEMA = {"type": "string", "minLength": 1}
TABLE_SCHEMA = {"type": "object"}
RATIO_SCHEMA = {"type": "number", "minimum": 0, "exclusiveMaximum": 1}

PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
UnitInterval = Annotated[float, Field(ge=0, lt=1)]
NonEmptyText = Annotated[str, Field(min_length=1)]
PathText = Annotated[str, Field(pattern=PATH_PATTERN, json_schema_extra={"format": "path"})]
Paths = Annotated[
    tuple[PathText, ...],
    Field(min_length=1),
    BeforeValidator(_as_tuple),
    _any_of(PATH_SCHEMA, _list_of(PATH_SCHEMA, minItems=1)),
]
DataSources = Annotated[
    tuple[dict[str, Any], ...],
    Field(min_length=1),
    BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value),
    WithJsonSchema(_list_of(TABLE_SCHEMA, minItems=1)),
]
RuleTexts = Annotated[
    tuple[str, ...], BeforeValidator(_as_tuple), _any_of(TEXT_SCHEMA, _list_of(TEXT_SCHEMA))
]
Patterns = Annotated[
    tuple[NonEmptyText, ...],
    BeforeValidator(_as_tuple),
    _any_of(TEXT_SCHEMA, _list_of(TEXT_SCHEMA)),
]
LossTurns = Annotated[
    tuple[NonEmptyText, ...],
    Field(min_length=1),
    BeforeValidator(_as_tuple),
    _any_of(TEXT_SCHEMA, _list_of(NON_EMPTY_SCHEMA, minItems=1)),
]
# A text, or a conversation with `messages` and optionally `tools`.
PromptValue = NonEmptyText | dict[str, Any]
Prompts = Annotated[
    tuple[PromptValue, ...],
    Field(min_length=1),
    BeforeValidator(_as_tuple),
    _any_of(
        TEXT_SCHEMA,
        _list_of(NON_EMPTY_SCHEMA, minItems=1),
        _list_of(TABLE_SCHEMA, minItems=1),
    ),
]
ActivationNames = Annotated[
    tuple[ActivationName, ...],
    Field(min_length=1),
    BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value),
]
DropoutRates = UnitInterval | Literal["config"] | dict[str, Any]
RatioRange = Annotated[
    tuple[UnitInterval, UnitInterval],
    BeforeValidator(_as_tuple),
    WithJsonSchema(_list_of(RATIO_SCHEMA, minItems=2, maxItems=2)),
]
Table = Annotated[dict[str, Any], WithJsonSchema(TABLE_SCHEMA)]
OptionalChunkSize = Annotated[
    PositiveInt | Literal[-1] | None, Field(json_schema_extra=if_absent("chosen for the devices"))
]


# --- Schemas of keys


# JSON schema of a key: description, default, examples, `absent` (see `if_absent`), and `anyOf` or fields of one type
KeySchema = dict[str, Any]


def alternatives(key_schema: KeySchema) -> list[KeySchema]:
    """Return the schemas of a key's accepted types, without null, the value of an absent key."""
    if "anyOf" in key_schema:
        return [schema for schema in key_schema["anyOf"] if schema["type"] != "null"]
    return [key_schema]


def types_of(key_schema: KeySchema) -> set[str]:
    """Return the names of the types that a key takes. A choice of texts has the name `enum`."""
    return {"enum" if "enum" in item else item["type"] for item in alternatives(key_schema)}


def describe_type(key_schema: KeySchema) -> str:
    """Return the type of a key as text: `an integer >= 1 or "all"`."""
    return " or ".join(map(_describe_alternative, alternatives(key_schema)))


def _describe_alternative(schema: KeySchema) -> str:
    """Describe one type that a key takes, e.g. `a number > 0`."""
    if "const" in schema:
        return to_toml(schema["const"])
    if "enum" in schema:
        *first, last = map(to_toml, schema["enum"])
        return f"{', '.join(first)} or {last}"
    if "items" in schema:
        items = schema["items"]
        if "enum" in items:
            return f"a list of {_describe_alternative(items)}"
        # Equal bounds are a fixed length: `a list of 2 numbers`. A list without an upper bound has no count.
        count = ""
        if schema.get("minItems") == schema.get("maxItems", 0):
            count = f"{schema.get('minItems')} "
        noun = TYPE_NAMES[items.get("format", items["type"])].removeprefix("a ")
        return f"a list of {count}{noun}s{_describe_bounds(items)}"
    return TYPE_NAMES[schema.get("format", schema["type"])] + _describe_bounds(schema)


def _describe_bounds(schema: KeySchema) -> str:
    """Return the bounds of a schema with a space before them, e.g. ` >= 1`."""
    bounds = [f"{sign} {schema[bound]}" for bound, sign in BOUND_SIGNS.items() if bound in schema]
    if bounds:
        return f" {' and '.join(bounds)}"
    return ""


def example_value(key_schema: KeySchema) -> object:
    """Return an example of a key's value, or its default."""
    first = alternatives(key_schema)[0]
    examples = key_schema.get("examples") or first.get("examples") or [key_schema.get("default")]
    return examples[0]


def parse_table(model: type[AnyTable], table: Mapping[str, object], place: str) -> AnyTable:
    """Return the model of a table inside of a key, e.g. of `log.wandb`.

    Args:
        model: The model. JSON schemas of recipes describe two levels, e.g. `log.wandb`, and not this third one.
        table: Its values.
        place: The key for messages.

    Raises:
        UsageError: A key is unknown, missing or invalid.
    """
    try:
        return model.model_validate(table)
    except ValidationError as error:
        # A misspelled key may be missing too: the unknown one comes first.
        errors = error.errors(include_url=False)
        details = min(errors, key=lambda item: item["type"] != "extra_forbidden")
    # Outside of the `except` block, so that the error has no pydantic error as its context.
    key = str(details["loc"][0])
    schemas = model.model_json_schema()["properties"]
    if key not in schemas:
        hint = did_you_mean(key, schemas) or f"known: {', '.join(schemas)}"
        raise usage_error(f"{place}: unknown key `{key:.{MAX_VALUE_CHARS}}`", hint=hint)
    schema = schemas[key]
    value = format_value(table[key]) if key in table else "missing"
    why = f"it takes {describe_type(schema)}"
    if "description" in schema:
        why += f": {schema['description']}"
    hint = f"`{key} = {to_toml(example_value(schema))}`"
    raise usage_error(f"{place}: `{key}` is {value}", why, hint)


# --- Values of keys


def parse_toml(text: str) -> TomlTable:
    """Return the values of a TOML document.

    Raises:
        tomllib.TOMLDecodeError: The text is not TOML.
        ValueError: A number has too many digits, or tables or lists are nested too deeply.
        RecursionError: Lists are nested even more deeply.
    """
    values = tomllib.loads(text)
    # tomllib builds the tables of a dotted key `a.a.a` in a loop, to any depth. A recursive search
    # could reach Python's recursion limit.
    pending: list[tuple[Any, int]] = [(values, 0)]
    while pending:
        value, depth = pending.pop()
        if depth > MAX_DEPTH:
            raise ValueError("nested too deeply")
        if isinstance(value, int) and value.bit_length() > MAX_INTEGER_BITS:
            raise ValueError("a number has too many digits")
        if isinstance(value, dict):
            pending += [(child, depth + 1) for child in value.values()]
        elif isinstance(value, list):
            pending += [(child, depth + 1) for child in value]
    return values


def parse_override_value(text: str, key_schema: KeySchema) -> Any:
    """Parse VALUE of KEY=VALUE as TOML, or keep it as text.

    VALUE is text if it is not valid TOML, or if the key takes text and VALUE is TOML of another
    type: `mesh=8`.
    """
    try:
        value = parse_toml(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return text
    types = {schema.get("items", schema)["type"] for schema in alternatives(key_schema)}
    if types <= {"string"} and not isinstance(value, str | list):
        return text
    return value


def key_line_numbers(content: str) -> dict[str, int]:
    """Return the line, from 1, of the first occurrence of each dotted key and table of a valid TOML document."""
    # Strings of several lines keep only their line breaks.
    content = QUOTED.sub(
        lambda match: "\n" * match[0].count("\n") if "\n" in match[0] else match[0], content
    )
    lines: dict[str, int] = {}
    table: tuple[str, ...] = ()
    depth = 0
    for number, line in enumerate(content.split("\n"), start=1):
        match = KEY_START.match(line)
        # The lines of a list or an inline table begin with values.
        if match and depth == 0:
            parts = tuple(part.strip("\"'") for part in KEY_PART.findall(match["key"]))
            if match["table"]:
                table = parts
            else:
                parts = (*table, *parts)
            for length in range(1, len(parts) + 1):
                lines.setdefault(".".join(parts[:length]), number)
        bare = QUOTED.sub("", line)
        depth += len(re.findall(r"[\[{]", bare)) - len(re.findall(r"[\]}]", bare))
    return lines


def to_toml(value: object) -> str:
    """Return a value as TOML. A table becomes an inline table, dates and times use Python's format."""
    # JSON escapes all characters that TOML requires to be escaped, except DEL.
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(to_toml, value))}]"
    if isinstance(value, float) and 0 < abs(value) < 0.01:
        # repr(2e-5) is `2e-05`, and recipes have `2e-5`. Of two texts of equal length the decimal one stays:
        # 0.0025, not 2.5e-3.
        return min(repr(value), f"{Decimal(repr(value)).normalize():e}", key=len)
    if isinstance(value, dict):
        pairs: list[str] = []
        for key, item in value.items():
            name = key if BARE_KEY.fullmatch(key) else to_toml(key)
            pairs.append(f"{name} = {to_toml(item)}")
        return f"{{{', '.join(pairs)}}}"
    return str(value)


def format_value(value: object) -> str:
    """Return a value for a message, cut to MAX_VALUE_CHARS. A table becomes the words "a table"."""
    if isinstance(value, dict):
        return "a table"
    # An argument may not be UTF-8.
    text = to_toml(value).encode("utf-8", "backslashreplace").decode()
    if len(text) <= MAX_VALUE_CHARS:
        return text
    return f"{text[: MAX_VALUE_CHARS - 3]}..."


def change_text(values: tuple[object, object]) -> str:
    """Return the values of a key before and now as text, e.g. `false -> not set`."""
    return " -> ".join("not set" if value is None else to_toml(value) for value in values)
