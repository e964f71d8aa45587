"""Tables of documentation pages that name recipe keys and commands."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from prepcli.commands.cli.main import main
from prepcli.core.errors import OK
from trainer.recipe.tables import KEY_SCHEMAS

COMMAND = "prep "


def table_rows(page: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield the title of the first column and the cells of each row of all tables of a page."""
    title = ""
    for line in page.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" |")]
        if not line.startswith("|"):
            title = ""
        elif not title:
            title = cells[0]
        elif not line.startswith("|---"):
            yield title, cells


def code_in(cell: str) -> tuple[str, ...]:
    """Return the texts in backticks of a cell."""
    return tuple(re.findall(r"`([^`]+)`", cell))


def recipe_keys(names: Sequence[str]) -> list[str]:
    """Return the recipe keys among keys, assignments and commands."""
    return [name.partition(" = ")[0] for name in names if not name.startswith(COMMAND)]


def check_names(names: Sequence[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Check that keys, assignments, and commands with their options exist."""
    assert [key for key in recipe_keys(names) if key not in KEY_SCHEMAS] == []
    for command in [name for name in names if name.startswith(COMMAND)]:
        words = command.split()[1:]
        assert main([*words[: 2 if words[0] == "launch" else 1], "--help"]) == OK, command
        options = capsys.readouterr().out
        assert all(re.search(rf"{word}\b", options) for word in words if word.startswith("--")), (
            command
        )
