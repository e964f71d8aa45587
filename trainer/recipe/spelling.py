"""Values and what keys take, as text."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Collection, Mapping
from decimal import Decimal
from typing import Any

KINDS = {
    "integer": "an integer",
    "number": "a number",
    "boolean": "true or false",
    "string": "text",
    "object": "a table",
    "path": "a path",
}
BOUNDS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
LONGEST = 60


def spelled(value: object) -> str:
    """A value as TOML has it; tables in lists, dates and times only as a reader would."""
    if isinstance(value, str):  # of what TOML refuses in a string, JSON lets this one character pass
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(spelled, value))}]"
    if isinstance(value, float) and 0 < abs(value) < 0.01:
        return min(repr(value), _scientific(value), key=len)
    return "a table" if isinstance(value, dict) else str(value)


def _scientific(value: float) -> str:
    """The same number with an exponent and no padding: 3e-4."""
    sign, digits, exponent = Decimal(repr(value)).normalize().as_tuple()
    first, *rest = map(str, digits)
    fraction = f".{''.join(rest)}" if rest else ""
    return f"{'-' * sign}{first}{fraction}e{int(exponent) + len(rest)}"


def plain(text: str) -> str:
    """TOML text without its quotes where a shell and `--set` read it alike without them."""
    return text[1:-1] if re.fullmatch(r'"[\w./,:+-]+"', text) else text


def shown(value: object) -> str:
    """A value for a message: not longer than a line has room for."""
    text = spelled(value).encode("utf-8", "backslashreplace").decode()  # a command line can hold what is not UTF-8
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."


def options(part: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The kinds of values that a part of a schema allows, without null: a key that is not given."""
    return [each for each in part.get("anyOf", [part]) if each.get("type") != "null"]


def takes(part: Mapping[str, Any]) -> str:
    """What a key takes: `an integer >= 1 or "all"`."""
    return " or ".join(map(_option, options(part)))


def _option(part: Mapping[str, Any]) -> str:
    if "const" in part:
        return spelled(part["const"])
    if "enum" in part:
        *first, last = map(spelled, part["enum"])
        return f"{', '.join(first)} or {last}"
    if part["type"] == "array":
        return f"a list of {KINDS[part['items']['format']].removeprefix('a ')}s"
    bounds = [f"{sign} {part[bound]}" for bound, sign in BOUNDS.items() if bound in part]
    return " ".join([KINDS[part.get("format", part["type"])], " and ".join(bounds)]).rstrip()


def example(part: Mapping[str, Any]) -> str:
    """A value that a key takes, as TOML has it."""
    return spelled(part["examples"][0] if "examples" in part else part["default"])


def near(word: str, known: Collection[str]) -> str:
    """The one that was probably meant, empty where none is near."""
    return next(iter(difflib.get_close_matches(word[:LONGEST], known, n=1)), "")
