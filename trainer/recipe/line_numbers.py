"""On which line a key stands: neither tomllib nor pydantic says."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

KeyPath = tuple[str, ...]


def key_line_numbers(text: str) -> dict[KeyPath, int]:
    """The line, from 1, on which each key and each table of a TOML document first stands.

    What is inside a value of several lines stands where the value begins. The document must be whole, with `\\n` only.
    """
    lines: dict[KeyPath, int] = {}
    table: KeyPath = ()
    for number, statement, found in _statements(text):
        if statement.lstrip().startswith("["):
            table = max(_key_paths(found), key=len)
            lines.setdefault(table, number)
        else:
            for key in _key_paths(found):
                lines.setdefault(table + key, number)
    return lines


def _statements(text: str) -> Iterator[tuple[int, str, Mapping[str, Any]]]:
    """Each statement with its first line and what it says by itself: the fewest lines that tomllib can read."""
    waiting: list[str] = []
    for number, line in enumerate(text.split("\n"), 1):
        waiting.append(line)
        statement = "\n".join(waiting)
        try:
            found = tomllib.loads(statement)
        except tomllib.TOMLDecodeError:
            continue
        yield number - len(waiting) + 1, statement, found
        waiting = []


def _key_paths(tree: Mapping[str, Any], parent: KeyPath = ()) -> Iterator[KeyPath]:
    for name, value in tree.items():
        yield (*parent, name)
        if isinstance(value, dict):
            yield from _key_paths(value, (*parent, name))
