"""Load a recipe from a file and `--set` options. One error lists all diagnostics with their lines."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from prepcli.core.errors import Command, Option, PrepError, Text, join_texts, text, usage_error
from trainer.recipe.conflicts import find_problems
from trainer.recipe.data_table import SOURCE_PATHS, SOURCES_KEY, SPAN_CORRUPTION, Data
from trainer.recipe.formatting import (
    TomlTable,
    TomlValue,
    describe_type,
    example_value,
    format_text,
    format_value,
    key_line_numbers,
    parse_override_value,
    parse_toml,
    suggest,
)
from trainer.recipe.hints import (
    MAX_HINTED,
    correct_value,
    guess_key,
    override_hint,
    similar_choice,
    unknown_key_hint,
    unknown_leaves,
)
from trainer.recipe.optimizer_tables import OPTIMIZER_TABLES
from trainer.recipe.tables import KEY_SCHEMAS, TABLE_NAMES, Recipe, is_path
from trainer.recipe.text_fields import AUTO, DEFAULT_FIELDS, FORMAT_FIELDS, PLAIN

ENV_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
# Control characters, and the surrogates of bytes of an argument that are not UTF-8.
INVALID_VALUE_CHARS = re.compile(r"[\x00-\x08\n-\x1f\x7f\ud800-\udfff]")
# Each folder of weights has at least one of these files.
CHECKPOINT_FILES = ("config.json", "prep-manifest.json", "_METADATA")
MAX_LISTED_RECIPES = 5
# Limit on the memory that a wrong path, such as a file of weights, can take.
MAX_RECIPE_NBYTES = 16 << 20
# Diagnostics that are listed. The rest are counted.
MAX_SHOWN = 20
OVERRIDES = Option("overrides")
RECIPES_HINT = text("{} lists recipes", Command("recipes"))
ALL_KEYS_HINT = text("{} lists all keys", Command("docs", "recipes"))


@dataclass(frozen=True, slots=True)
class RawRecipe:
    """Values of a recipe file, overridden by `--set`, before validation."""

    path: Path  # The file
    tables: Mapping[str, TomlValue]  # Parsed values, with overrides applied
    overridden_keys: frozenset[str] = frozenset()  # Dotted keys that `--set` gave
    # Line of each dotted key and table of the file
    line_numbers: Mapping[str, int] = field(default_factory=dict)
    is_of_options: bool = False  # The values come from options of a command without a recipe file

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

    def line_number(self, key: str) -> int:
        """Return the line of a key, else of its table, or 0 for overridden keys and keys absent from the file."""
        if key in self.overridden_keys:
            return 0
        parts = key.split(".")
        prefixes = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
        return next((self.line_numbers[each] for each in prefixes if each in self.line_numbers), 0)

    def diagnostic(self, key: str, what: str, why: str = "", hint: str = "") -> Diagnostic:
        """Return a diagnostic for a key, at its place: the override, file:line, or the file."""
        if key in self.overridden_keys:
            return _override_diagnostic(OVERRIDES, what, why, hint)
        line = self.line_number(key)
        place = f"{self.path}:{line}" if line else f"{self.path}"
        return Diagnostic(place, what, why, hint, line)


@dataclass(frozen=True, slots=True)
class Diagnostic:
    """One error of a recipe, with its place."""

    place: str  # `FILE:LINE`, the option for overrides, or the file for a missing key
    what: str  # What is wrong, as in `PrepError`
    why: str = ""  # The value that causes it
    hint: str = ""  # How to fix it
    line: int = 0  # The line in the file, or 0 for overrides and missing keys
    is_override: bool = False  # Whether the place is an override

    @property
    def text(self) -> Text:
        """The diagnostic as one line of a list."""
        what = text("{}: {}", self.place, self.what)
        return join_texts(" - ", [part for part in (what, self.why, self.hint) if part])


def _diagnostics_error(path: Path, diagnostics: Sequence[Diagnostic]) -> PrepError:
    """Return one UsageError of all diagnostics: of the file by line, of overrides, of missing keys."""
    # False sorts before True. Lines of the file come first. Overrides and missing keys both have line 0.
    ordered = sorted(diagnostics, key=lambda item: (not item.line, item.line, not item.is_override))
    if len(ordered) == 1:
        only = ordered[0]
        what = text("{}: {}", only.place, only.what)
        return usage_error(what, only.why, only.hint or ALL_KEYS_HINT)
    lines: list[str] = [diagnostic.text for diagnostic in ordered[:MAX_SHOWN]]
    if len(ordered) > MAX_SHOWN:
        lines.append(f"and {len(ordered) - MAX_SHOWN:,} more")
    what = f"{path} has {len(ordered):,} errors"
    return usage_error(what, join_texts("\n", lines), ALL_KEYS_HINT)


@dataclass(frozen=True, slots=True)
class LoadedRecipe:
    """A complete recipe and the origins of its values."""

    recipe: Recipe  # The recipe
    # `default` or `override` by dotted key. Keys of the file are absent.
    origins: Mapping[str, str]


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> LoadedRecipe:
    """Load a recipe: values of the file, overridden by `--set`, and defaults for all other keys.

    In paths `~` and `${NAME}` are expanded.

    Args:
        path: The TOML file.
        overrides: `KEY=VALUE` texts of `--set`.

    Raises:
        PrepError: The file cannot be read.
        UsageError: The recipe is missing or invalid. The error lists all diagnostics with their
            lines.
    """
    return complete_recipe(read_recipe(path), overrides)


def complete_recipe(raw: RawRecipe, overrides: Sequence[str] = ()) -> LoadedRecipe:
    """Return the recipe of raw values, overridden by `--set`, with defaults for all other keys.

    Args:
        raw: The values.
        overrides: `KEY=VALUE` texts of `--set`.

    Raises:
        UsageError: The recipe is invalid. The error lists all diagnostics.
    """
    raw, diagnostics = apply_overrides(raw, overrides)
    expanded, path_diagnostics = _expand_paths(raw)
    tables = _with_dependent_defaults(raw, expanded)
    recipe = _validate(tables)
    intended_keys: set[str] = set()
    if isinstance(recipe, ValidationError):
        unknown = _pop_unknown_keys(tables, recipe, raw)
        unknown_diagnostics, intended_keys = _describe_unknown_keys(unknown, raw)
        diagnostics += unknown_diagnostics
        # Conflicts of the known keys are reported with the unknown ones.
        recipe = _validate(tables) if unknown else recipe
    diagnostics += path_diagnostics
    # The key is not required with `model.init = "random"`.
    key = "model.path"
    is_random = raw.has("model.init") and raw.get("model.init") == "random"
    if not (raw.has(key) or is_random or key in intended_keys):
        diagnostics.append(_missing_key(key, raw))
    if isinstance(recipe, Recipe):
        # A misspelled key may cause a conflict in the table of the key that was meant.
        affected_tables = {_table_name(key) for key in intended_keys}
        for problem in find_problems(recipe):
            if affected_tables.isdisjoint(map(_table_name, problem.keys)):
                # The first key that the user wrote has a line. If all are defaults, the file is named.
                key = next(filter(raw.has, problem.keys), problem.keys[0])
                diagnostics.append(raw.diagnostic(key, problem.what, problem.why, problem.hint))
    else:
        diagnostics += _describe_errors(recipe, raw, intended_keys)
    if diagnostics or not isinstance(recipe, Recipe):
        raise _diagnostics_error(raw.path, diagnostics)
    origins = {key: "default" for key in KEY_SCHEMAS if not raw.has(key)}
    return LoadedRecipe(recipe, origins | dict.fromkeys(raw.overridden_keys, "override"))


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
        hint = f"did you mean `{path.parent / similar_name}`?" if similar_name else RECIPES_HINT
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
    try:
        # tomllib rejects a byte order mark. Line numbers are counted without carriage returns.
        content = data.decode().removeprefix("\ufeff").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        why = f"byte {error.start} of the file is 0x{error.object[error.start]:02x}"
        raise usage_error(f"{path}:{line}: not UTF-8", why, "save the file as UTF-8") from None
    return RawRecipe(path, _parse_recipe(content, path), line_numbers=key_line_numbers(content))


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


def _parse_recipe(content: str, path: Path) -> TomlTable:
    """Parse a recipe. Raise PrepError with the line of an error."""
    try:
        return parse_toml(content)
    except tomllib.TOMLDecodeError as error:
        # E.g. "Invalid value (at line 3, column 8)" or "Unterminated string (at end of document)"
        message, _, location = str(error).rpartition(" (at ")
        line, column = re.findall(r"\d+", location) or (content.count("\n") + 1, None)
        # E.g. "Cannot declare ('data', 'x') twice"
        keys = re.sub(r"\('(.*?)',?\)", lambda match: f"`{match[1]}`", message)
        why = keys[:1].lower() + keys[1:].replace("', '", ".")
        if column:
            why += f" (column {column})"
        hint: str = RECIPES_HINT
        if message == "Invalid value":
            hint = 'text needs quotes: `mesh = "1,1,8"`'
        raise usage_error(f"{path}:{line}: invalid TOML", why, hint) from None
    # tomllib recurses for nested lists, and `int` raises ValueError above its limit of digits.
    except (RecursionError, ValueError):
        why = "lists or tables are nested too deeply, or a number has too many digits"
        raise usage_error(f"{path}: not a recipe", why, RECIPES_HINT) from None


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
    tables = _copy_tables(raw.tables)
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


def _copy_tables(tables: Mapping[str, TomlValue]) -> TomlTable:
    """Return a copy of the tables whose keys may be changed."""
    return {
        name: dict(value) if isinstance(value, dict) else value for name, value in tables.items()
    }


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


def _expand_paths(raw: RawRecipe) -> tuple[RawRecipe, list[Diagnostic]]:
    """Expand `~` and `${NAME}` in all paths. Return the recipe, and the diagnostics of paths that cannot be."""
    tables = _copy_tables(raw.tables)
    diagnostics: list[Diagnostic] = []
    for key in KEY_SCHEMAS:
        if (is_path(key) or key == SOURCES_KEY) and raw.has(key):
            table, _, name = key.partition(".")
            values = tables[table]
            assert isinstance(values, dict)
            try:
                values[name] = _expand_value(raw.get(key), key)
            except PrepError as error:
                diagnostics.append(raw.diagnostic(key, error.what, error.why, error.hint))
    return replace(raw, tables=tables), diagnostics


def _expand_value(value: TomlValue, key: str) -> TomlValue:
    """Expand `${NAME}` and a leading `~` in the paths of a value: a text, a list, or a table of `data.sources`."""
    if isinstance(value, list):
        return [_expand_value(item, key) for item in value]
    # A table of `data.sources`.
    if isinstance(value, dict):
        paths = {name: _expand_value(value[name], key) for name in SOURCE_PATHS if name in value}
        return value | paths
    if not isinstance(value, str):
        return value
    for name in ENV_VARIABLE.findall(value):
        if name not in os.environ:
            why = f"it is {format_value(value)}, and {name} is not set"
            raise usage_error(
                f"`{key}` needs the environment variable {name}", why, f"`export {name}=...`"
            )
    expanded = ENV_VARIABLE.sub(lambda match: os.environ[match[1]], value)
    # The value of a variable may contain `${`. It is not expanded again: with A = `${A}` that has no end.
    if "${" in expanded:
        why = "only `${NAME}` is expanded, and only once"
        raise usage_error(f"`{key}` is {format_value(expanded)}", why, "remove the remaining `${`")
    # `expanduser` would also look up `~name` as a user, but a file may have this name.
    if expanded.startswith("~/") or expanded == "~":
        return os.path.expanduser(expanded)
    return expanded


def _with_dependent_defaults(raw: RawRecipe, expanded: RawRecipe) -> dict[str, Any]:
    """Return all values with the defaults that depend on other values."""
    # Every table is present, so that pydantic reports missing keys instead of missing tables.
    tables: dict[str, Any] = {"name": raw.path.stem, **{name: {} for name in TABLE_NAMES}}
    tables |= _copy_tables(expanded.tables)
    data = tables["data"]
    if not isinstance(data, dict):
        return tables
    defaults: dict[str, object] = {}
    if raw.has(SOURCES_KEY):
        defaults["path"] = None
    names_columns = raw.has("data.fields") or raw.has("data.fields_from_example")
    data_type = data.get("type", Data.model_fields["type"].default)
    has_columns = isinstance(data_type, str) and data_type in DEFAULT_FIELDS
    if names_columns or not has_columns or data.get("objective") == SPAN_CORRUPTION:
        # A recipe that names columns is taken at its word. Span corruption reads plain text only.
        defaults["format"] = PLAIN
    data_format = data.get("format", defaults.get("format", AUTO))
    if has_columns and not raw.has("data.fields_from_example") and data_format != AUTO:
        # The default columns depend on the format, e.g. `messages` for chats.
        defaults["fields"] = FORMAT_FIELDS.get(str(data_format), DEFAULT_FIELDS[str(data_type)])
    tables["data"] = defaults | data
    return tables


def _validate(tables: Mapping[str, Any]) -> Recipe | ValidationError:
    try:
        return Recipe.model_validate(tables)
    except ValidationError as error:
        return error


def _pop_unknown_keys(
    tables: dict[str, Any], error: ValidationError, raw: RawRecipe
) -> list[tuple[str, TomlValue]]:
    """Remove the unknown keys from the tables. Return their paths and values in the order of the file."""
    unknown: list[tuple[str, TomlValue]] = []
    for item in error.errors(include_url=False):
        if item["type"] == "extra_forbidden":
            *table, name = _without_tag(item["loc"])
            values = tables[table[0]] if table else tables
            unknown.append((".".join((*table, name)), values.pop(name)))
    return sorted(unknown, key=lambda item: raw.line_number(item[0]))


def _describe_unknown_keys(
    unknown: Sequence[tuple[str, TomlValue]], raw: RawRecipe
) -> tuple[list[Diagnostic], set[str]]:
    """Return the diagnostics of unknown keys, and the known keys and tables that were probably meant."""
    diagnostics: list[Diagnostic] = []
    intended_keys: set[str] = set()
    for path, value in unknown[:MAX_HINTED]:
        for leaf, item in unknown_leaves(path, value):
            hint = unknown_key_hint(leaf, item)
            diagnostics.append(raw.diagnostic(leaf, f"unknown key `{leaf}`", hint=hint))
            intended_keys |= {leaf, guess_key(leaf)}
            if isinstance(item, dict):
                table = suggest(leaf, TABLE_NAMES)
                intended_keys |= {f"{table}.{key}" for key in item}
    for path, _ in unknown[MAX_HINTED:]:
        diagnostics.append(raw.diagnostic(path, f"unknown key `{path}`"))
    return diagnostics, intended_keys - {""}


def _describe_errors(
    error: ValidationError, raw: RawRecipe, intended_keys: Collection[str]
) -> Iterator[Diagnostic]:
    """Yield the diagnostics of missing keys and invalid values. Keys meant by unknown ones are not missing."""
    # A key with a union of types has one error per type. The dict keeps one of them per key.
    error_types: dict[str, str] = {}
    for item in error.errors(include_url=False):
        # The key that contains a location, e.g. ("data", "path", 0) -> `data.path`.
        path = ".".join(_without_tag(item["loc"]))
        key = next((key for key in KEY_SCHEMAS if f"{path}.".startswith(f"{key}.")), path)
        error_types[key] = item["type"]
    for key, error_type in error_types.items():
        # A list with too few items has an error of type "missing" too, but its key is there.
        is_missing = error_type == "missing" and not raw.has(key)
        if not is_missing:
            yield _invalid_value(key, raw)
        elif key not in intended_keys:
            yield _missing_key(key, raw)


def _without_tag(location: tuple[int | str, ...]) -> tuple[str, ...]:
    """Return a location of pydantic without the optimizer's type, e.g. ("optimizer", "adamw", "lr")."""
    parts = tuple(map(str, location))
    if parts[0] == "optimizer" and parts[1:2] and parts[1] in OPTIMIZER_TABLES:
        return (parts[0], *parts[2:])
    return parts


