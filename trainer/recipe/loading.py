"""Load a recipe from a file and `--set` options. One error lists all diagnostics with their lines."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import ValidationError

from prepcli.core.errors import PrepError, usage_error
from trainer.recipe.checks import find_problems
from trainer.recipe.corrections import correct_value
from trainer.recipe.data_sources import SOURCE_PATHS, SOURCES_KEY
from trainer.recipe.data_table import Data
from trainer.recipe.formatting import (
    describe_type,
    example_value,
    format_value,
    suggest,
)
from trainer.recipe.key_schema import KeySchema, alternatives
from trainer.recipe.optimizer_tables import OPTIMIZER_TABLES
from trainer.recipe.problems import Diagnostic, Problem, diagnostics_error
from trainer.recipe.raw_recipe import RawRecipe, apply_overrides, read_recipe
from trainer.recipe.span_corruption import SPAN_CORRUPTION
from trainer.recipe.tables import KEY_SCHEMAS, TABLE_NAMES, Recipe, is_path
from trainer.recipe.text_fields import AUTO, DEFAULT_FIELDS, FORMAT_FIELDS, PLAIN
from trainer.recipe.toml_values import TomlTable, TomlValue
from trainer.recipe.unknown_keys import find_unknown_keys, guess_key, is_known, unknown_key_hint

ENV_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")


@dataclass(frozen=True, slots=True)
class LoadedRecipe:
    """A complete recipe and the origins of its values.

    Attributes:
        recipe: The recipe.
        origins: `default` or `override` by dotted key. Keys of the file are absent.
    """

    recipe: Recipe
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
    unknown_key_diagnostics, intended_keys = _check_unknown_keys(raw)
    expanded, path_diagnostics = _expand_paths(raw)
    diagnostics += [
        *unknown_key_diagnostics,
        *path_diagnostics,
        *_missing_model_path(raw, intended_keys),
    ]
    recipe = _validate_tables(expanded, raw, intended_keys)
    if isinstance(recipe, Recipe):
        # A misspelled key may cause a conflict in the table of the key that was meant.
        affected_tables = {_table_name(key) for key in intended_keys}
        for problem in find_problems(recipe):
            if affected_tables.isdisjoint(map(_table_name, problem.keys)):
                diagnostics.append(_locate_problem(problem, raw))
    else:
        diagnostics += recipe
    if diagnostics or not isinstance(recipe, Recipe):
        raise diagnostics_error(raw.path, diagnostics)
    return LoadedRecipe(recipe, _value_origins(raw))


def _table_name(key: str) -> str:
    return key.partition(".")[0]


def _locate_problem(problem: Problem, raw: RawRecipe) -> Diagnostic:
    """Return the problem with the line of its first key in the recipe."""
    # The first key that the user wrote has a line. If all are defaults, the file is named.
    key = next(filter(raw.has, problem.keys), problem.keys[0])
    return raw.diagnostic(key, problem.what, problem.why, problem.hint)


def _check_unknown_keys(raw: RawRecipe) -> tuple[list[Diagnostic], set[str]]:
    """Return the diagnostics of unknown keys, and the known keys and tables that were probably meant."""
    diagnostics: list[Diagnostic] = []
    intended_keys: set[str] = set()
    hinted, others = find_unknown_keys(raw.tables)
    for path, value in hinted:
        diagnostics.append(
            raw.diagnostic(path, f"unknown key `{path}`", hint=unknown_key_hint(path, value))
        )
        intended_keys |= {path, guess_key(path)}
        if isinstance(value, dict):
            table = suggest(path, TABLE_NAMES)
            intended_keys |= {f"{table}.{key}" for key in value}
    for path in others:
        diagnostics.append(raw.diagnostic(path, f"unknown key `{path}`"))
    return diagnostics, intended_keys - {""}


def _missing_model_path(raw: RawRecipe, intended_keys: Collection[str]) -> list[Diagnostic]:
    """Return the diagnostic of a missing `model.path`. The key is not required with `model.init = "random"`."""
    key = "model.path"
    is_random = raw.has("model.init") and raw.get("model.init") == "random"
    if raw.has(key) or is_random or key in intended_keys:
        return []
    return [_missing_key(key, raw)]


def _value_origins(raw: RawRecipe) -> dict[str, str]:
    """Return which keys come from defaults and which from overrides."""
    origins: dict[str, str] = {}
    for key in KEY_SCHEMAS:
        if not raw.has(key):
            origins[key] = "default"
    for key in raw.overridden_keys:
        origins[key] = "override"
    return origins


def _validate_tables(
    raw: RawRecipe, unexpanded: RawRecipe, intended_keys: Collection[str]
) -> Recipe | list[Diagnostic]:
    """Return the recipe, or the diagnostics of its values. Unknown keys are ignored.

    Args:
        raw: The recipe with expanded paths.
        unexpanded: The recipe as the user wrote it, for messages.
        intended_keys: Keys probably meant by unknown keys. They are not reported as missing.
    """
    try:
        return Recipe.model_validate(_with_dependent_defaults(raw))
    except ValidationError as error:
        # A key with a union of types has one error per type. The dict keeps one of them per key.
        error_types = {
            _schema_key(item["loc"]): item["type"] for item in error.errors(include_url=False)
        }
    diagnostics: list[Diagnostic] = []
    for key, error_type in error_types.items():
        # A list with too few items has an error of type "missing" too, but its key is there.
        is_missing = error_type == "missing" and not raw.has(key)
        if not is_missing:
            diagnostics.append(_invalid_value(key, unexpanded))
        elif key not in intended_keys:
            diagnostics.append(_missing_key(key, unexpanded))
    return diagnostics


def _schema_key(location: tuple[int | str, ...]) -> str:
    """Return the key that contains a location of a pydantic error, which includes the tag of a union's member."""
    # E.g. ("optimizer", "adamw", "lr") -> `optimizer.lr`, ("data", "path", 0) -> `data.path`.
    table, *rest = location
    if table == "optimizer" and rest[:1] and rest[0] in OPTIMIZER_TABLES:
        location = (table, *rest[1:])
    path = ".".join(map(str, location))
    for key in KEY_SCHEMAS:
        if path == key or path.startswith(f"{key}."):
            return key
    return path


