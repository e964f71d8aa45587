"""`prep recipes`: the recipes that prep ships."""

from __future__ import annotations

from pathlib import Path

from prepcli.console.ui import Report, format_table
from prepcli.errors import usage_error
from trainer.models.suggest import did_you_mean

PACKAGE = Path(__file__).parents[1]


def recipes(name: str | None, columns: int | None = None) -> Report:
    """List the shipped recipes, or print one.

    Args:
        name: A recipe's name without `.toml`; None lists all.
        columns: Width of the terminal; None: unlimited.

    Raises:
        UsageError: No recipe has this name.
    """
    paths = {path.stem: path for path in sorted(recipes_folder().glob("*.toml"), key=lambda path: path.stem)}
    if name is None:
        fields = [{"name": name, "path": str(path), "summary": _summary(path)} for name, path in paths.items()]
        rows = [[entry["name"], entry["summary"]] for entry in fields]
        return Report(format_table(rows, ["recipe", "summary"], width=columns), {"recipes": fields})
    if name not in paths:
        hint = did_you_mean(name, paths) or "`prep recipes` lists them"
        raise usage_error(f"unknown recipe `{name}`", f"known: {', '.join(paths)}", hint)
    text = paths[name].read_text("utf-8")
    return Report(text.rstrip("\n"), {"name": name, "path": str(paths[name]), "text": text})


def recipes_folder() -> Path:
    """Return the folder of the shipped recipes: inside an installed wheel, or in a checkout."""
    installed = PACKAGE / "_recipes"
    return installed if installed.is_dir() else PACKAGE.parent / "recipes"


def _summary(path: Path) -> str:
    """Return the first sentence of the comment at the top of a recipe."""
    lines = path.read_text("utf-8").splitlines()
    comment = " ".join(line.lstrip("# ") for line in lines[:2] if line.startswith("# "))
    return comment.partition(". ")[0].rstrip(".")
