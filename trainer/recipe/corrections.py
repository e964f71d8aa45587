"""Corrections of invalid recipe values, for the hints of errors."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

from trainer.recipe.formatting import example_value, to_toml
from trainer.recipe.key_schema import KeySchema, ValueSchema, alternatives
from trainer.recipe.other_trainers import value_for_synonym
from trainer.recipe.toml_values import parse_toml_value

_PYTHON_TYPES = {
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "string": str,
    "object": dict,
}


def suggest_value(value: Any, key_schema: KeySchema) -> str:
    """Return the corrected value as TOML, or the key's example if it cannot be corrected."""
    return correct_value(value, key_schema) or example_value(key_schema)


def correct_value(value: Any, key_schema: KeySchema) -> str:
    """Return a value as TOML in a form accepted by a key.

    Args:
        value: The value that the user gave.
        key_schema: JSON schema of the key.

    Returns:
        The first accepted candidate, or "" if there is none.
    """
    for candidate in (value, *_candidate_values(value)):
        if is_accepted(candidate, key_schema):
            return to_toml(candidate)
    return ""


def _candidate_values(value: Any) -> Iterator[Any]:
    """Yield likely meanings of a value: text as a number or list, 20.0 as 20, bf16 as bfloat16, a list as `1,8,1`."""
    if isinstance(value, str):
        yield value.lower()
        yield value_for_synonym(value)
        yield [value]
        for text in (value.strip(), value.strip().lower()):
            parsed = _parse_toml_value(text)
            if not isinstance(parsed, str):
                yield parsed
                yield from _candidate_values(parsed)
    elif isinstance(value, float) and value.is_integer():
        yield int(value)
    elif isinstance(value, list) and value and all(type(item) is int for item in value):
        yield ",".join(map(str, value))


def _parse_toml_value(text: str) -> Any:
    """Return the TOML value in a text, or the text itself if it has none."""
    try:
        return parse_toml_value(text)
    except (ValueError, RecursionError, KeyError):
        return text


def is_accepted(value: Any, key_schema: KeySchema) -> bool:
    """Return whether a key accepts a value, by the key's JSON schema."""
    return any(_is_accepted_by(value, alternative) for alternative in alternatives(key_schema))


def _is_accepted_by(value: Any, alternative: ValueSchema) -> bool:
    """Return whether a key of this schema takes the value."""
    if "const" in alternative:
        # `1 == True` in Python, so the types are compared as well.
        return value == alternative["const"] and type(value) is type(alternative["const"])
    if "enum" in alternative:
        return isinstance(value, str) and value in alternative["enum"]
    if "items" in alternative:
        items = alternative["items"]
        minimum = alternative.get("minItems", 1)
        maximum = alternative.get("maxItems", math.inf)
        has_valid_length = isinstance(value, list) and minimum <= len(value) <= maximum
        return has_valid_length and all(_is_accepted_by(item, items) for item in value)
    # In Python a bool is an int, in JSON schema it is not.
    if isinstance(value, bool) != (alternative["type"] == "boolean"):
        return False
    if not isinstance(value, _PYTHON_TYPES.get(alternative["type"], ())):
        return False
    if isinstance(value, dict):
        return bool(value)
    if isinstance(value, str):
        return len(value) >= alternative.get("minLength", 0) and bool(
            # JSON schema does not anchor patterns, so this is no `fullmatch`.
            re.search(alternative.get("pattern", ""), value)
        )
    return _is_within(value, alternative)


def _is_within(value: float, alternative: ValueSchema) -> bool:
    """Return whether a number is within the bounds of a schema."""
    return (
        (isinstance(value, int) or math.isfinite(value))
        and value >= alternative.get("minimum", -math.inf)
        and value > alternative.get("exclusiveMinimum", -math.inf)
        and value <= alternative.get("maximum", math.inf)
        and value < alternative.get("exclusiveMaximum", math.inf)
    )