def _with_dependent_defaults(raw: RawRecipe) -> dict[str, object]:
    """Return all known values with the defaults that depend on other values.

    Every table is present, so that pydantic reports missing keys instead of missing tables.
    """
    known = _drop_unknown_keys(raw.tables)
    tables: dict[str, object] = {
        "name": raw.path.stem,
        **{name: {} for name in TABLE_NAMES},
        **known,
    }
    data = known.get("data", {})
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


def _drop_unknown_keys(tables: Mapping[str, TomlValue]) -> TomlTable:
    """Return the tables without unknown keys."""
    known: TomlTable = {}
    for name, values in tables.items():
        if name in TABLE_NAMES and isinstance(values, dict):
            known[name] = {
                key: value for key, value in values.items() if is_known(name, key, values)
            }
        # A quoted key `"data.path"` above the first table has a dot, but is no key of a recipe.
        elif name in TABLE_NAMES or (name in KEY_SCHEMAS and "." not in name):
            known[name] = values
    return known


def _expand_paths(raw: RawRecipe) -> tuple[RawRecipe, list[Diagnostic]]:
    """Expand `~` and `${NAME}` in all paths. Return the recipe, and the diagnostics of paths that cannot be."""
    tables = raw.copy_tables()
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
    """Expand the paths in a value: a text, a list of them, or a table of `data.sources`."""
    if isinstance(value, list):
        return [_expand_value(item, key) for item in value]
    # A table of `data.sources`.
    if isinstance(value, dict):
        paths = {name: _expand_value(value[name], key) for name in SOURCE_PATHS if name in value}
        return value | paths
    if isinstance(value, str):
        return _expand_path(value, key)
    return value


def _expand_path(text: str, key: str) -> str:
    """Expand `${NAME}` and a leading `~`."""
    for name in ENV_VARIABLE.findall(text):
        if name not in os.environ:
            why = f"it is {format_value(text)}, and {name} is not set"
            raise usage_error(
                f"`{key}` needs the environment variable {name}", why, f"`export {name}=...`"
            )
    expanded = ENV_VARIABLE.sub(lambda match: os.environ[match[1]], text)
    # The value of a variable may contain `${`. It is not expanded again: with A = `${A}` that has no end.
    if "${" in expanded:
        why = "only `${NAME}` is expanded, and only once"
        raise usage_error(f"`{key}` is {format_value(expanded)}", why, "remove the remaining `${`")
    # `expanduser` would also look up `~name` as a user, but a file may have this name.
    if expanded.startswith("~/") or expanded == "~":
        return os.path.expanduser(expanded)
    return expanded


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
    corrected = correct_value(value, key_schema)
    similar_choice = ""
    if not corrected:
        similar_choice = _similar_choice(value, key_schema)
    if similar_choice:
        hint = f"did you mean `{similar_choice}`?"
    else:
        hint = raw.set_hint(key, corrected or example_value(key_schema))
    return raw.diagnostic(key, f"`{key}` is {format_value(value)}", _describe_key(key), hint)


def _similar_choice(value: TomlValue, key_schema: KeySchema) -> str:
    """Return the choice of a key, or of its lists, that is similar to an invalid text, or "" if there is none."""
    is_list = isinstance(value, list)
    items = [value]
    if is_list:
        items = value
    choices: list[str] = []
    for alternative in alternatives(key_schema):
        schema = alternative
        if is_list:
            if "items" not in alternative:
                continue
            schema = alternative["items"]
        choices += schema.get("enum", ())
    for item in items:
        if isinstance(item, str) and item not in choices:
            similar = suggest(item, choices)
            if similar:
                return similar
    return ""


def _describe_key(key: str) -> str:
    return f"it takes {describe_type(KEY_SCHEMAS[key])}: {KEY_SCHEMAS[key]['description']}"
