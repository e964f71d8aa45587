"""Recipe values and the types of recipe keys as text."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Collection, Mapping
from decimal import Decimal

from trainer.recipe.key_schema import KeySchema, ValueSchema, alternatives

TYPE_NAMES = {
    "integer": "an integer",
    "number": "a number",
    "boolean": "true or false",
    "string": "text",
    "object": "a table",
    "path": "a path",
}
BOUND_SIGNS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
MAX_VALUE_CHARS = 60
BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


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
        return min(repr(value), _scientific_text(value), key=len)
    if isinstance(value, dict):
        return (
            f"{{{', '.join(f'{_toml_key(key)} = {to_toml(item)}' for key, item in value.items())}}}"
        )
    return str(value)


def _toml_key(key: str) -> str:
    if BARE_KEY.fullmatch(key):
        return key
    return to_toml(key)


def _scientific_text(value: float) -> str:
    """Return a number in scientific notation without padding: 3e-4."""
    # E.g. 0.00025 has the digits 2 5 and the exponent -5, and the text 2.5e-4: one digit is behind the point.
    sign, digits, exponent = Decimal(repr(value)).normalize().as_tuple()
    first, *rest = map(str, digits)
    fraction = f".{''.join(rest)}" if rest else ""
    return f"{'-' * sign}{first}{fraction}e{int(exponent) + len(rest)}"


def format_value(value: object) -> str:
    """Return a value for a message, cut to MAX_VALUE_CHARS. A table becomes the words "a table"."""
    if isinstance(value, dict):
        return "a table"
    return _cut_text(to_toml(value))


def format_text(text: str) -> str:
    """Return a text for a message, without quotes, cut to MAX_VALUE_CHARS."""
    return _cut_text(to_toml(text)[1:-1])


def _cut_text(text: str) -> str:
    """Shorten a text to the length of a value in an error."""
    # An argument may not be UTF-8.
    text = text.encode("utf-8", "backslashreplace").decode()
    if len(text) <= MAX_VALUE_CHARS:
        return text
    return f"{text[: MAX_VALUE_CHARS - 3]}..."


def describe_type(key_schema: KeySchema) -> str:
    """Return the type of a key as text: `an integer >= 1 or "all"`."""
    return " or ".join(map(_describe_alternative, alternatives(key_schema)))


def _describe_alternative(alternative: ValueSchema) -> str:
    """Describe one type that a key takes, e.g. `a number above 0`."""
    if "const" in alternative:
        return to_toml(alternative["const"])
    if "enum" in alternative:
        *first, last = map(to_toml, alternative["enum"])
        return f"{', '.join(first)} or {last}"
    if "items" in alternative:
        items = alternative["items"]
        if "enum" in items:
            return f"a list of {_describe_alternative(items)}"
        # Equal bounds are a fixed length: `a list of 2 numbers`. A list without an upper bound has no count.
        count = ""
        if alternative.get("minItems") == alternative.get("maxItems", 0):
            count = f"{alternative.get('minItems')} "
        noun = TYPE_NAMES[items.get("format", items["type"])].removeprefix("a ")
        return f"a list of {count}{noun}s{_describe_bounds(items)}"
    return TYPE_NAMES[alternative.get("format", alternative["type"])] + _describe_bounds(
        alternative
    )


def _describe_bounds(schema: ValueSchema) -> str:
    """Return the bounds of a schema with a space before them, e.g. ` >= 1`."""
    values: Mapping[str, object] = schema
    bounds = [f"{sign} {values[bound]}" for bound, sign in BOUND_SIGNS.items() if bound in values]
    if bounds:
        return f" {' and '.join(bounds)}"
    return ""


def example_value(key_schema: KeySchema) -> str:
    """Return an example of a key's value, or its default, as TOML."""
    if "examples" in key_schema:
        return to_toml(key_schema["examples"][0])
    return to_toml(key_schema.get("default"))


def suggest(word: str, known: Collection[str]) -> str:
    """Return the known word closest to a misspelled one, or "" if none is close."""
    # difflib takes time in proportion to both lengths, and a key of a file may have megabytes.
    return next(iter(difflib.get_close_matches(word[:MAX_VALUE_CHARS], known, n=1)), "")


def change_text(values: tuple[object, object]) -> str:
    """Return the values of a key before and now as text, e.g. `false -> not set`."""
    return " -> ".join("not set" if value is None else to_toml(value) for value in values)
