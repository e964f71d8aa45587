"""The table `log.wandb` of a recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from prepcli.core.errors import UsageError
from trainer.recipe import load_recipe
from trainer.recipe.conflicts import check_wandb_table

RECIPE = Path(__file__).parents[3] / "recipes" / "llama-7b.toml"


def test_wandb_table_is_kept_as_written():
    table = 'log.wandb={ project = "p", tags = ["a"], offline = true }'
    assert load_recipe(RECIPE, [table]).recipe.log.wandb == {
        "project": "p",
        "tags": ["a"],
        "offline": True,
    }


@pytest.mark.parametrize(
    ("table", "what"),
    [
        ({}, "has no `project`"),
        ({"project": "p", "ofline": True}, "unknown key `ofline`"),
        ({"project": 3}, "`project` in `log.wandb` is 3"),
        ({"project": "p", "offline": 1}, "`offline`"),
        ({"project": "p", "tags": "a"}, "`tags`"),
    ],
)
def test_invalid_wandb_tables_are_refused(table: dict[str, Any], what: str):
    with pytest.raises(UsageError, match=what):
        check_wandb_table(table)


def test_invalid_wandb_table_is_reported_with_its_line():
    with pytest.raises(UsageError, match=r"unknown key `grup` in `log\.wandb`"):
        load_recipe(RECIPE, ['log.wandb={ project = "p", grup = "x" }'])
