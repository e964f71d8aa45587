"""Names of the types of JSON values, for error messages."""

from __future__ import annotations


def json_type_name(value: object) -> str:
    """Return the type of a value as JSON calls it, with its article."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
