"""The pages docs/how-to/migrate-from-*.md: what they name exists, and hints for old names agree with them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.helpers.doc_tables import check_names, code_in, recipe_keys, table_rows
from trainer.recipe.hints import advice_for, guess_key, option_hint
from trainer.recipe.tables import KEY_SCHEMAS

PAGES = sorted((Path(__file__).parents[3] / "docs" / "how-to").glob("migrate-from-*.md"))
# Titles of the first column in tables with settings.
SETTING_TITLES = ("flag", "setting", "argument")
SETTING = re.compile(r"[a-z]\w*(\.\w+)*")
NO_COUNTERPART = ("not needed", "not supported")
# Page, setting of another system, and the cell with its counterparts.
SETTINGS = [
    (page.stem, setting, cells[1])
    for page in PAGES
    for title, cells in table_rows(page)
    if title in SETTING_TITLES and cells[0].startswith("`")
    for setting in code_in(cells[0])
]


def test_each_system_has_a_page_with_settings():
    systems = {
        f"migrate-from-{name}"
        for name in ("gpt-neo-example", "llamabpt", "flaxlm", "redco", "easylm")
    }
    assert systems == {page.stem for page in PAGES} == {page for page, _, _ in SETTINGS}
    assert all(SETTING.fullmatch(setting) for _, setting, _ in SETTINGS)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_keys_and_commands_of_the_page_exist(page: Path, capsys: pytest.CaptureFixture[str]):
    for title, cells in table_rows(page):
        assert code_in(cells[1]) or cells[1] in NO_COUNTERPART, cells
        # The table of redco has commands with values.
        if title != "redco":
            check_names(code_in(cells[1]), capsys)


def test_hint_for_a_setting_agrees_with_the_page():
    for _, setting, counterparts in SETTINGS:
        keys, advice = recipe_keys(code_in(counterparts)), advice_for(setting)
        assert advice or keys, f"{setting} has neither a key nor advice"
        if advice:
            assert not keys or any(f"`{key}" in advice for key in keys), setting
        elif setting not in KEY_SCHEMAS:
            assert guess_key(setting) in keys, setting
            assert option_hint(f"--{setting}", ""), setting
