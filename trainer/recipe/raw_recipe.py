"""What a user gave: a file and `--set` options, as they stand, and where each key stands."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from trainer.models.errors import PrepError, usage_error
from trainer.recipe.diagnostics import Diagnostic
from trainer.recipe.formatting import alternatives, format_value, suggest
from trainer.recipe.line_numbers import KeyPath, key_line_numbers
from trainer.recipe.tables import KEY_SCHEMAS, TABLE_NAMES
from trainer.recipe.unknown_keys import set_option_text, unknown_key_hint

INVALID_VALUE_CHARS = re.compile(
    r"[\x00-\x08\n-\x1f\x7f\ud800-\udfff]"
)  # the last are bytes of a command line, not UTF-8

SYNTAX_MESSAGES: Mapping[str, str] = {  # how tomllib's messages begin
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
class RawRecipe:
    """A recipe as it was given: the file's `text`, and `tables` of raw values in which those of `sets` stand.

    `sets`: dotted keys that `--set` gave; `lines`: where keys and tables stand. No key is known to be right.
    """

    path: Path
    text: str
    tables: Mapping[str, Any]
    overridden_keys: frozenset[str] = frozenset()
    line_numbers: Mapping[KeyPath, int] = field(default_factory=dict)

    def has(self, key: str) -> bool:
        """Whether the file or `--set` gives a key or a table."""
        table, _, name = key.partition(".")
        values = self.tables.get(table)
        return table in self.tables if not name else isinstance(values, Mapping) and name in values

    def get(self, key: str) -> Any:
        """The raw value of a key that is given."""
        table, _, name = key.partition(".")
        return self.tables[table][name] if name else self.tables[table]

    def copy_tables(self) -> dict[str, Any]:
        """The tables, to be changed."""
        return {name: dict(value) if isinstance(value, dict) else value for name, value in self.tables.items()}

    def line_number(self, key: str) -> int:
        """The line on which a key stands, or else its table; 0 for a key of `--set`, and where the file has neither."""
        whole = tuple(key.split("."))
        return 0 if key in self.overridden_keys else self.line_numbers.get(whole) or self.line_numbers.get(whole[:1], 0)

    def diagnostic(self, key: str, what: str, why: str = "", hint: str = "") -> Diagnostic:
        """The fault of a key, with the place where the key stands: `--set`, file:line, or the file."""
        line = self.line_number(key)
        place = "--set" if key in self.overridden_keys else f"{self.path}:{line}" if line else f"{self.path}"
        return Diagnostic(place, what, why, hint, line)

    def set_hint(self, key: str, value: str) -> str:
        """How to give a key another value, where it was given."""
        return set_option_text(key, value) if key in self.overridden_keys else f"`{key.rpartition('.')[2]} = {value}`"


def read_recipe(path: Path) -> RawRecipe:
    """What a file gives. PrepError where it is not there, no file, not UTF-8 or not TOML."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        meant = suggest(path.name, sorted(each.name for each in path.parent.glob("*.toml")))
        hint = f"did you mean `{path.parent / meant}`?" if meant else ""
        raise usage_error(f"{path} does not exist", "a recipe is a TOML file", hint) from None
    except IsADirectoryError:
        raise usage_error(f"{path} is a folder", "a recipe is a TOML file", _recipes_hint(path)) from None
    except OSError as error:
        raise PrepError(f"{path} cannot be read", error.strerror or str(error)) from None
    text = _decode(data, path)
    tables = _parse_toml(text, path)
    return RawRecipe(path, text, tables, line_numbers=key_line_numbers(text))


def _recipes_hint(folder: Path) -> str:
    found = sorted(folder.glob("*.toml"))[:5]
    return f"there: {', '.join(map(str, found))}" if found else ""


def _decode(data: bytes, path: Path) -> str:
    try:
        return data.decode().removeprefix("\ufeff").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        why = f"byte {error.start} of the file is 0x{error.object[error.start]:02x}"
        raise usage_error(f"{path}:{line}: not UTF-8", why, "save the file as UTF-8") from None


def _parse_toml(text: str, path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        why, _, at = str(error).rpartition(" (at ")  # line 3, column 7) or end of document)
        line, column = re.findall(r"\d+", at) or (text.count("\n") + 1, None)
        hint = 'text stands in quotes: `mesh = "1,1,8"`' if why == "Invalid value" else ""
        column_text = f" (column {column})" if column else ""
        raise usage_error(f"{path}:{line}: not TOML", f"{_syntax_message(why)}{column_text}", hint) from None
    except (RecursionError, ValueError):
        raise usage_error(
            f"{path}: not a recipe", "lists are nested too deeply, or a number has too many digits"
        ) from None


def _syntax_message(why: str) -> str:
    """What tomllib says of a document, in plain words; the general fault where it says something else."""
    return next(
        (text for start, text in SYNTAX_MESSAGES.items() if why.startswith(start)), "the line cannot be read as TOML"
    )


def apply_overrides(raw: RawRecipe, overrides: Sequence[str]) -> tuple[RawRecipe, list[Diagnostic]]:
    """What is given with `a.b=v` texts in place of the file's values, the last one of a key; and the texts' faults.

    v is TOML; where it is not, or where the key takes text and v is none, it is text as it stands.
    """
    tables = raw.copy_tables()
    keys: set[str] = set()
    faults: list[Diagnostic] = []
    for text in overrides:
        setting = _parse_override(text)
        if isinstance(setting, Diagnostic):
            faults.append(setting)
            continue
        key, value = setting
        table, _, name = key.rpartition(".")
        values = tables.setdefault(table, {}) if table else tables
        if isinstance(values, dict):  # else the file is wrong, and validation says so
            values[name] = value
        keys.add(key)
    return replace(raw, tables=tables, overridden_keys=frozenset(keys)), faults


def _parse_override(text: str) -> tuple[str, Any] | Diagnostic:
    key, equals, right = (part.strip(" \t") for part in text.partition("="))
    option = f"--set {format_value(text)[1:-1]}"
    if not equals:
        return Diagnostic(option, "no value", "it takes KEY=VALUE", "`--set optimizer.lr=1e-4`")
    if key in TABLE_NAMES:
        return Diagnostic(option, "a whole table", "it sets one key", f"`--set {key}.KEY=VALUE`")
    if key not in KEY_SCHEMAS:
        return Diagnostic(
            "--set", f"unknown key `{key}`", hint=unknown_key_hint(key, _parse_value(right, ()), is_override=True)
        )
    if INVALID_VALUE_CHARS.search(right):
        return Diagnostic(option, "not one line of text", "a value is what a line of a recipe can hold")
    return key, _parse_value(right, {option["type"] for option in alternatives(KEY_SCHEMAS[key])})


def _parse_value(text: str, types: Collection[str]) -> Any:
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return text
    is_text = bool(types) and {*types} <= {"string", "array"}
    return text if is_text and not isinstance(value, str | list) else value  # mesh=8: text
