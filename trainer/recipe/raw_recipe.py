"""Read a recipe file and `--set` options into raw values, with the line of each key, before validation."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from prepcli.core.errors import Command, Option, PrepError, text, usage_error
from trainer.recipe.formatting import format_text, suggest
from trainer.recipe.override_values import parse_override_value
from trainer.recipe.problems import Diagnostic
from trainer.recipe.tables import KEY_SCHEMAS, TABLE_NAMES
from trainer.recipe.toml_values import TomlTable, TomlValue, parse_toml
from trainer.recipe.unknown_keys import override_hint, unknown_key_hint

# Control characters, and the surrogates of bytes of an argument that are not UTF-8.
INVALID_VALUE_CHARS = re.compile(r"[\x00-\x08\n-\x1f\x7f\ud800-\udfff]")

# Each folder of weights has at least one of these files.
CHECKPOINT_FILES = ("config.json", "prep-manifest.json", "_METADATA")
MAX_LISTED_RECIPES = 5
# Limit on the memory that a wrong path, such as a file of weights, can take.
MAX_RECIPE_NBYTES = 16 << 20

# Start of a message of tomllib -> message of the error. The words of tomllib may change between
# Python versions: an unknown message becomes "the line is not valid TOML".
SYNTAX_MESSAGES: Mapping[str, str] = {
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

OVERRIDES = Option("overrides")
RECIPES_HINT = text("{} lists recipes", Command("recipes"))
KeyPath = tuple[str, ...]

# What can end, begin or continue a statement. Strings of several lines come first: `""` begins them too.
_TOKEN = re.compile(
    r'''"""(?:\\.|[^\\])*?"""(?:"{0,2})'''
    r"""|'''(?:.)*?'''(?:'{0,2})"""
    r"""|"(?:\\.|[^"\\\n])*"|'[^'\n]*'"""
    r"|#[^\n]*|[\[\]{}\n]",
    re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class RawRecipe:
    """Values of a recipe file, overridden by `--set`, before validation.

    Attributes:
        path: The file.
        tables: Parsed values, with overrides applied.
        overridden_keys: Dotted keys that `--set` gave.
        line_numbers: Line of each key and table of the file.
        is_of_options: The values come from options of a command without a recipe file.
    """

    path: Path
    tables: Mapping[str, TomlValue]
    overridden_keys: frozenset[str] = frozenset()
    line_numbers: Mapping[KeyPath, int] = field(default_factory=dict)
    is_of_options: bool = False

    def has(self, key: str) -> bool:
        """Return whether the file or `--set` gives a key or a table."""
        table, _, name = key.partition(".")
        values = self.tables.get(table)
        if not name:
            return table in self.tables
        return isinstance(values, Mapping) and name in values

    def get(self, key: str) -> TomlValue:
        """Return the raw value of a key that `has` finds."""
        table, _, name = key.partition(".")
        value = self.tables[table]
        if not name:
            return value
        assert isinstance(value, dict)
        return value[name]

    def copy_tables(self) -> TomlTable:
        """Return a copy of the tables that may be changed."""
        tables = dict(self.tables)
        for name, value in tables.items():
            if isinstance(value, dict):
                tables[name] = dict(value)
        return tables

    def line_number(self, key: str) -> int:
        """Return the line of a key, else of its table, or 0 for overridden keys and keys absent from the file."""
        if key in self.overridden_keys:
            return 0
        path = tuple(key.split("."))
        return self.line_numbers.get(path) or self.line_numbers.get(path[:1], 0)

    def diagnostic(self, key: str, what: str, why: str = "", hint: str = "") -> Diagnostic:
        """Return a diagnostic for a key, at its place: the override, file:line, or the file.

        Args:
            key: Dotted key.
            what: What is wrong.
            why: The value that causes it.
            hint: How to fix it.
        """
        if key in self.overridden_keys:
            return _override_diagnostic(OVERRIDES, what, why, hint)
        line = self.line_number(key)
        place = f"{self.path}:{line}" if line else f"{self.path}"
        return Diagnostic(place, what, why, hint, line)

    def set_hint(self, key: str, value: str) -> str:
        """Return a hint that sets a key to a TOML value: a line of the file, or an option for values of options."""
        if key in self.overridden_keys or self.is_of_options:
            return override_hint(key, value)
        return f"`{key.rpartition('.')[2]} = {value}`"


def read_recipe(path: Path) -> RawRecipe:
    """Read a recipe file.

    Raises:
        UsageError: The file does not exist, is a folder, is not UTF-8 or not TOML.
        PrepError: The file cannot be read.
    """
    try:
        # The file may be a pipe without a size, `prep train <(sed ... recipe.toml)`: read one byte
        # more than the limit instead of asking for the size.
        with path.open("rb") as file:
            data = file.read(MAX_RECIPE_NBYTES + 1)
    except FileNotFoundError:
        similar_name = suggest(path.name, sorted(file.name for file in path.parent.glob("*.toml")))
        if similar_name:
            hint = f"did you mean `{path.parent / similar_name}`?"
        else:
            hint = RECIPES_HINT
        raise usage_error(f"{path} does not exist", "a recipe is a TOML file", hint) from None
    except IsADirectoryError:
        raise _folder_error(path) from None
    except OSError as error:
        raise PrepError(
            f"{path} cannot be read",
            error.strerror or str(error),
            "check the path and its permissions",
        ) from None
    if len(data) > MAX_RECIPE_NBYTES:
        why = f"it has more than {MAX_RECIPE_NBYTES:,} bytes"
        raise usage_error(f"{path} is not a recipe", why, RECIPES_HINT)
    content = _decode_text(data, path)
    return RawRecipe(path, _parse_toml(content, path), line_numbers=key_line_numbers(content))


def _folder_error(folder: Path) -> PrepError:
    recipes = sorted(folder.glob("*.toml"))[:MAX_LISTED_RECIPES]
    if recipes or not any((folder / name).exists() for name in CHECKPOINT_FILES):
        hint = RECIPES_HINT
        if recipes:
            hint = f"recipes in it: {', '.join(map(str, recipes))}"
        return usage_error(f"{folder} is a folder", "a recipe is a TOML file", hint)
    train = Command("train", "RECIPE.toml", Option("overrides", f"model.path={folder}"))
    hint = text("{}; {}", train, RECIPES_HINT)
    return usage_error(f"{folder} is a checkpoint", "a recipe is a TOML file", hint)


def _decode_text(data: bytes, path: Path) -> str:
    """Decode the UTF-8 of a recipe without carriage returns."""
    try:
        # tomllib rejects a byte order mark. Line numbers are counted without carriage returns.
        return data.decode().removeprefix("\ufeff").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        why = f"byte {error.start} of the file is 0x{error.object[error.start]:02x}"
        raise usage_error(f"{path}:{line}: not UTF-8", why, "save the file as UTF-8") from None


def _parse_toml(text: str, path: Path) -> TomlTable:
    """Parse a recipe. Raise PrepError with the line of an error."""
    try:
        return parse_toml(text)
    except tomllib.TOMLDecodeError as error:
        # `location` is "line 3, column 7)" or "end of document)".
        message, _, location = str(error).rpartition(" (at ")
        line, column = re.findall(r"\d+", location) or (text.count("\n") + 1, None)
        hint = ""
        if message == "Invalid value":
            hint = 'text needs quotes: `mesh = "1,1,8"`'
        # E.g. YAML and JSON
        elif message.startswith(("Expected '=' after a key", "Invalid statement")):
            hint = RECIPES_HINT
        why = _syntax_message(message)
        if column:
            why += f" (column {column})"
        raise usage_error(f"{path}:{line}: invalid TOML", why, hint) from None
    # tomllib recurses for nested lists, and `int` raises ValueError above its limit of digits.
    except (RecursionError, ValueError):
        why = "lists or tables are nested too deeply, or a number has too many digits"
        raise usage_error(f"{path}: not a recipe", why, RECIPES_HINT) from None


def _syntax_message(message: str) -> str:
    """Return the message that replaces a syntax error of tomllib."""
    messages = (text for start, text in SYNTAX_MESSAGES.items() if message.startswith(start))
    return next(messages, "the line is not valid TOML")


def apply_overrides(raw: RawRecipe, overrides: Sequence[str]) -> tuple[RawRecipe, list[Diagnostic]]:
    """Apply `--set` options to a recipe. The last option for a key is used.

    Args:
        raw: The recipe.
        overrides: `KEY=VALUE` texts. VALUE is TOML. It is taken as text if it is not valid TOML, or
            if the key takes text and VALUE is TOML of another type. An empty VALUE removes a key
            that may be absent.

    Returns:
        The recipe with the overrides, and the diagnostics of invalid overrides.
    """
    tables = raw.copy_tables()
    keys: set[str] = set()
    diagnostics: list[Diagnostic] = []
    for argument in overrides:
        override = _parse_override(argument)
        if isinstance(override, Diagnostic):
            diagnostics.append(override)
            continue
        key, value = override
        table, _, name = key.rpartition(".")
        values = tables
        if table:
            values = tables.setdefault(table, {})
        is_unset = value == "" and "absent" in KEY_SCHEMAS[key]
        if isinstance(values, dict) and is_unset:
            values.pop(name, None)
        # Otherwise the file's table is invalid, and validation reports it.
        elif isinstance(values, dict):
            values[name] = value
        if is_unset:
            keys.discard(key)
        else:
            keys.add(key)
    return replace(raw, tables=tables, overridden_keys=frozenset(keys)), diagnostics


def _parse_override(override: str) -> tuple[str, TomlValue] | Diagnostic:
    """Parse `KEY=VALUE`. Return the key and its value, or what is wrong."""
    key, equals, value_text = (part.strip(" \t") for part in override.partition("="))
    option = replace(OVERRIDES, value=format_text(override))
    if not equals:
        hint = text("{}", replace(OVERRIDES, value="optimizer.lr=1e-4"))
        return _override_diagnostic(option, "no value", "it takes KEY=VALUE", hint)
    if key in TABLE_NAMES:
        hint = text("{}", replace(OVERRIDES, value=f"{key}.KEY=VALUE"))
        return _override_diagnostic(option, "a whole table", "it sets one key", hint)
    if key not in KEY_SCHEMAS:
        hint = unknown_key_hint(key, parse_override_value(value_text, None), is_override=True)
        return _override_diagnostic(OVERRIDES, f"unknown key `{key}`", hint=hint)
    if INVALID_VALUE_CHARS.search(value_text):
        why = "a value is one line of UTF-8 text without control characters"
        return _override_diagnostic(option, "invalid value", why, "remove the character")
    return key, parse_override_value(value_text, KEY_SCHEMAS[key])


def _override_diagnostic(option: Option, what: str, why: str = "", hint: str = "") -> Diagnostic:
    """Return a diagnostic of an override."""
    return Diagnostic(text("{}", option), what, why, hint, is_override=True)


def key_line_numbers(text: str) -> dict[KeyPath, int]:
    """Return the line, from 1, of the first occurrence of each key and table.

    Keys inside a value of several lines get the line on which the value begins.

    Args:
        text: A valid TOML document without carriage returns.
    """
    lines: dict[KeyPath, int] = {}
    table: KeyPath = ()
    for number, statement, values in _toml_statements(text):
        if statement.lstrip().startswith("["):
            # `[a.b]` parses to {"a": {"b": {}}} with the paths (a) and (a, b). The longest is the
            # table.
            table = max(_key_paths(values), key=len)
            lines.setdefault(table, number)
        else:
            for key in _key_paths(values):
                lines.setdefault(table + key, number)
    return lines


def _toml_statements(text: str) -> Iterator[tuple[int, str, TomlTable]]:
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


def _key_paths(tree: TomlTable, parent: KeyPath = ()) -> Iterator[KeyPath]:
    """Yield the path of each key of a tree, tables first."""
    for name, value in tree.items():
        yield (*parent, name)
        if isinstance(value, dict):
            yield from _key_paths(value, (*parent, name))
