"""Recipe values as TOML and as text for messages: of files, of `--set KEY=VALUE`, and of the types that keys take."""

from __future__ import annotations

import difflib
import json
import re
import shlex
import tomllib
from collections.abc import Collection, Mapping
from datetime import date, datetime, time
from decimal import Decimal
from typing import Any

from trainer.recipe.key_types import KeySchema, ValueSchema, alternatives

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
# Deepest nesting of tables and lists.
MAX_DEPTH = 100
# TOML guarantees only 64 bits. Python cannot print an integer of more than 4,300 digits in an error message.
MAX_INTEGER_BITS = 1024
TomlValue = (
    str | int | float | bool | datetime | date | time | list["TomlValue"] | dict[str, "TomlValue"]
)
TomlTable = dict[str, TomlValue]
# A shell expands these signs within double quotes too.
SHELL_EXPANDS = re.compile(r"[$`\\!]")
BARE_TEXT = re.compile(r"[\w./,:+-]+")
# A comment or a string. Strings of several lines come first: `""` begins them too.
QUOTED = re.compile(
    r'''#[^\n]*|"""(?:\\.|[^\\])*?"{3,5}|\'{3}.*?\'{3,5}|"(?:\\.|[^"\\\n])*"|\'[^\'\n]*\'''',
    re.DOTALL,
)
KEY_PART = re.compile(r"""[\w-]+|"(?:\\.|[^"\\])*"|\'[^\']*\'""")
# `[a.b]`, `[[a.b]]` or `a.b =` at the start of a line
KEY_START = re.compile(
    r"[ \t]*(?:(?P<table>\[\[?)[ \t]*)?"
    rf"(?P<key>(?:{KEY_PART.pattern})(?:[ \t]*\.[ \t]*(?:{KEY_PART.pattern}))*)[ \t]*[=\]]"
)


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


def key_line_numbers(content: str) -> dict[str, int]:
    """Return the line, from 1, of the first occurrence of each dotted key and table of a valid TOML document."""
    # Strings of several lines keep only their line breaks.
    content = QUOTED.sub(
        lambda match: "\n" * match[0].count("\n") if "\n" in match[0] else match[0], content
    )
    lines: dict[str, int] = {}
    table: tuple[str, ...] = ()
    depth = 0
    for number, line in enumerate(content.split("\n"), start=1):
        match = KEY_START.match(line)
        # The lines of a list or an inline table begin with values.
        if match and depth == 0:
            parts = tuple(part.strip("\"'") for part in KEY_PART.findall(match["key"]))
            if match["table"]:
                table = parts
            else:
                parts = (*table, *parts)
            for length in range(1, len(parts) + 1):
                lines.setdefault(".".join(parts[:length]), number)
        bare = QUOTED.sub("", line)
        depth += len(re.findall(r"[\[{]", bare)) - len(re.findall(r"[\]}]", bare))
    return lines


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
        pairs: list[str] = []
        for key, item in value.items():
            name = key if BARE_KEY.fullmatch(key) else to_toml(key)
            pairs.append(f"{name} = {to_toml(item)}")
        return f"{{{', '.join(pairs)}}}"
    return str(value)


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


def parse_override_value(text: str, key_schema: KeySchema | None) -> Any:
    """Parse VALUE as TOML, or keep it as text.

    VALUE is text if it is not valid TOML, or if the key takes text and VALUE is TOML of another
    type: `mesh=8`.

    Args:
        text: VALUE.
        key_schema: JSON schema of the key, or None for an unknown key.
    """
    try:
        value = parse_toml_value(text)
    except (ValueError, RecursionError):
        return text
    schemas = alternatives(key_schema) if key_schema else []
    types = {schema.get("items", schema)["type"] for schema in schemas}
    takes_text = bool(types) and types <= {"string"}
    if takes_text and not isinstance(value, str | list):
        return text
    return value


def override_argument(key: str, toml_value: str, key_schema: KeySchema) -> str:
    """Return KEY=VALUE for a shell command, with as few quotes as the value needs.

    Args:
        key: The key.
        toml_value: Its value as TOML.
        key_schema: JSON schema of the key.
    """
    value = parse_toml_value(toml_value)
    if isinstance(value, str) and BARE_TEXT.fullmatch(value):
        texts = [value, toml_value]
    else:
        texts = [toml_value]
    arguments = (f"{key}={text}" for text in texts)
    shortest = (argument for argument in arguments if _reads_back(argument, value, key_schema))
    return next(shortest, f"{key}={shlex.quote(toml_value)}")


def _reads_back(argument: str, value: Any, key_schema: KeySchema) -> bool:
    """Return whether `--set` reads the value from the argument that a shell passes on."""
    words = shlex.split(argument)
    if len(words) != 1 or SHELL_EXPANDS.search(argument):
        return False
    read = parse_override_value(words[0].partition("=")[2].strip(" \t"), key_schema)
    # `1 == 1.0 == True` in Python, so equal values of other types do not count.
    return type(read) is type(value) and read == value
