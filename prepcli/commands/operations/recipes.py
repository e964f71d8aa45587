"""List, read and copy the recipes that prep ships."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from prepcli.commands.operations.recipe_files import recipe_paths, shipped_recipe
from prepcli.core.errors import Option, PrepError, text
from prepcli.execution.output_paths import check_local_path
from prepcli.models.mesh import parse_mesh
from prepcli.models.presets import preset_name
from prepcli.stores.files import io_error, write_file
from trainer.recipe import Recipe, load_recipe


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
        recipes.append(
            ShippedRecipe(path, _recipe_summary(path), _model_name(recipe), _num_devices(recipe))
        )
    return recipes


def copy_recipe(name: str, out: Path | None) -> Path:
    """Copy a shipped recipe to a file, `NAME.toml` by default, and return its path.

    Raises:
        UsageError: No recipe has this name.
        PrepError: The file exists or cannot be written.
    """
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


def _recipe_summary(path: Path) -> str:
    """Return the first sentence of the comment at the top of a recipe."""
    lines = path.read_text("utf-8").splitlines()
    comment = " ".join(line.lstrip("# ") for line in lines[:2] if line.startswith("# "))
    return comment.partition(". ")[0].rstrip(".")


def _model_name(recipe: Recipe) -> str:
    """Return the name of a recipe's model."""
    table = recipe.model
    return table.preset or table.config or preset_name(table.path or "") or str(table.path)


def _num_devices(recipe: Recipe) -> int:
    """Return the number of devices of a recipe's mesh."""
    # Shipped recipes set every mesh size. None has the size -1 (all remaining devices).
    return math.prod(parse_mesh(recipe.mesh).sizes)
