"""The section Coverage of docs/explanation/exactness.md: rows are complete, and the keys, commands and tests exist."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.doc_tables import check_names, code_in, table_rows

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "explanation" / "exactness.md"
ROWS = [cells for title, cells in table_rows(PAGE) if title == "#"]
CAPABILITIES = 94
NOT_THERE = ("not supported", "out of scope")


def test_coverage_page_has_every_capability_once():
    assert [int(cells[0]) for cells in ROWS] == list(range(1, CAPABILITIES + 1))


def test_coverage_page_names_keys_and_commands_that_exist(capsys: pytest.CaptureFixture[str]):
    names = {name for cells in ROWS for name in code_in(cells[2])}
    check_names(sorted(names), capsys)


def test_coverage_page_shows_each_capability():
    for cells in ROWS:
        files = [name for name in code_in(cells[3]) if (ROOT / name).is_file()]
        assert len(files) == len(code_in(cells[3])), cells[1]
        assert files or cells[3].startswith("[") or cells[2] in NOT_THERE, cells[1]
