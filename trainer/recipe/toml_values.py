"""Parse TOML of users: nesting and numbers are limited, so that the values can be searched, compared and shown."""

from __future__ import annotations

import tomllib
from datetime import date, datetime, time
from typing import Any

# Deepest nesting of tables and lists.
MAX_DEPTH = 100
# TOML guarantees only 64 bits. Python cannot print an integer of more than 4,300 digits in an error message.
MAX_INTEGER_BITS = 1024
TomlValue = (
    str | int | float | bool | datetime | date | time | list["TomlValue"] | dict[str, "TomlValue"]
)
TomlTable = dict[str, TomlValue]


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


def parse_toml_value(text: str) -> TomlValue:
    """Return one value, as it may follow `key =`. See `parse_toml` for the errors.

    Raises:
        KeyError: The text has no value.
    """
    return parse_toml(f"value = {text}")["value"]
