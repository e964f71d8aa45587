"""The page docs/how-to/coming-from.md: what it names exists, and hints for old names agree with it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.helpers.doc_tables import check_names, code_in, recipe_keys, table_rows
from trainer.recipe.hints import advice_for, guess_key, option_hint as hint_of_option
from trainer.recipe.tables import KEY_SCHEMAS

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "coming-from.md"
# Titles of the first column in tables with settings.
SETTING_TITLES = ("flag", "setting", "argument")
# Titles of the first column in tables from tasks to commands and assignments with values.
TASK_TITLES = ("redco", "what you do there")
SETTING = re.compile(r"[a-z]\w*(\.\w+)*")
KEY = re.compile(r"(?!prep\.)[a-z_]+\.[a-z_]+( = .*)?")
NO_COUNTERPART = ("not needed", "not supported")
# Setting of another system, and the cell with its counterparts.
SETTINGS = [
    (setting, cells[1])
    for title, cells in table_rows(PAGE)
    if title in SETTING_TITLES and cells[0].startswith("`")
    for setting in code_in(cells[0])
]


def test_each_system_has_a_section():
    sections = re.findall(r"^## (.*)", PAGE.read_text(), re.MULTILINE)
    others = ["MaxText", "Levanter", "torchtitan", "torchtune", "llama.cpp and GGUF"]
    assert sections == [
        *others, "GPT-Neo example", "llamabpt", "EasyLM", "redco", "flaxlm and JAXSeq",
    ]  # fmt: skip
    assert len(SETTINGS) > 250
    assert all(SETTING.fullmatch(setting) for setting, _ in SETTINGS)


def test_keys_and_commands_of_the_settings_exist(capsys: pytest.CaptureFixture[str]):
    for title, cells in table_rows(PAGE):
        if title in (*SETTING_TITLES, "in the script", "program"):
            assert code_in(cells[1]) or cells[1] in NO_COUNTERPART, cells
            check_names(code_in(cells[1]), capsys)


def test_keys_and_commands_of_the_tasks_exist(capsys: pytest.CaptureFixture[str]):
    for title, cells in table_rows(PAGE):
        if title in TASK_TITLES:
            names = code_in(cells[1])
            check_names([name for name in names if KEY.fullmatch(name)], capsys)
            check_names([name for name in names if name.startswith("prep ")], capsys)


def test_hint_for_a_setting_agrees_with_the_page():
    for setting, counterparts in SETTINGS:
        keys, advice = recipe_keys(code_in(counterparts)), advice_for(setting)
        assert advice or keys, f"{setting} has neither a key nor advice"
        if advice:
            assert not keys or any(f"`{key}" in advice for key in keys), setting
        elif setting not in KEY_SCHEMAS:
            assert guess_key(setting) in keys, setting
            assert hint_of_option(f"--{setting}", ""), setting