def _missing_key(key: str, raw: RawRecipe) -> Diagnostic:
    table, _, name = key.rpartition(".")
    hint = f"`{name} = {example_value(KEY_SCHEMAS[key])}` in [{table}]"
    return raw.diagnostic(key, f"`{key}` is missing", _describe_key(key), hint)


def _invalid_value(key: str, raw: RawRecipe) -> Diagnostic:
    if key in TABLE_NAMES:
        what = f"`{key}` is {format_value(raw.get(key))}"
        return raw.diagnostic(key, what, "it takes a table", f"`[{key}]`, and its keys below")
    key_schema = KEY_SCHEMAS[key]
    # Among the defaults only the name, taken from the file, can be invalid.
    value = raw.path.stem
    if raw.has(key):
        value = raw.get(key)
    corrected = correct_value(key, value)
    similar = "" if corrected else similar_choice(value, key_schema)
    toml_value = corrected or example_value(key_schema)
    if similar:
        hint = f"did you mean `{similar}`?"
    elif key in raw.overridden_keys or raw.is_of_options:
        hint = override_hint(key, toml_value)
    else:
        hint = f"`{key.rpartition('.')[2]} = {toml_value}`"
    return raw.diagnostic(key, f"`{key}` is {format_value(value)}", _describe_key(key), hint)


def _describe_key(key: str) -> str:
    return f"it takes {describe_type(KEY_SCHEMAS[key])}: {KEY_SCHEMAS[key]['description']}"


def _table_name(key: str) -> str:
    return key.partition(".")[0]
