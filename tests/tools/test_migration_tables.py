"""The generator of the tables of the migration pages."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.migration_tables import FOLDER, migration_page
from trainer.recipe.other_trainers import other_trainers

PAGES = sorted(FOLDER.glob("migrate-from-*.md"))
REMOVED = "| removed | row | |"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_migration_page_is_current(page: Path):
    text = page.read_text()
    assert migration_page(page.stem, text) == text


def test_each_migration_page_has_tables():
    assert {page.stem for page in PAGES} == {table.page for table in other_trainers().tables}


def test_migration_page_replaces_old_rows_and_keeps_text():
    page = PAGES[0]
    text = page.read_text()
    separator = "|---|---|---|"
    old = text.replace(separator, f"{separator}\n{REMOVED}", 1)
    assert REMOVED in old
    assert migration_page(page.stem, old) == text


def test_migration_page_without_the_table_is_an_error():
    table = other_trainers().tables[0]
    with pytest.raises(ValueError, match="no table below"):
        migration_page(table.page, f"## {table.heading}\n\n## Next\n")
