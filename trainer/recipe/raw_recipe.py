"""What a user gave: a file and `--set` options, as they stand, and where each key stands."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from trainer.models.errors import PrepError, usage
from trainer.recipe.faults import Fault
from trainer.recipe.line_numbers import Key, key_lines
from trainer.recipe.spelling import near, options, shown
from trainer.recipe.tables import KEYS, TABLES
from trainer.recipe.unknown import hint_for, set_option

NOT_IN_TOML = re.compile(r"[\x00-\x08\n-\x1f\x7f\ud800-\udfff]")  # the last are bytes of a command line, not UTF-8

SYNTAX: Mapping[str, str] = {  # how tomllib's messages begin
    "Cannot overwrite": "the key is there twice",
    "Cannot declare": "the table is there twice",
    "Cannot mutate": "the table or list was complete above",
    "Cannot redefine": "the key or table is there twice",
    "Invalid value": "a value is not TOML",
    "Unterminated string": "a text has no closing quote",
    "Unclosed array": "a list has no closing bracket",
    "Unclosed inline table": "a table has no closing brace",
    "Expected newline or end of document": "more follows where the line should end",
    "Expected '=' after a key": "a key has no `=` after it",
    "Expected ']'": "the name of a table has no closing bracket",
    "Invalid initial character for a key": "a key begins with a character that needs quotes",
    "Invalid statement": "the line is neither `key = value`, `[table]` nor a comment",
    "Illegal character": "a character is not allowed here: a line break or control character inside a text",
    "Found invalid character": "a character is not allowed here",
    "Unescaped '\\'": "a backslash in a text has to be doubled",
    "Expected": "a sign is missing",
}


@dataclass(frozen=True, slots=True)
class Given:
    """A recipe as it was given: the file's `text`, and `tables` of raw values in which those of `sets` stand.

    `sets`: dotted keys that `--set` gave; `lines`: where keys and tables stand. No key is known to be right.
    """

    path: Path
    text: str
    tables: Mapping[str, Any]
    sets: frozenset[str] = frozenset()
    lines: Mapping[Key, int] = field(default_factory=dict)

    def has(self, key: str) -> bool:
        """Whether the file or `--set` gives a key or a table."""
        table, _, name = key.partition(".")
        values = self.tables.get(table)
        return table in self.tables if not name else isinstance(values, Mapping) and name in values

    def get(self, key: str) -> Any:
        """The raw value of a key that is given."""
        table, _, name = key.partition(".")
        return self.tables[table][name] if name else self.tables[table]

    def copied(self) -> dict[str, Any]:
        """The tables, to be changed."""
        return {name: dict(value) if isinstance(value, dict) else value for name, value in self.tables.items()}

    def line(self, key: str) -> int:
        """The line on which a key stands, or else its table; 0 for a key of `--set`, and where the file has neither."""
        whole = tuple(key.split("."))
        return 0 if key in self.sets else self.lines.get(whole) or self.lines.get(whole[:1], 0)

    def fault(self, key: str, what: str, why: str = "", hint: str = "") -> Fault:
        """The fault of a key, with the place where the key stands: `--set`, file:line, or the file."""
        line = self.line(key)
        place = "--set" if key in self.sets else f"{self.path}:{line}" if line else f"{self.path}"
        return Fault(place, what, why, hint, line)

    def hint(self, key: str, value: str) -> str:
        """How to give a key another value, where it was given."""
        return set_option(key, value) if key in self.sets else f"`{key.rpartition('.')[2]} = {value}`"


def read(path: Path) -> Given:
    """What a file gives. PrepError where it is not there, no file, not UTF-8 or not TOML."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        meant = near(path.name, sorted(each.name for each in path.parent.glob("*.toml")))
        hint = f"did you mean `{path.parent / meant}`?" if meant else ""
        raise usage(f"{path} does not exist", "a recipe is a TOML file", hint) from None
    except IsADirectoryError:
        raise usage(f"{path} is a folder", "a recipe is a TOML file", _recipes_in(path)) from None
    except OSError as error:
        raise PrepError(f"{path} cannot be read", error.strerror or str(error)) from None
    text = _text(data, path)
    tables = _tables(text, path)
    return Given(path, text, tables, lines=key_lines(text))


def _recipes_in(folder: Path) -> str:
    found = sorted(folder.glob("*.toml"))[:5]
    return f"there: {', '.join(map(str, found))}" if found else ""


def _text(data: bytes, path: Path) -> str:
    try:
        return data.decode().removeprefix("\ufeff").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        why = f"byte {error.start} of the file is 0x{error.object[error.start]:02x}"
        raise usage(f"{path}:{line}: not UTF-8", why, "save the file as UTF-8") from None


def _tables(text: str, path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        why, _, at = str(error).rpartition(" (at ")  # line 3, column 7) or end of document)
        line, column = re.findall(r"\d+", at) or (text.count("\n") + 1, None)
        hint = 'text stands in quotes: `mesh = "1,1,8"`' if why == "Invalid value" else ""
        column_text = f" (column {column})" if column else ""
        raise usage(f"{path}:{line}: not TOML", f"{_syntax(why)}{column_text}", hint) from None
    except (RecursionError, ValueError):
        raise usage(f"{path}: not a recipe", "lists are nested too deeply, or a number has too many digits") from None


def _syntax(why: str) -> str:
    """What tomllib says of a document, in plain words; the general fault where it says something else."""
    return next((text for start, text in SYNTAX.items() if why.startswith(start)), "the line cannot be read as TOML")


def with_sets(given: Given, sets: Sequence[str]) -> tuple[Given, list[Fault]]:
    """What is given with `a.b=v` texts in place of the file's values, the last one of a key; and the texts' faults.

    v is TOML; where it is not, or where the key takes text and v is none, it is text as it stands.
    """
    tables = given.copied()
    keys: set[str] = set()
    faults: list[Fault] = []
    for text in sets:
        setting = _setting(text)
        if isinstance(setting, Fault):
            faults.append(setting)
            continue
        key, value = setting
        table, _, name = key.rpartition(".")
        values = tables.setdefault(table, {}) if table else tables
        if isinstance(values, dict):  # else the file is wrong, and validation says so
            values[name] = value
        keys.add(key)
    return replace(given, tables=tables, sets=frozenset(keys)), faults


def _setting(text: str) -> tuple[str, Any] | Fault:
    key, equals, right = (part.strip(" \t") for part in text.partition("="))
    option = f"--set {shown(text)[1:-1]}"
    if not equals:
        return Fault(option, "no value", "it takes KEY=VALUE", "`--set optimizer.lr=1e-4`")
    if key in TABLES:
        return Fault(option, "a whole table", "it sets one key", f"`--set {key}.KEY=VALUE`")
    if key not in KEYS:
        return Fault("--set", f"unknown key `{key}`", hint=hint_for(key, _value(right, ()), is_set=True))
    if NOT_IN_TOML.search(right):
        return Fault(option, "not one line of text", "a value is what a line of a recipe can hold")
    return key, _value(right, {option["type"] for option in options(KEYS[key])})


def _value(text: str, types: Collection[str]) -> Any:
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return text
    is_text = bool(types) and {*types} <= {"string", "array"}
    return text if is_text and not isinstance(value, str | list) else value  # mesh=8: text
