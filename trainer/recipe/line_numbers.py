"""Line numbers of the keys of a TOML document, which neither tomllib nor pydantic reports."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

KeyPath = tuple[str, ...]

# What can end, begin or continue a statement. Strings of several lines come first: `""` begins them too.
_TOKEN = re.compile(
    r'''"""(?:\\.|[^\\])*?"""(?:"{0,2})'''
    r"""|'''(?:.)*?'''(?:'{0,2})"""
    r"""|"(?:\\.|[^"\\\n])*"|'[^'\n]*'"""
    r"|#[^\n]*|[\[\]{}\n]",
    re.DOTALL,
)


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
            # `[a.b]` parses to {"a": {"b": {}}} with the paths (a) and (a, b). The longest is the
            # table.
            table = max(_key_paths(values), key=len)
            lines.setdefault(table, number)
        else:
            for key in _key_paths(values):
                lines.setdefault(table + key, number)
    return lines


def _statements(text: str) -> Iterator[tuple[int, str, Mapping[str, Any]]]:
    """Yield (first line, text, parsed values) of each statement: the lines up to the end of its strings and lists."""
    start = 0
    depth = 0
    line = 1
    for token in _TOKEN.finditer(f"{text}\n"):
        depth += (token[0] in ("[", "{")) - (token[0] in ("]", "}"))
        # A line break within brackets does not end a statement. Brackets within strings and
        # comments are part of those tokens.
        if token[0] == "\n" and depth == 0:
            statement = text[start : token.start()]
            yield line, statement, tomllib.loads(statement)
            start = token.end()
            line += statement.count("\n") + 1


def _key_paths(tree: Mapping[str, Any], parent: KeyPath = ()) -> Iterator[KeyPath]:
    for name, value in tree.items():
        yield (*parent, name)
        if isinstance(value, dict):
            yield from _key_paths(value, (*parent, name))
