"""List, read and copy the recipes that prep ships."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from prepcli.core.errors import Command, Option, PrepError, text, usage_error
from prepcli.core.formatting import did_you_mean, join_names, suggest
from prepcli.models.mesh import parse_mesh
from prepcli.models.presets import preset_name
from prepcli.stores.addresses import check_local_path
from prepcli.stores.files import io_error, write_file
from trainer.recipe import load_recipe

PACKAGE = Path(__file__).parents[2]
SUFFIX = ".toml"


def shipped_recipe(name: str) -> Path:
    """Return the path of the shipped recipe with this name, with or without `.toml`.

    Raises:
        UsageError: No recipe has this name.
    """
    paths = recipe_paths()
    stem = name.removesuffix(SUFFIX)
    if stem not in paths:
        hint = did_you_mean(stem, paths) or text("{} lists them", Command("recipes"))
        raise usage_error(f"unknown recipe `{name}`", f"known: {', '.join(paths)}", hint)
    return paths[stem]


def find_recipe(path: Path) -> Path:
    """Return the recipe of a path: a file, or the shipped recipe with this name.

    Raises:
        UsageError: A shipped recipe and a file have this name.
    """
    if path.exists():
        return path
    shipped = recipe_paths().get(str(path))
    if shipped is None:
        return path
    own = path.with_name(f"{path.name}{SUFFIX}")
    if own.exists():
        why = f"it is the name of a shipped recipe and of the file {own}"
        copy = Command("recipes", "copy", str(path), Option("out", "FILE"))
        hint = text("`{}`, or a copy of the shipped recipe: {}", own, copy)
        raise usage_error(f"`{path}` is ambiguous", why, hint)
    return shipped


def find_training_recipe(path: Path) -> Path:
    """Return the recipe of a path. See `find_recipe`. A missing file may be returned.

    Raises:
        UsageError: A shipped recipe and a file or folder have this name, or there is no such file and it is similar to
            the name of a shipped recipe.
    """
    recipe_path = find_recipe(path)
    if recipe_path.is_dir() and str(path) in recipe_paths():
        raise usage_error(
            f"`{path}` is a folder",
            "it is also the name of a recipe that prep ships, and a folder comes first",
            _copy_hint(str(path)),
        )
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
    shipped = recipe_paths()
    if name in shipped and Path(name).is_dir():
        return _copy_hint(name)
    if name in shipped:
        return f"did you mean `{name}`, the shipped recipe?"
    if names := [other for other in shipped if other.startswith(name)]:
        return f"did you mean {join_names([f'`{other}`' for other in names])}?"
    return did_you_mean(name, shipped)


def _copy_hint(name: str) -> str:
    """Return a hint for the name of a shipped recipe and of a folder: the recipe file here, or how to write it."""
    if Path(f"{name}{SUFFIX}").is_file():
        return f"`{name}{SUFFIX}`, the recipe in this folder"
    return text("{} writes the recipe to {}", Command("recipes", "copy", name), f"{name}{SUFFIX}")


def similar_recipe(name: str, other_names: Iterable[str]) -> str | None:
    """Return the shipped recipe with a similar name, or None if no name or another name is closer."""
    shipped = recipe_paths()
    similar = suggest(name, [*shipped, *other_names])
    return similar if similar in shipped else None


def recipes_folder() -> Path:
    """Return the folder of the shipped recipes: inside an installed wheel, or in a checkout."""
    installed = PACKAGE / "_recipes"
    return installed if installed.is_dir() else PACKAGE.parent / "recipes"


def recipe_names() -> list[str]:
    """Return the names of the shipped recipes, in alphabetical order."""
    return [*recipe_paths()]


def recipe_paths() -> dict[str, Path]:
    """Return the paths of the shipped recipes by name, in alphabetical order."""
    return {
        path.stem: path
        for path in sorted(recipes_folder().glob(f"*{SUFFIX}"), key=lambda path: path.stem)
    }


@dataclass(frozen=True, slots=True)
class ShippedRecipe:
    """A shipped recipe.

    Attributes:
        path: Its file. The name is that of the file, without `.toml`.
        summary: First sentence of the comment at its top.
        model: Name of its model.
        devices: Number of devices of its mesh.
    """

    path: Path
    summary: str
    model: str
    devices: int


def shipped_recipes() -> list[ShippedRecipe]:
    """Return the shipped recipes, in alphabetical order."""
    recipes: list[ShippedRecipe] = []
    for path in recipe_paths().values():
        recipe = load_recipe(path).recipe
        table = recipe.model
        model = table.preset or table.config or preset_name(table.path or "") or str(table.path)
        # The first sentence of the comment at the top
        lines = path.read_text("utf-8").splitlines()
        comment = " ".join(line.lstrip("# ") for line in lines[:2] if line.startswith("# "))
        summary = comment.partition(". ")[0].rstrip(".")
        # Shipped recipes set every mesh size. None has the size -1 (all remaining devices).
        num_devices = math.prod(parse_mesh(recipe.mesh).sizes)
        recipes.append(ShippedRecipe(path, summary, model, num_devices))
    return recipes


def copy_recipe(name: str, out: Path | None) -> Path:
    """Copy a shipped recipe to a file, `NAME.toml` by default, and return its path."""
    path = shipped_recipe(name)
    target = out or Path(path.name)
    check_local_path(target)
    try:
        write_file(target, path.read_bytes(), overwrite=False)
    except FileExistsError:
        hint = text("{}", Option("out", "FILE"))
        raise PrepError(f"{target} already exists", "a copy replaces no file", hint) from None
    except OSError as error:
        raise io_error(target, error) from None
    return target
