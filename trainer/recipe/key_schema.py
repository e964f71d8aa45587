"""The JSON schema of a recipe key, as pydantic writes it."""

from __future__ import annotations

from typing import Literal, Required, TypedDict, cast

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
