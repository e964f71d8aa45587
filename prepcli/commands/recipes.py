"""`prep recipes`: the recipes that prep ships."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from prepcli.console.lists import join_names
from prepcli.console.ui import Report, format_table
from prepcli.errors import PrepError, usage_error
from trainer.files.writing import write_file
from trainer.models.mesh import parse_mesh
from trainer.models.presets import preset_name
from trainer.models.suggest import did_you_mean, suggest
from trainer.recipe import Recipe, load_recipe

PACKAGE = Path(__file__).parents[1]
SUFFIX = ".toml"


def recipes(name: str | None, columns: int | None = None) -> Report:
    """List the shipped recipes, or print one.

    Args:
        name: A recipe's name without `.toml`; None lists all.
        columns: Width of the terminal. None means unlimited.

    Raises:
        UsageError: No recipe has this name.
    """
    if name is not None:
        path = shipped_recipe(name)
        text = path.read_text("utf-8")
        return Report(text.rstrip("\n"), {"name": path.stem, "path": str(path), "text": text})
    entries = [_entry(path) for path in _recipe_paths().values()]
    titles = ["recipe", "model", "devices", "summary"]
    rows = [[entry["name"], *(str(entry[title]) for title in titles[1:])] for entry in entries]
    return Report(
        format_table(rows, titles, width=columns, wrapped=["summary"]), {"recipes": entries}
    )


def copy_recipe(name: str, out: Path | None) -> Report:
    """Copy a shipped recipe to a file, `NAME.toml` by default.

    Raises:
        UsageError: No recipe has this name.
        PrepError: The file exists or cannot be written.
    """
    path = shipped_recipe(name)
    target = out or Path(path.name)
    try:
        write_file(target, path.read_bytes(), overwrite=False)
    except FileExistsError:
        raise PrepError(
            f"{target} already exists", "a copy replaces no file", "`--out FILE`"
        ) from None
    except OSError as error:
        raise PrepError(f"{target} cannot be written", error.strerror or str(error)) from None
    return Report(str(target), {"name": path.stem, "path": str(target)})


def shipped_recipe(name: str) -> Path:
    """Return the path of the shipped recipe with this name, with or without `.toml`.

    Raises:
        UsageError: No recipe has this name.
    """
    paths = _recipe_paths()
    stem = name.removesuffix(SUFFIX)
    if stem not in paths:
        hint = did_you_mean(stem, paths) or "`prep recipes` lists them"
        raise usage_error(f"unknown recipe `{name}`", f"known: {', '.join(paths)}", hint)
    return paths[stem]


def find_recipe(path: Path) -> Path:
    """Return the recipe that a path names: a file, or the shipped recipe if the path is the bare name of one.

    Raises:
        UsageError: The name stands for a shipped recipe and for a file.
    """
    shipped = _recipe_paths().get(str(path))
    if shipped is None or path.exists():
        return path
    own = path.with_name(f"{path.name}{SUFFIX}")
    if own.exists():
        why = f"it is the name of a shipped recipe and of the file {own}"
        hint = f"`{own}`, or a copy of the shipped recipe: `prep recipes copy {path} --out FILE`"
        raise usage_error(f"`{path}` is ambiguous", why, hint)
    return shipped


def find_training_recipe(path: Path) -> Path:
    """Return the recipe that a path names. See `find_recipe`. A missing file may be returned.

    Raises:
        UsageError: The name stands for a shipped recipe and for a file, or there is no such file and it is similar to
            the name of a shipped recipe.
    """
    recipe_path = find_recipe(path)
    if recipe_path.exists():
        return recipe_path
    similar_file = suggest(path.name, [file.name for file in path.parent.glob(f"*{SUFFIX}")])
    if similar_file is None and (hint := _shipped_hint(path.name.removesuffix(SUFFIX))):
        raise usage_error(
            f"{path} does not exist", "a recipe is a TOML file, or the name of a shipped one", hint
        )
    return recipe_path


def _shipped_hint(name: str) -> str:
    """Return a hint with the shipped recipes of a similar name, or empty if there are none."""
    shipped = _recipe_paths()
    if name in shipped:
        return f"did you mean `{name}`, the shipped recipe?"
    if names := [other for other in shipped if other.startswith(name)]:
        return f"did you mean {join_names([f'`{other}`' for other in names])}?"
    return did_you_mean(name, shipped)


def similar_recipe(name: str, other_names: Iterable[str]) -> str | None:
    """Return the shipped recipe with a similar name, or None if no name or another name is closer."""
    shipped = _recipe_paths()
    similar = suggest(name, [*shipped, *other_names])
    return similar if similar in shipped else None


def recipes_folder() -> Path:
    """Return the folder of the shipped recipes: inside an installed wheel, or in a checkout."""
    installed = PACKAGE / "_recipes"
    return installed if installed.is_dir() else PACKAGE.parent / "recipes"


def recipe_names() -> list[str]:
    """Return the names of the shipped recipes, in alphabetical order."""
    return [*_recipe_paths()]


def _recipe_paths() -> dict[str, Path]:
    """Return the paths of the shipped recipes by name, in alphabetical order."""
    return {
        path.stem: path
        for path in sorted(recipes_folder().glob(f"*{SUFFIX}"), key=lambda path: path.stem)
    }


def _entry(path: Path) -> dict[str, Any]:
    """Return name, path, summary, model and devices of a recipe."""
    recipe = load_recipe(path).recipe
    return {
        "name": path.stem,
        "path": str(path),
        "summary": _summary(path),
        "model": _model(recipe),
        "devices": _devices(recipe),
    }


def _summary(path: Path) -> str:
    """Return the first sentence of the comment at the top of a recipe."""
    lines = path.read_text("utf-8").splitlines()
    comment = " ".join(line.lstrip("# ") for line in lines[:2] if line.startswith("# "))
    return comment.partition(". ")[0].rstrip(".")


def _model(recipe: Recipe) -> str:
    """Return the name of the model that a recipe trains."""
    table = recipe.model
    return table.preset or table.config or preset_name(table.path or "") or str(table.path)


def _devices(recipe: Recipe) -> int:
    """Return the number of devices of a recipe's mesh, whose sizes are all set in shipped recipes."""
    return math.prod(parse_mesh(recipe.mesh).sizes)
