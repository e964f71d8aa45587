"""From a file and `--set` options to a recipe, or to one error that says where it stands."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from trainer.errors import PrepError, usage
from trainer.recipe.checks import problems
from trainer.recipe.given import Given, read, unknown, with_sets
from trainer.recipe.spelling import example, near, options, shown, takes
from trainer.recipe.tables import KEYS, TABLES, Recipe

VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")


@dataclass(frozen=True, slots=True)
class Loaded:
    """A complete recipe. `origins`, by dotted key: `default` or `--set KEY`; of what the file gives, nothing."""

    recipe: Recipe
    origins: Mapping[str, str]


def load(path: Path, sets: Sequence[str] = ()) -> Loaded:
    """The recipe of a file, with values of `--set` (`a.b=v`) in place of the file's, and defaults for all that is left.

    In paths `~` and `${NAME}` are expanded. All that is wrong is a usage error, with file:line where there is a line.
    """
    given = with_sets(read(path), sets)
    recipe = _validated(_expanded(given), given)
    for problem in problems(recipe):
        at_fault = next(filter(given.has, problem.keys), problem.keys[0])
        raise usage(f"{given.place(at_fault)}: {problem.what}", problem.why, problem.hint)
    return Loaded(recipe, _origins(given))


def _origins(given: Given) -> dict[str, str]:
    defaults = {key: "default" for key in KEYS if not given.has(key)}
    return defaults | {key: f"--set {key}" for key in given.sets}


def _validated(given: Given, shown_as: Given) -> Recipe:
    try:
        return Recipe.model_validate(_completed(given))
    except ValidationError as error:
        raise _fault(error, shown_as) from None


def _completed(given: Given) -> dict[str, Any]:
    """Every table, so that what is missing is a key, and the defaults that depend on something."""
    tables: dict[str, Any] = {"name": given.path.stem, **{name: {} for name in TABLES}, **given.tables}
    if given.has("data.type") and given.get("data.type") == "json":
        tables["data"] = {"fields": "text"} | tables["data"]
    return tables


def _expanded(given: Given) -> Given:
    """With `~` and `${NAME}` replaced in what is a path."""
    tables = given.copied()
    for key, part in KEYS.items():
        if given.has(key) and any(option.get("format") == "path" for option in options(part)):
            table, _, name = key.partition(".")
            tables[table][name] = _paths(given.get(key), key, given)
    return replace(given, tables=tables)


def _paths(value: Any, key: str, given: Given) -> Any:
    if isinstance(value, list):
        return [_paths(each, key, given) for each in value]
    return _path(value, key, given) if isinstance(value, str) else value


def _path(text: str, key: str, given: Given) -> str:
    for name in VARIABLE.findall(text):
        if name not in os.environ:
            what = f"{given.place(key)}: `{key}` needs the variable {name}"
            raise usage(what, f"it is {shown(text)}, and {name} is not set", f"`export {name}=...`")
    expanded = VARIABLE.sub(lambda found: os.environ[found[1]], text)
    if "${" in expanded:
        why = "only `${NAME}` is replaced, and only once"
        raise usage(f"{given.place(key)}: `{key}` is {shown(expanded)}", why, "no `${` in what is left")
    return os.path.expanduser(expanded) if expanded.startswith("~/") or expanded == "~" else expanded


def _fault(error: ValidationError, given: Given) -> PrepError:
    """What to mend first: an unknown key, which may be the one that is missing, then a value, then what is missing."""
    ranks = {"extra_forbidden": 0, "missing": 2}
    first = min(error.errors(include_url=False), key=lambda each: ranks.get(each["type"], 1))
    path = ".".join(map(str, first["loc"]))
    if first["type"] == "extra_forbidden":
        return unknown(path, given.place(path))
    key = next((key for key in KEYS if path == key or path.startswith(f"{key}.")), path)
    return _missing(key, given) if first["type"] == "missing" else _wrong(key, given)


def _missing(key: str, given: Given) -> PrepError:
    table, _, name = key.rpartition(".")
    hint = f"`{name} = {example(KEYS[key])}` in [{table}]"
    return usage(f"{given.place(key)}: `{key}` is missing", _meaning(key), hint)


def _wrong(key: str, given: Given) -> PrepError:
    if key in TABLES:
        what = f"{given.place(key)}: `{key}` is {shown(given.get(key))}"
        return usage(what, "it takes a table", f"`[{key}]`, and its keys below")
    value = given.get(key) if given.has(key) else given.path.stem  # a default that is wrong can only be the name
    choices = [str(each) for option in options(KEYS[key]) for each in option.get("enum", ())]
    meant = near(value, choices) if isinstance(value, str) else ""
    hint = f"did you mean `{meant}`?" if meant else given.hint(key, example(KEYS[key]))
    return usage(f"{given.place(key)}: `{key}` is {shown(value)}", _meaning(key), hint)


def _meaning(key: str) -> str:
    return f"it takes {takes(KEYS[key])}: {KEYS[key]['description']}"
