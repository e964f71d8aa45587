"""Write the tables of docs/how-to/migrate-from-*.md: `python -m tools.migration_tables`.

The rows are in `trainer/recipe/other_trainers.toml`. A table replaces the first one below its heading.
The text around the tables is written by hand and stays as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trainer.recipe.other_trainers import (
    MigrationRow,
    MigrationTable,
    advice_for,
    other_trainers,
)
from trainer.recipe.tables import KEY_SCHEMAS
from trainer.recipe.unknown_keys import guess_key

FOLDER = Path(__file__).parents[1] / "docs" / "how-to"
NOT_NEEDED = "not needed"


def migration_page(name: str, text: str) -> str:
    """Return the text of a migration page with its current tables.

    Args:
        name: File name of the page without its suffix.
        text: The page with tables that may be old.

    Raises:
        ValueError: The page has no table below a heading of the data.
    """
    lines = text.splitlines()
    for table in other_trainers().tables:
        if table.page == name:
            lines = _replace_table(lines, table)
    return "\n".join(lines) + "\n"


def _replace_table(lines: Sequence[str], table: MigrationTable) -> list[str]:
    heading = lines.index(f"## {table.heading}")
    start = heading + 1
    while not lines[start].startswith("|"):
        if lines[start].startswith("#"):
            raise ValueError(f"{table.page}: no table below {table.heading!r}")
        start += 1
    end = start
    while end < len(lines) and lines[end].startswith("|"):
        end += 1
    return [*lines[:start], *_table_lines(table), *lines[end:]]


def _table_lines(table: MigrationTable) -> list[str]:
    lines = [f"| {table.column} | prep | difference |", "|---|---|---|"]
    for row in table.rows:
        cells = [row.text or _in_backticks(row.settings), row.prep or _counterpart(row)]
        if row.difference:
            cells.append(f"{row.difference} ")
        else:
            cells.append("")
        lines.append(f"| {' | '.join(cells)}|")
    return lines


def _counterpart(row: MigrationRow) -> str:
    """Return the recipe keys that the settings of a row stand for, each once."""
    keys: list[str] = []
    for setting in row.settings:
        key = _recipe_key(setting)
        if key and key not in keys:
            keys.append(key)
    return _in_backticks(keys) or NOT_NEEDED


def _recipe_key(setting: str) -> str:
    """Return the recipe key of a setting, as the hint for it names, or "" for advice."""
    if setting in KEY_SCHEMAS:
        return setting
    if advice_for(setting):
        return ""
    return guess_key(setting)


def _in_backticks(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def main() -> None:
    """Write the tables of all migration pages."""
    for page in sorted({table.page for table in other_trainers().tables}):
        path = FOLDER / f"{page}.md"
        path.write_text(migration_page(page, path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
