"""Parse untrusted JSON with limits on nesting and numbers."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from typing import Any, NoReturn

from prepcli.core.json_types import JsonObject, JsonValue

# Nested objects and lists. Python's recursion limit of 1,000 frames stops recursive code at about
# 900.
MAX_DEPTH = 100
# Floats end at 1.8e308: a larger integer cannot become a float.
MAX_INTEGER_DIGITS = 300


def load_json(data: bytes) -> Any:
    """Return the value of a JSON text.

    `NaN`, `Infinity` and `-Infinity` are accepted: Python writes them, e.g. into the config.json of
    Falcon-H1.

    Args:
        data: The text in UTF-8.

    Raises:
        ValueError: It is not JSON, a number has too many digits, a text is not Unicode, or objects
            or lists are nested too deeply.

    Example:
        >>> load_json(b'{"time_step_limit": [0.0, Infinity]}')
        {'time_step_limit': [0.0, inf]}
    """
    try:
        value = _DECODER.decode(data.decode("utf-8-sig"))
    except UnicodeError as error:
        raise ValueError("its text is not UTF-8") from error
    except RecursionError as error:
        raise _depth_error() from error
    check_depth(value)
    if b"\\ud" in data.lower():
        _check_surrogates(value)
    return value


def check_depth(value: JsonValue) -> None:
    """Raise ValueError if objects or lists are nested too deeply."""
    # A stack of (value, depth) instead of recursion, which would end at Python's own limit.
    pending: list[tuple[JsonObject | list[JsonValue], int]] = []
    if isinstance(value, dict | list):
        pending.append((value, 1))
    while pending:
        container, depth = pending.pop()
        if depth > MAX_DEPTH:
            raise _depth_error()
        children: Iterable[JsonValue] = container
        if isinstance(container, dict):
            children = container.values()
        pending += [(child, depth + 1) for child in children if isinstance(child, dict | list)]


def _check_surrogates(value: Any) -> None:
    """Raise ValueError for a text that no file can have in UTF-8."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError("a text has half of a surrogate pair") from error


def _depth_error() -> ValueError:
    return ValueError(f"its JSON is nested more than {MAX_DEPTH} levels deep")


def _parse_integer(digits: str) -> int:
    if len(digits) > MAX_INTEGER_DIGITS:
        raise ValueError(f"a number has {len(digits):,} digits")
    return int(digits)


_DECODER = json.JSONDecoder(parse_int=_parse_integer)


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
    """Return the JSON name of a value's type with its article, e.g. `a list`."""
    return NAMES.get(type(value)) or f"a value of type {type(value).__name__}"


def quote_name(name: str) -> str:
    """Quote a name for a message: without control characters and at most 100 characters long."""
    if len(name) <= 100 and name.isprintable():
        return f"`{name}`"
    return ascii(name[:100])


def is_json_list(value: object) -> bool:
    """Return whether a value is a text that looks like a JSON list, as in CSV files."""
    return isinstance(value, str) and value.lstrip().startswith("[")


def parse_json(text: bytes) -> Any:
    """Parse JSON. Integers outside of 0 to 10^19 - 1 become -1.

    Raises:
        ValueError: The text is not JSON, or an object has a duplicate name.
    """
    try:
        value = _STRICT_DECODER.decode(text.decode())
        check_depth(value)
    except json.JSONDecodeError as error:
        raise ValueError(f"its JSON is broken: {error.msg}") from error
    except UnicodeError as error:
        raise ValueError("its text is not UTF-8") from error
    except RecursionError as error:
        raise ValueError("its JSON is nested too deeply") from error
    return value


def _unique_object(pairs: list[tuple[str, JsonValue]]) -> JsonObject:
    document = dict(pairs)
    if len(document) != len(pairs):
        duplicate = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"it names {quote_name(duplicate)} twice")
    for name in document:
        # Python's JSON accepts half of a surrogate pair, other parsers do not.
        name.encode()
    return document


def _parse_count(digits: str) -> int:
    # int() of a million digits takes hours.
    return int(digits) if digits.isdigit() and len(digits) < 20 else -1


def _reject_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


# json.loads would accept duplicate names (two parsers could see two values), NaN, and integers of
# any length.
_STRICT_DECODER = json.JSONDecoder(
    object_pairs_hook=_unique_object, parse_int=_parse_count, parse_constant=_reject_constant
)
