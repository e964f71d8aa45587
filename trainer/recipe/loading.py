"""From a file and `--set` options to a recipe, or to one error that lists all faults with their lines."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from trainer.models.errors import PrepError, usage_error
from trainer.recipe.checks import Problem, find_problems
from trainer.recipe.corrections import correct_value
from trainer.recipe.diagnostics import Diagnostic, diagnostics_error
from trainer.recipe.formatting import alternatives, describe_type, example_value, format_value, suggest
from trainer.recipe.raw_recipe import RawRecipe, apply_overrides, read_recipe
from trainer.recipe.tables import KEY_SCHEMAS, TABLE_NAMES, Recipe
from trainer.recipe.unknown_keys import find_unknown_keys, guess_key, unknown_key_hint

ENV_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")


@dataclass(frozen=True, slots=True)
class LoadedRecipe:
    """A complete recipe. `origins`, by dotted key: `default` or `--set KEY`; of what the file gives, nothing."""

    recipe: Recipe
    origins: Mapping[str, str]


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> LoadedRecipe:
    """The recipe of a file, with values of `--set` (`a.b=v`) in place of the file's, and defaults for all that is left.

    In paths `~` and `${NAME}` are expanded. All that is wrong is one usage error, with file:line where there is a line.
    """
    given, faults = apply_overrides(read_recipe(path), overrides)
    unknown, answered = _check_unknown_keys(given)
    expanded, not_expanded = _expand_paths(given)
    faults += [*unknown, *not_expanded]
    recipe = _validate(expanded, given, answered)
    if isinstance(recipe, Recipe):
        touched = {_table_name(key) for key in answered}
        faults += [
            _locate_problem(problem, given)
            for problem in find_problems(recipe)
            if touched.isdisjoint(_problem_tables(problem))
        ]
    else:
        faults += recipe
    if faults or not isinstance(recipe, Recipe):
        raise diagnostics_error(path, faults)
    return LoadedRecipe(recipe, _origins(given))


def _table_name(key: str) -> str:
    return key.partition(".")[0]


def _problem_tables(problem: Problem) -> set[str]:
    return {_table_name(key) for key in problem.keys}


def _locate_problem(problem: Problem, raw: RawRecipe) -> Diagnostic:
    at_fault = next(filter(raw.has, problem.keys), problem.keys[0])
    return raw.diagnostic(at_fault, problem.what, problem.why, problem.hint)


def _check_unknown_keys(raw: RawRecipe) -> tuple[list[Diagnostic], set[str]]:
    """The faults of unknown keys; and the keys and tables that they were meant to give, or stand in."""
    faults, answered = [], set()
    for path, value in find_unknown_keys(raw.tables):
        faults.append(raw.diagnostic(path, f"unknown key `{path}`", hint=unknown_key_hint(path, value)))
        answered |= {path, guess_key(path)}
        if isinstance(value, dict):
            answered |= {f"{suggest(path, TABLE_NAMES)}.{key}" for key in value}
    return faults, answered - {""}


def _origins(raw: RawRecipe) -> dict[str, str]:
    defaults = {key: "default" for key in KEY_SCHEMAS if not raw.has(key)}
    return defaults | {key: f"--set {key}" for key in raw.overridden_keys}


def _validate(raw: RawRecipe, unexpanded: RawRecipe, intended_keys: Collection[str]) -> Recipe | list[Diagnostic]:
    """The recipe, or what is wrong with its values, unknown keys apart. `answered`: keys that are not told as missing,
    since an unknown one was meant for them."""
    try:
        return Recipe.model_validate(_with_dependent_defaults(raw))
    except ValidationError as error:
        kinds = {_schema_key(found["loc"]): found["type"] for found in error.errors(include_url=False)}
    kinds = {key: kind for key, kind in kinds.items() if kind != "missing" or key not in intended_keys}
    return [
        _missing_key(key, unexpanded) if kind == "missing" else _invalid_value(key, unexpanded)
        for key, kind in kinds.items()
    ]


def _schema_key(location: tuple[int | str, ...]) -> str:
    """The key in which a place of the tables lies."""
    path = ".".join(map(str, location))
    return next((key for key in KEY_SCHEMAS if path == key or path.startswith(f"{key}.")), path)


def _with_dependent_defaults(raw: RawRecipe) -> dict[str, Any]:
    """Every table, so that what is missing is a key, and the defaults that depend on something."""
    tables: dict[str, Any] = {
        "name": raw.path.stem,
        **{name: {} for name in TABLE_NAMES},
        **_drop_unknown_keys(raw.tables),
    }
    if raw.has("data.type") and raw.get("data.type") == "json":
        tables["data"] = {"fields": "text"} | tables["data"]
    return tables


def _drop_unknown_keys(tables: Mapping[str, Any]) -> dict[str, Any]:
    """The tables without unknown keys."""
    known = {
        name: value
        for name, value in tables.items()
        if name in TABLE_NAMES or (name in KEY_SCHEMAS and "." not in name)
    }
    for name in TABLE_NAMES:
        if isinstance(inside := known.get(name), dict):
            known[name] = {key: value for key, value in inside.items() if f"{name}.{key}" in KEY_SCHEMAS}
    return known


def _expand_paths(raw: RawRecipe) -> tuple[RawRecipe, list[Diagnostic]]:
    """With `~` and `${NAME}` replaced in what is a path; and the faults of paths where they cannot be."""
    tables, faults = raw.copy_tables(), []
    for key, part in KEY_SCHEMAS.items():
        if raw.has(key) and any(option.get("format") == "path" for option in alternatives(part)):
            table, _, name = key.partition(".")
            try:
                tables[table][name] = _expand_value(raw.get(key), key)
            except PrepError as error:
                faults.append(raw.diagnostic(key, error.what, error.why, error.hint))
    return replace(raw, tables=tables), faults


def _expand_value(value: Any, key: str) -> Any:
    if isinstance(value, list):
        return [_expand_value(each, key) for each in value]
    return _expand_path(value, key) if isinstance(value, str) else value


def _expand_path(text: str, key: str) -> str:
    for name in ENV_VARIABLE.findall(text):
        if name not in os.environ:
            why = f"it is {format_value(text)}, and {name} is not set"
            raise usage_error(f"`{key}` needs the variable {name}", why, f"`export {name}=...`")
    expanded = ENV_VARIABLE.sub(lambda found: os.environ[found[1]], text)
    if "${" in expanded:
        why = "only `${NAME}` is replaced, and only once"
        raise usage_error(f"`{key}` is {format_value(expanded)}", why, "no `${` in what is left")
    return os.path.expanduser(expanded) if expanded.startswith("~/") or expanded == "~" else expanded


def _missing_key(key: str, raw: RawRecipe) -> Diagnostic:
    table, _, name = key.rpartition(".")
    hint = f"`{name} = {example_value(KEY_SCHEMAS[key])}` in [{table}]"
    return raw.diagnostic(key, f"`{key}` is missing", _describe_key(key), hint)


def _invalid_value(key: str, raw: RawRecipe) -> Diagnostic:
    if key in TABLE_NAMES:
        what = f"`{key}` is {format_value(raw.get(key))}"
        return raw.diagnostic(key, what, "it takes a table", f"`[{key}]`, and its keys below")
    value = raw.get(key) if raw.has(key) else raw.path.stem  # a default that is wrong can only be the name
    choices = [str(each) for option in alternatives(KEY_SCHEMAS[key]) for each in option.get("enum", ())]
    own = correct_value(value, KEY_SCHEMAS[key])
    meant = suggest(value, choices) if isinstance(value, str) and not own else ""
    hint = f"did you mean `{meant}`?" if meant else raw.set_hint(key, own or example_value(KEY_SCHEMAS[key]))
    return raw.diagnostic(key, f"`{key}` is {format_value(value)}", _describe_key(key), hint)


def _describe_key(key: str) -> str:
    return f"it takes {describe_type(KEY_SCHEMAS[key])}: {KEY_SCHEMAS[key]['description']}"
