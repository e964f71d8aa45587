"""Types of recipe keys, their JSON schemas, and the configuration that all tables share."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Required, TypedDict, cast

from pydantic import BeforeValidator, ConfigDict, Field, WithJsonSchema

from prepcli.models.activation_memory import ActivationName

# TOML has types, so `"8"` for a number is a mistake and is not converted. It also has `inf` and `nan`,
# which no key can use.
STRICT = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)
# Steps and lengths are int32 on devices.
MAX_INT32 = 2**31 - 1
PATH_PATTERN = r"^[^\x00]+$"
PATH_SCHEMA = {"type": "string", "format": "path", "pattern": PATH_PATTERN}


def _as_tuple(value: object) -> object:
    if isinstance(value, str):
        return (value,)
    # In strict mode pydantic takes no list for a tuple, and TOML has only lists.
    if isinstance(value, list):
        return tuple(value)
    return value


PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
UnitInterval = Annotated[float, Field(ge=0, lt=1)]
PathText = Annotated[str, Field(pattern=PATH_PATTERN, json_schema_extra={"format": "path"})]
# pydantic derives the schema from the tuple alone, without the text that `_as_tuple` takes.
# The schema is written out: error messages and the reference page are made from it.
Paths = Annotated[
    tuple[PathText, ...],
    Field(min_length=1),
    BeforeValidator(_as_tuple),
    WithJsonSchema(
        {"anyOf": [PATH_SCHEMA, {"type": "array", "items": PATH_SCHEMA, "minItems": 1}]}
    ),
]


DataSources = Annotated[
    tuple[dict[str, Any], ...],
    Field(min_length=1),
    BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value),
    WithJsonSchema({"type": "array", "items": {"type": "object"}, "minItems": 1}),
]
RuleTexts = Annotated[
    tuple[str, ...],
    BeforeValidator(_as_tuple),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}),
]
Patterns = Annotated[
    tuple[Annotated[str, Field(min_length=1)], ...],
    BeforeValidator(_as_tuple),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}),
]
LossTurns = Annotated[
    tuple[Annotated[str, Field(min_length=1)], ...],
    Field(min_length=1),
    BeforeValidator(_as_tuple),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1},
            ]
        }
    ),
]
# A text, or a conversation with `messages` and optionally `tools`.
PromptValue = Annotated[str, Field(min_length=1)] | dict[str, Any]
Prompts = Annotated[
    tuple[PromptValue, ...],
    Field(min_length=1),
    BeforeValidator(_as_tuple),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1},
                {"type": "array", "items": {"type": "object"}, "minItems": 1},
            ]
        }
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
    WithJsonSchema(
        {
            "type": "array",
            "items": {"type": "number", "minimum": 0, "exclusiveMaximum": 1},
            "minItems": 2,
            "maxItems": 2,
        }
    ),
]


TemplateArguments = Annotated[dict[str, Any], WithJsonSchema({"type": "object"})]
ProfileSteps = Annotated[dict[str, Any], WithJsonSchema({"type": "object"})]


def if_absent(meaning: str) -> dict[str, Any]:
    """Return JSON schema extras that describe the value of an absent key."""
    return {"absent": meaning}


OptionalChunkSize = Annotated[
    PositiveInt | Literal[-1] | None, Field(json_schema_extra=if_absent("chosen for the devices"))
]


JsonType = Literal["integer", "number", "boolean", "string", "object", "array", "null"]


class ValueSchema(TypedDict, total=False):
    """JSON schema of the values of one type."""

    type: Required[JsonType]
    format: str
    # One value, or one of several texts.
    const: object
    enum: list[str]
    minimum: float
    maximum: float
    exclusiveMinimum: float
    exclusiveMaximum: float
    pattern: str
    minLength: int
    items: ValueSchema
    minItems: int
    maxItems: int


class KeySchema(TypedDict, total=False):
    """JSON schema of a key: its documentation, and `anyOf` or the fields of a ValueSchema."""

    description: Required[str]
    anyOf: list[ValueSchema]
    default: object
    examples: list[object]
    # The meaning of an absent key, see `if_absent`.
    absent: str


def alternatives(key_schema: KeySchema) -> list[ValueSchema]:
    """Return the schemas of a key's accepted types, without null, the value of an absent key."""
    if "anyOf" in key_schema:
        return [schema for schema in key_schema["anyOf"] if schema["type"] != "null"]
    return [cast(ValueSchema, key_schema)]
