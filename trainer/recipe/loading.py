"""From a file and `--set` options to a recipe, or to one error that lists all faults with their lines."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from trainer.models.errors import PrepError, usage
from trainer.recipe.checks import Problem, problems
from trainer.recipe.corrections import corrected
from trainer.recipe.faults import Fault, as_error
from trainer.recipe.raw_recipe import Given, read, with_sets
from trainer.recipe.spelling import example, near, options, shown, takes
from trainer.recipe.tables import KEYS, TABLES, Recipe
from trainer.recipe.unknown import hint_for, meant_by, unknown_keys

VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")


@dataclass(frozen=True, slots=True)
class Loaded:
    """A complete recipe. `origins`, by dotted key: `default` or `--set KEY`; of what the file gives, nothing."""

    recipe: Recipe
    origins: Mapping[str, str]


def load(path: Path, sets: Sequence[str] = ()) -> Loaded:
    """The recipe of a file, with values of `--set` (`a.b=v`) in place of the file's, and defaults for all that is left.

    In paths `~` and `${NAME}` are expanded. All that is wrong is one usage error, with file:line where there is a line.
    """
    given, faults = with_sets(read(path), sets)
    unknown, answered = _unknown(given)
    expanded, not_expanded = _expanded(given)
    faults += [*unknown, *not_expanded]
    recipe = _validated(expanded, given, answered)
    if isinstance(recipe, Recipe):
        touched = {_table(key) for key in answered}
        faults += [_conflict(problem, given) for problem in problems(recipe) if touched.isdisjoint(_tables(problem))]
    else:
        faults += recipe
    if faults or not isinstance(recipe, Recipe):
        raise as_error(path, faults)
    return Loaded(recipe, _origins(given))


def _table(key: str) -> str:
    return key.partition(".")[0]


def _tables(problem: Problem) -> set[str]:
    return {_table(key) for key in problem.keys}


def _conflict(problem: Problem, given: Given) -> Fault:
    at_fault = next(filter(given.has, problem.keys), problem.keys[0])
    return given.fault(at_fault, problem.what, problem.why, problem.hint)


def _unknown(given: Given) -> tuple[list[Fault], set[str]]:
    """The faults of unknown keys; and the keys and tables that they were meant to give, or stand in."""
    faults, answered = [], set()
    for path, value in unknown_keys(given.tables):
        faults.append(given.fault(path, f"unknown key `{path}`", hint=hint_for(path, value)))
        answered |= {path, meant_by(path)}
        if isinstance(value, dict):
            answered |= {f"{near(path, TABLES)}.{key}" for key in value}
    return faults, answered - {""}


def _origins(given: Given) -> dict[str, str]:
    defaults = {key: "default" for key in KEYS if not given.has(key)}
    return defaults | {key: f"--set {key}" for key in given.sets}


def _validated(given: Given, shown_as: Given, answered: Collection[str]) -> Recipe | list[Fault]:
    """The recipe, or what is wrong with its values, unknown keys apart. `answered`: keys that are not told as missing,
    since an unknown one was meant for them."""
    try:
        return Recipe.model_validate(_completed(given))
    except ValidationError as error:
        kinds = {_key_of(found["loc"]): found["type"] for found in error.errors(include_url=False)}
    kinds = {key: kind for key, kind in kinds.items() if kind != "missing" or key not in answered}
    return [_missing(key, shown_as) if kind == "missing" else _wrong(key, shown_as) for key, kind in kinds.items()]


def _key_of(place: tuple[int | str, ...]) -> str:
    """The key in which a place of the tables lies."""
    path = ".".join(map(str, place))
    return next((key for key in KEYS if path == key or path.startswith(f"{key}.")), path)


def _completed(given: Given) -> dict[str, Any]:
    """Every table, so that what is missing is a key, and the defaults that depend on something."""
    tables: dict[str, Any] = {"name": given.path.stem, **{name: {} for name in TABLES}, **_known(given.tables)}
    if given.has("data.type") and given.get("data.type") == "json":
        tables["data"] = {"fields": "text"} | tables["data"]
    return tables


def _known(tables: Mapping[str, Any]) -> dict[str, Any]:
    """The tables without unknown keys."""
    known = {name: value for name, value in tables.items() if name in TABLES or (name in KEYS and "." not in name)}
    for name in TABLES:
        if isinstance(inside := known.get(name), dict):
            known[name] = {key: value for key, value in inside.items() if f"{name}.{key}" in KEYS}
    return known


def _expanded(given: Given) -> tuple[Given, list[Fault]]:
    """With `~` and `${NAME}` replaced in what is a path; and the faults of paths where they cannot be."""
    tables, faults = given.copied(), []
    for key, part in KEYS.items():
        if given.has(key) and any(option.get("format") == "path" for option in options(part)):
            table, _, name = key.partition(".")
            try:
                tables[table][name] = _paths(given.get(key), key)
            except PrepError as error:
                faults.append(given.fault(key, error.what, error.why, error.hint))
    return replace(given, tables=tables), faults


def _paths(value: Any, key: str) -> Any:
    if isinstance(value, list):
        return [_paths(each, key) for each in value]
    return _path(value, key) if isinstance(value, str) else value


def _path(text: str, key: str) -> str:
    for name in VARIABLE.findall(text):
        if name not in os.environ:
            why = f"it is {shown(text)}, and {name} is not set"
            raise usage(f"`{key}` needs the variable {name}", why, f"`export {name}=...`")
    expanded = VARIABLE.sub(lambda found: os.environ[found[1]], text)
    if "${" in expanded:
        why = "only `${NAME}` is replaced, and only once"
        raise usage(f"`{key}` is {shown(expanded)}", why, "no `${` in what is left")
    return os.path.expanduser(expanded) if expanded.startswith("~/") or expanded == "~" else expanded


def _missing(key: str, given: Given) -> Fault:
    table, _, name = key.rpartition(".")
    hint = f"`{name} = {example(KEYS[key])}` in [{table}]"
    return given.fault(key, f"`{key}` is missing", _meaning(key), hint)


def _wrong(key: str, given: Given) -> Fault:
    if key in TABLES:
        what = f"`{key}` is {shown(given.get(key))}"
        return given.fault(key, what, "it takes a table", f"`[{key}]`, and its keys below")
    value = given.get(key) if given.has(key) else given.path.stem  # a default that is wrong can only be the name
    choices = [str(each) for option in options(KEYS[key]) for each in option.get("enum", ())]
    own = corrected(value, KEYS[key])
    meant = near(value, choices) if isinstance(value, str) and not own else ""
    hint = f"did you mean `{meant}`?" if meant else given.hint(key, own or example(KEYS[key]))
    return given.fault(key, f"`{key}` is {shown(value)}", _meaning(key), hint)


def _meaning(key: str) -> str:
    return f"it takes {takes(KEYS[key])}: {KEYS[key]['description']}"
