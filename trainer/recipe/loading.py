"""Load a recipe from a file and `--set` options. One error lists all faults with their lines."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from prepcli.core.errors import Command, Key, Option, PrepError, join_texts, text, usage_error
from prepcli.core.formatting import did_you_mean, printable_line, shorten
from trainer.recipe.conflicts import find_problems
from trainer.recipe.data_table import SOURCE_PATHS, SOURCES_KEY, SPAN_CORRUPTION, Data
from trainer.recipe.hints import guess, unknown_key_hint
from trainer.recipe.key_types import (
    MAX_VALUE_CHARS,
    TomlTable,
    TomlValue,
    describe_type,
    example_value,
    format_value,
    key_line_numbers,
    parse_override_value,
    parse_toml,
    to_toml,
    types_of,
)
from trainer.recipe.optimizer_tables import OPTIMIZER_TABLES
from trainer.recipe.tables import (
    KEY_SCHEMAS,
    TABLE_NAMES,
    Recipe,
    example_line,
    is_path,
)
from trainer.recipe.text_fields import AUTO, DEFAULT_FIELDS, FORMAT_FIELDS, PLAIN

ENV_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
# Control characters, and the surrogates of bytes of an argument that are not UTF-8.
INVALID_VALUE_CHARS = re.compile(r"[\x00-\x08\n-\x1f\x7f\ud800-\udfff]")
# Limit on the memory that a wrong path, such as a file of weights, can take.
MAX_RECIPE_NBYTES = 16 << 20
# Maximum number of unknown keys that get a hint: searching a similar key takes a millisecond.
MAX_HINTED = 100
# Faults that are listed. The rest are counted.
MAX_SHOWN = 20
OVERRIDES = Option("overrides")
# Keys that take a table
TABLE_KEYS = [key for key, schema in KEY_SCHEMAS.items() if "object" in types_of(schema)]
RECIPES_HINT = text("{} lists recipes", Command("recipes"))
ALL_KEYS_HINT = text("{} lists all keys", Command("docs", "recipes"))


class Fault(NamedTuple):
    """One error of a recipe, with its place in the list of all errors."""

    error: PrepError
    # Lines of the file by number, then overrides, then missing keys.
    order: tuple[int, int] = (1, 0)


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
        while key and key not in self.overridden_keys:
            if key in self.line_numbers:
                return self.line_numbers[key]
            key = key.rpartition(".")[0]
        return 0

    def fault(self, key: str, what: str, why: str = "", hint: str = "") -> Fault:
        """Return the fault of a key with its place: the override, file:line, or the file."""
        line = self.line_number(key)
        if key in self.overridden_keys:
            return Fault(usage_error(text("{}: {}", OVERRIDES, what), why, hint))
        if line:
            return Fault(
                usage_error(text("{}:{}: {}", self.path, line, what), why, hint), (0, line)
            )
        return Fault(usage_error(text("{}: {}", self.path, what), why, hint), (2, 0))


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
        UsageError: The recipe is missing or invalid. The error lists all faults with their lines.
    """
    return complete_recipe(read_recipe(path), overrides)


def complete_recipe(raw: RawRecipe, overrides: Sequence[str] = ()) -> LoadedRecipe:
    """Return the recipe of raw values, overridden by `--set`, with defaults for all other keys.

    Args:
        raw: The values.
        overrides: `KEY=VALUE` texts of `--set`.

    Raises:
        UsageError: The recipe is invalid. The error lists all faults.
    """
    raw, faults = apply_overrides(raw, overrides)
    tables, path_faults = _expand_paths(raw)
    tables = _with_dependent_defaults(raw, tables)
    recipe = _validate(tables)
    # Unknown keys, and the known ones that they probably stand for. The latter are not missing.
    intended: set[str] = set()
    if isinstance(recipe, ValidationError):
        for number, path in enumerate(_pop_unknown_keys(tables, recipe, raw)):
            hint = ""
            if number < MAX_HINTED:
                hint = unknown_key_hint(path)
                intended |= {path, guess(path)}
            faults.append(raw.fault(path, f"unknown key `{path}`", hint=hint))
        # Faults of the known keys are reported with the unknown ones.
        recipe = _validate(tables)
    faults += path_faults
    # The key is not required with `model.init = "random"`.
    key = "model.path"
    is_random = raw.has("model.init") and raw.get("model.init") == "random"
    if not (raw.has(key) or is_random or key in intended):
        faults.append(_missing_key(key, raw))
    if isinstance(recipe, ValidationError):
        faults += _value_faults(recipe, raw, intended)
        raise _faults_error(raw.path, faults)
    # A misspelled key may cause a conflict in the table of the key that was meant.
    affected_tables = {_table_name(key) for key in intended}
    for problem in find_problems(recipe):
        if affected_tables.isdisjoint(map(_table_name, problem.keys)):
            # The first key that the user wrote has a line. If all are defaults, the file is named.
            key = next(filter(raw.has, problem.keys), problem.keys[0])
            faults.append(raw.fault(key, problem.what, problem.why, problem.hint))
    if faults:
        raise _faults_error(raw.path, faults)
    origins = {key: "default" for key in KEY_SCHEMAS if not raw.has(key)}
    return LoadedRecipe(recipe, origins | dict.fromkeys(raw.overridden_keys, "override"))


