"""Read a recipe file and `--set` options into raw values, with the line of each key, before validation."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from trainer.models.errors import PrepError, usage_error
from trainer.recipe.diagnostics import Diagnostic
from trainer.recipe.formatting import format_text, suggest
from trainer.recipe.line_numbers import KeyPath, key_line_numbers
from trainer.recipe.other_formats import find_other_format
from trainer.recipe.override_values import parse_override_value
from trainer.recipe.tables import KEY_SCHEMAS, TABLE_NAMES
from trainer.recipe.toml_values import parse_toml
from trainer.recipe.unknown_keys import set_option_text, unknown_key_hint

# Control characters, and the surrogates that stand for bytes of an argument that are not UTF-8.
INVALID_VALUE_CHARS = re.compile(r"[\x00-\x08\n-\x1f\x7f\ud800-\udfff]")

CHECKPOINT_FILES = ("config.json", "prep-manifest.json", "_METADATA")  # at least one is in each folder of weights
MAX_LISTED_RECIPES = 5
MAX_RECIPE_NBYTES = 16 << 20

SYNTAX_MESSAGES: Mapping[str, str] = {  # start of tomllib's message -> message of the error
    "Cannot overwrite": "duplicate key",
    "Cannot declare": "duplicate table",
    "Cannot mutate": "the table or list is already complete above",
    "Cannot redefine": "duplicate key or table",
    "Invalid value": "invalid value",
    "Unterminated string": "a string has no closing quote",
    "Unclosed array": "a list has no closing bracket",
    "Unclosed inline table": "a table has no closing brace",
    "Expected newline or end of document": "unexpected text at the end of the line",
    "Expected '=' after a key": "a key has no `=` after it",
    "Expected ']'": "a table name has no closing bracket",
    "Invalid initial character for a key": "a key begins with a character that needs quotes",
    "Invalid statement": "the line is neither `key = value`, `[table]` nor a comment",
    "Illegal character": "invalid character: a line break or control character in a string",
    "Found invalid character": "invalid character",
    "Unescaped '\\'": "a backslash in a string must be doubled",
    "Expected": "a character is missing",
}


@dataclass(frozen=True, slots=True)
class RawRecipe:
    """Values of a recipe file, overridden by `--set`, before validation.

    Attributes:
        path: The file.
        tables: Parsed values, with overrides applied.
        overridden_keys: Dotted keys that `--set` gave.
        line_numbers: Line of each key and table of the file.
    """

    path: Path
    tables: Mapping[str, Any]
    overridden_keys: frozenset[str] = frozenset()
    line_numbers: Mapping[KeyPath, int] = field(default_factory=dict)

    def has(self, key: str) -> bool:
        """Return whether the file or `--set` gives a key or a table."""
        table, _, name = key.partition(".")
        values = self.tables.get(table)
        return table in self.tables if not name else isinstance(values, Mapping) and name in values

    def get(self, key: str) -> Any:
        """Return the raw value of a key that `has` finds."""
        table, _, name = key.partition(".")
        return self.tables[table][name] if name else self.tables[table]

    def copy_tables(self) -> dict[str, Any]:
        """Return a copy of the tables that may be changed."""
        return {name: dict(value) if isinstance(value, dict) else value for name, value in self.tables.items()}

    def line_number(self, key: str) -> int:
        """Return the line of a key, else of its table; 0 for overridden keys and keys absent from the file."""
        if key in self.overridden_keys:
            return 0
        path = tuple(key.split("."))
        return self.line_numbers.get(path) or self.line_numbers.get(path[:1], 0)

    def diagnostic(self, key: str, what: str, why: str = "", hint: str = "") -> Diagnostic:
        """Return a diagnostic for a key, at its place: `--set`, file:line, or the file.

        Args:
            key: Dotted key.
            what: What is wrong.
            why: The value that causes it.
            hint: How to fix it.
        """
        line = self.line_number(key)
        place = "--set" if key in self.overridden_keys else f"{self.path}:{line}" if line else f"{self.path}"
        return Diagnostic(place, what, why, hint, line)

    def set_hint(self, key: str, value: str) -> str:
        """Return a hint that sets a key to a TOML value: a `--set` option for overridden keys, else a line."""
        return set_option_text(key, value) if key in self.overridden_keys else f"`{key.rpartition('.')[2]} = {value}`"


def read_recipe(path: Path) -> RawRecipe:
    """Read a recipe file.

    Raises:
        UsageError: The file does not exist, is a folder, is not UTF-8 or not TOML.
        PrepError: The file cannot be read.
    """
    try:
        with path.open("rb") as file:  # may be a pipe: `prep train <(sed ... recipe.toml)`
            data = file.read(MAX_RECIPE_NBYTES + 1)
    except FileNotFoundError:
        similar_name = suggest(path.name, sorted(file.name for file in path.parent.glob("*.toml")))
        hint = f"did you mean `{path.parent / similar_name}`?" if similar_name else "`prep recipes` lists recipes"
        raise usage_error(f"{path} does not exist", "a recipe is a TOML file", hint) from None
    except IsADirectoryError:
        raise _folder_error(path) from None
    except OSError as error:
        raise PrepError(f"{path} cannot be read", error.strerror or str(error)) from None
    if len(data) > MAX_RECIPE_NBYTES:
        raise usage_error(f"{path} is not a recipe", f"it has more than {MAX_RECIPE_NBYTES:,} bytes")
    text = _decode(data, path)
    return RawRecipe(path, _parse_toml(text, path), line_numbers=key_line_numbers(text))


def _folder_error(folder: Path) -> PrepError:
    recipes = sorted(folder.glob("*.toml"))[:MAX_LISTED_RECIPES]
    if recipes or not any((folder / name).exists() for name in CHECKPOINT_FILES):
        hint = f"recipes in it: {', '.join(map(str, recipes))}" if recipes else ""
        return usage_error(f"{folder} is a folder", "a recipe is a TOML file", hint)
    hint = f"`prep train RECIPE.toml --set model.path={folder}`; `prep recipes` lists recipes"
    return usage_error(f"{folder} is a checkpoint", "prep train takes a recipe, a TOML file", hint)


def _decode(data: bytes, path: Path) -> str:
    try:
        return data.decode().removeprefix("\ufeff").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        why = f"byte {error.start} of the file is 0x{error.object[error.start]:02x}"
        raise usage_error(f"{path}:{line}: not UTF-8", why, "save the file as UTF-8") from None


def _parse_toml(text: str, path: Path) -> dict[str, Any]:
    try:
        return parse_toml(text)
    except tomllib.TOMLDecodeError as error:
        if other_format := find_other_format(text):
            why = f"it is {other_format.name}, and a recipe is TOML"
            raise usage_error(f"{path}:{other_format.line}: invalid TOML", why, other_format.hint) from None
        message, _, location = str(error).rpartition(" (at ")  # "line 3, column 7)" or "end of document)"
        line, column = re.findall(r"\d+", location) or (text.count("\n") + 1, None)
        hint = 'text needs quotes: `mesh = "1,1,8"`' if message == "Invalid value" else ""
        column_text = f" (column {column})" if column else ""
        raise usage_error(f"{path}:{line}: invalid TOML", f"{_syntax_message(message)}{column_text}", hint) from None
    except (RecursionError, ValueError):
        why = "lists or tables are nested too deeply, or a number has too many digits"
        raise usage_error(f"{path}: not a recipe", why) from None


def _syntax_message(message: str) -> str:
    """Return a message of tomllib in the words of this project."""
    messages = (text for start, text in SYNTAX_MESSAGES.items() if message.startswith(start))
    return next(messages, "the line is not valid TOML")


def apply_overrides(raw: RawRecipe, overrides: Sequence[str]) -> tuple[RawRecipe, list[Diagnostic]]:
    """Apply `--set` options to a recipe; the last one of a key wins.

    Args:
        raw: The recipe.
        overrides: `KEY=VALUE` texts. VALUE is TOML. It is taken as text if it is not valid TOML, or if the key takes
            text and VALUE is TOML of another type. An empty VALUE removes a key that may be absent.

    Returns:
        The recipe with the overrides, and the diagnostics of invalid overrides.
    """
    tables = raw.copy_tables()
    keys: set[str] = set()
    diagnostics: list[Diagnostic] = []
    for text in overrides:
        override = _parse_override(text)
        if isinstance(override, Diagnostic):
            diagnostics.append(override)
            continue
        key, value = override
        table, _, name = key.rpartition(".")
        values = tables.setdefault(table, {}) if table else tables
        is_unset = value == "" and "absent" in KEY_SCHEMAS[key]
        if isinstance(values, dict) and is_unset:
            values.pop(name, None)
        elif isinstance(values, dict):  # otherwise the file's table is invalid, which validation reports
            values[name] = value
        if is_unset:
            keys.discard(key)
        else:
            keys.add(key)
    return replace(raw, tables=tables, overridden_keys=frozenset(keys)), diagnostics


def _parse_override(text: str) -> tuple[str, Any] | Diagnostic:
    key, equals, value_text = (part.strip(" \t") for part in text.partition("="))
    option = f"--set {format_text(text)}"
    if not equals:
        return Diagnostic(option, "no value", "it takes KEY=VALUE", "`--set optimizer.lr=1e-4`")
    if key in TABLE_NAMES:
        return Diagnostic(option, "a whole table", "it sets one key", f"`--set {key}.KEY=VALUE`")
    if key not in KEY_SCHEMAS:
        hint = unknown_key_hint(key, parse_override_value(value_text, None), is_override=True)
        return Diagnostic("--set", f"unknown key `{key}`", hint=hint)
    if INVALID_VALUE_CHARS.search(value_text):
        return Diagnostic(option, "invalid value", "a value is one line of UTF-8 text without control characters")
    return key, parse_override_value(value_text, KEY_SCHEMAS[key])
