"""Names of the types of JSON values, for error messages."""

from __future__ import annotations

NAMES = {
    dict: "an object",
    list: "a list",
    str: "a string",
    bool: "a boolean",
    int: "a number",
    float: "a number",
    type(None): "null",
}


def json_type_name(value: object) -> str:
    """Return the type of a value as JSON calls it, with its article; else its Python type."""
    return NAMES.get(type(value)) or f"a value of type {type(value).__name__}"