def _faults_error(path: Path, faults: Sequence[Fault]) -> PrepError:
    """Return one UsageError of all faults in their order."""
    errors = [fault.error for fault in sorted(faults, key=lambda fault: fault.order)]
    if len(errors) == 1:
        return errors[0].with_texts(hint=errors[0].hint or ALL_KEYS_HINT)
    lines: list[str] = [error.message for error in errors[:MAX_SHOWN]]
    if len(errors) > MAX_SHOWN:
        lines.append(f"and {len(errors) - MAX_SHOWN:,} more")
    return usage_error(f"{path} has {len(errors):,} errors", join_texts("\n", lines), ALL_KEYS_HINT)


# --- The file


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
        names = sorted(file.name for file in path.parent.glob("*.toml"))
        hint = did_you_mean(path.name, names) or RECIPES_HINT
        raise usage_error(f"{path} does not exist", "a recipe is a TOML file", hint) from None
    except IsADirectoryError:
        command = Command("train", "RECIPE.toml", Option("overrides", f"model.path={path}"))
        hint = text("{} for a checkpoint; {}", command, RECIPES_HINT)
        raise usage_error(f"{path} is a folder", "a recipe is a TOML file", hint) from None
    except OSError as error:
        why = error.strerror or str(error)
        hint = "check the path and its permissions"
        raise PrepError(f"{path} cannot be read", why, hint) from None
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


def _parse_recipe(content: str, path: Path) -> TomlTable:
    """Parse a recipe. Raise PrepError with the line of an error."""
    try:
        return parse_toml(content)
    except tomllib.TOMLDecodeError as error:
        # E.g. "Invalid value (at line 3, column 8)" or "Unterminated string (at end of document)"
        why = str(error)
        match = re.search(r"\(at line (\d+)", why)
        line = match[1] if match else content.count("\n") + 1
        hint: str = RECIPES_HINT
        if why.startswith("Invalid value"):
            hint = 'text needs quotes: `mesh = "1,1,8"`'
        what = f"{path}:{line}: invalid TOML"
        raise usage_error(what, why[:1].lower() + why[1:], hint) from None
    # tomllib recurses for nested lists, and `int` raises ValueError above its limit of digits.
    except (RecursionError, ValueError):
        why = "lists or tables are nested too deeply, or a number has too many digits"
        raise usage_error(f"{path}: not a recipe", why, RECIPES_HINT) from None


# --- Overrides


def apply_overrides(raw: RawRecipe, overrides: Sequence[str]) -> tuple[RawRecipe, list[Fault]]:
    """Apply `--set` options to a recipe. The last option for a key is used.

    Args:
        raw: The recipe.
        overrides: `KEY=VALUE` texts. VALUE is TOML. It is taken as text if it is not valid TOML, or
            if the key takes text and VALUE is TOML of another type. An empty VALUE removes a key
            that may be absent.

    Returns:
        The recipe with the overrides, and the faults of invalid overrides.
    """
    tables = _copy_tables(raw.tables)
    keys: set[str] = set()
    faults: list[Fault] = []
    for argument in overrides:
        try:
            key, value = _parse_override(argument)
        except PrepError as error:
            faults.append(Fault(error))
            continue
        table, _, name = key.rpartition(".")
        values = tables
        if table:
            values = tables.setdefault(table, {})
        # If it is no table, validation reports it.
        if not isinstance(values, dict):
            keys.add(key)
        elif value == "" and "absent" in KEY_SCHEMAS[key]:
            values.pop(name, None)
            keys.discard(key)
        else:
            values[name] = value
            keys.add(key)
    return replace(raw, tables=tables, overridden_keys=frozenset(keys)), faults


def _copy_tables(tables: Mapping[str, TomlValue]) -> TomlTable:
    """Return a copy of the tables whose keys may be changed."""
    return {
        name: dict(value) if isinstance(value, dict) else value for name, value in tables.items()
    }


def _parse_override(override: str) -> tuple[str, TomlValue]:
    """Parse `KEY=VALUE`. Raise UsageError if it is invalid."""
    key, equals, value = (part.strip(" \t") for part in override.partition("="))
    argument = shorten(printable_line(override), MAX_VALUE_CHARS)
    what = text("{} is invalid", replace(OVERRIDES, value=argument))
    if key in TABLE_NAMES or not equals:
        hint = text("{}", replace(OVERRIDES, value="optimizer.lr=1e-4"))
        raise usage_error(what, "it takes KEY=VALUE with one key", hint)
    if key not in KEY_SCHEMAS:
        hint = unknown_key_hint(key, is_override=True)
        raise usage_error(text("{}: unknown key `{}`", OVERRIDES, key), hint=hint)
    if INVALID_VALUE_CHARS.search(value):
        why = "a value is one line of UTF-8 text without control characters"
        raise usage_error(what, why, "remove the character")
    return key, parse_override_value(value, KEY_SCHEMAS[key])


