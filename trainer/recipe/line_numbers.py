"""Line numbers of the keys of a TOML document, which neither tomllib nor pydantic reports."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

KeyPath = tuple[str, ...]


def key_line_numbers(text: str) -> dict[KeyPath, int]:
    """Return the line, from 1, of the first occurrence of each key and table.

    Keys inside a value of several lines get the line on which the value begins.

    Args:
        text: A valid TOML document without carriage returns.
    """
    lines: dict[KeyPath, int] = {}
    table: KeyPath = ()
    for number, statement, values in _statements(text):
        if statement.lstrip().startswith("["):
            table = max(_key_paths(values), key=len)
            lines.setdefault(table, number)
        else:
            for key in _key_paths(values):
                lines.setdefault(table + key, number)
    return lines


def _statements(text: str) -> Iterator[tuple[int, str, Mapping[str, Any]]]:
    """Yield (first line, text, parsed values) of each statement: the fewest lines that tomllib can parse."""
    pending: list[str] = []
    for number, line in enumerate(text.split("\n"), 1):
        pending.append(line)
        statement = "\n".join(pending)
        try:
            values = tomllib.loads(statement)
        except tomllib.TOMLDecodeError:
            continue
        yield number - len(pending) + 1, statement, values
        pending = []


def _key_paths(tree: Mapping[str, Any], parent: KeyPath = ()) -> Iterator[KeyPath]:
    for name, value in tree.items():
        yield (*parent, name)
        if isinstance(value, dict):
            yield from _key_paths(value, (*parent, name))
