"""`prep recipes`: the recipes that prep ships."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from prepcli.console.ui import Report, format_table
from prepcli.errors import PrepError
from prepcli.operations.recipe_files import recipe_paths, shipped_recipe
from trainer.files.writing import write_file
from trainer.models.mesh import parse_mesh
from trainer.models.presets import preset_name
from trainer.recipe import Recipe, load_recipe


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
    entries = [_entry(path) for path in recipe_paths().values()]
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
