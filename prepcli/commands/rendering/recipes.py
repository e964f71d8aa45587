"""Shipped recipes as text and JSON."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from prepcli.commands.console.ui import Report
from prepcli.commands.operations.recipes import ShippedRecipe
from prepcli.core.tables import format_table


def recipes_report(recipes: Sequence[ShippedRecipe], columns: int | None) -> Report:
    """Return the table of the recipes.

    Args:
        recipes: The recipes.
        columns: Width of the terminal. None means unlimited.
    """
    rows: list[tuple[str, ...]] = []
    entries: list[dict[str, object]] = []
    for recipe in recipes:
        name = recipe.path.stem
        rows.append((name, recipe.model, str(recipe.devices), recipe.summary))
        entries.append(
            {
                "name": name,
                "path": str(recipe.path),
                "summary": recipe.summary,
                "model": recipe.model,
                "devices": recipe.devices,
            }
        )
    header = ("recipe", "model", "devices", "summary")
    table = format_table(rows, header, width=columns, wrapped=["summary"])
    return Report(table, {"recipes": entries})


def recipe_report(path: Path) -> Report:
    """Return the text of a recipe."""
    text = path.read_text("utf-8")
    return Report(text.rstrip("\n"), {"name": path.stem, "path": str(path), "text": text})


def copy_report(name: str, copy: Path) -> Report:
    """Return the path of the copy of a recipe."""
    return Report(str(copy), {"name": name, "path": str(copy)})