# --- Values that depend on the environment and on other values


def _expand_paths(raw: RawRecipe) -> tuple[TomlTable, list[Fault]]:
    """Expand `~` and `${NAME}` in all paths. Return the tables, and the faults of paths that cannot be expanded."""
    tables = _copy_tables(raw.tables)
    faults: list[Fault] = []
    for key in KEY_SCHEMAS:
        if (is_path(key) or key == SOURCES_KEY) and raw.has(key):
            table, _, name = key.partition(".")
            values = tables[table]
            assert isinstance(values, dict)
            try:
                values[name] = _expand_value(raw.get(key), key)
            except PrepError as error:
                faults.append(raw.fault(key, error.what, error.why, error.hint))
    return tables, faults


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
            what = f"`{key}` needs the environment variable {name}"
            why = f"it is {format_value(value)}, and {name} is not set"
            raise usage_error(what, why, f"`export {name}=...`")
    expanded = ENV_VARIABLE.sub(lambda match: os.environ[match[1]], value)
    # The value of a variable may contain `${`. It is not expanded again: with A = `${A}` that has no end.
    if "${" in expanded:
        why = "only `${NAME}` is expanded, and only once"
        raise usage_error(f"`{key}` is {format_value(expanded)}", why, "remove the remaining `${`")
    # `expanduser` would also look up `~name` as a user, but a file may have this name.
    if expanded.startswith("~/") or expanded == "~":
        return os.path.expanduser(expanded)
    return expanded


def _with_dependent_defaults(raw: RawRecipe, expanded: TomlTable) -> dict[str, Any]:
    """Return all values with the defaults that depend on other values."""
    # Every table is present, so that pydantic reports missing keys instead of missing tables.
    tables: dict[str, Any] = {"name": raw.path.stem, **{name: {} for name in TABLE_NAMES}}
    tables |= expanded
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


# --- Errors of pydantic


def _validate(tables: Mapping[str, Any]) -> Recipe | ValidationError:
    try:
        return Recipe.model_validate(tables)
    except ValidationError as error:
        return error


def _pop_unknown_keys(tables: dict[str, Any], error: ValidationError, raw: RawRecipe) -> list[str]:
    """Remove the unknown keys from the tables. Return their paths, and of an unknown table those of its values."""
    paths: list[str] = []
    for item in error.errors(include_url=False):
        if item["type"] == "extra_forbidden":
            *table, name = _without_tag(item["loc"])
            values = tables[table[0]] if table else tables
            path = ".".join((*table, name))
            value = values.pop(name)
            # A table may be the value of a key with another name, e.g. `rope_parameters`.
            is_value = len(paths) >= MAX_HINTED or guess(path) in TABLE_KEYS
            paths += [path] if is_value else _leaves(path, value)
    return sorted(paths, key=raw.line_number)


def _leaves(path: str, value: TomlValue) -> Iterator[str]:
    """Yield the path of a value, or the paths of all values in a table."""
    if not isinstance(value, dict) or not value:
        yield path
        return
    for key, item in value.items():
        yield from _leaves(f"{path}.{key}", item)


def _value_faults(
    error: ValidationError, raw: RawRecipe, intended: Collection[str]
) -> Iterator[Fault]:
    """Yield the faults of missing keys and invalid values. Keys meant by unknown ones are not missing."""
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
        elif key not in intended:
            yield _missing_key(key, raw)


def _without_tag(location: tuple[int | str, ...]) -> tuple[str, ...]:
    """Return a location of pydantic without the optimizer's type, e.g. ("optimizer", "adamw", "lr")."""
    parts = tuple(map(str, location))
    if parts[0] == "optimizer" and parts[1:2] and parts[1] in OPTIMIZER_TABLES:
        return (parts[0], *parts[2:])
    return parts


def _missing_key(key: str, raw: RawRecipe) -> Fault:
    return raw.fault(key, f"`{key}` is missing", _describe_key(key), example_line(key))


def _invalid_value(key: str, raw: RawRecipe) -> Fault:
    # Among the defaults only the name, taken from the file, can be invalid.
    value = raw.get(key) if raw.has(key) else raw.path.stem
    what = f"`{key}` is {format_value(value)}"
    if key in TABLE_NAMES:
        return raw.fault(key, what, "it takes a table", f"`[{key}]`, and its keys below")
    hint = example_line(key)
    if key in raw.overridden_keys or raw.is_of_options:
        example = example_value(KEY_SCHEMAS[key])
        if not isinstance(example, str | int):
            example = to_toml(example)
        hint = text("{}", Key(key, example, is_override=True))
    return raw.fault(key, what, _describe_key(key), hint)


def _describe_key(key: str) -> str:
    return f"it takes {describe_type(KEY_SCHEMAS[key])}: {KEY_SCHEMAS[key]['description']}"


def _table_name(key: str) -> str:
    return key.partition(".")[0]
