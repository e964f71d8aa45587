"""Conflicts between keys of `[model]`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trainer.recipe.test_errors import GOOD, error_of
from trainer.models.memory_estimate import SAVES_SCORES
from trainer.recipe import load_recipe

BLOCKWISE = GOOD.replace("[data]", 'attention_kernel = "blockwise"\nremat_policy = "{}"\n[data]')


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("policy", SAVES_SCORES)
def test_policy_that_saves_scores_is_rejected_with_blockwise(policy: str):
    assert str(error_of(BLOCKWISE.format(policy))) == (
        f'x.toml:5: `model.remat_policy` is "{policy}", and `model.attention_kernel` "blockwise" - '
        'the policy saves the scores of all tiles - `model.remat_policy = "nothing_saveable"`'
    )


def test_policy_that_saves_scores_is_accepted_with_reference():
    Path("x.toml").write_text(BLOCKWISE.format("dots_saveable").replace('"blockwise"', '"reference"'))
    assert load_recipe(Path("x.toml"), ()).recipe.model.remat_policy == "dots_saveable"
