"""Tests of the checks of a model against a recipe."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.tiny_configs import LLAMA, MIXTRAL
from tests.trainer.training.test_preflight import RECIPE
from trainer.distributed.sharding import sharding_without_devices
from trainer.models.errors import PrepError
from trainer.models.mesh import parse_mesh
from trainer.models.registry import family_of
from trainer.nn.model_spec import build_model
from trainer.recipe import load_recipe
from trainer.training.setup import check_model_layout

SHARDING = sharding_without_devices(parse_mesh("1,1,1"))


@pytest.mark.parametrize("policy", ["dots_saveable", '["mlp_output"]', '["mlp_hidden"]'])
def test_check_model_layout_rejects_hidden_units_of_experts(tmp_path: Path, policy: str):
    (tmp_path / "x.toml").write_text(RECIPE)
    recipe = load_recipe(tmp_path / "x.toml", [f"model.remat_policy={policy}"]).recipe
    dense, moe = (build_model(family_of(config), config, is_tied=False) for config in (LLAMA, MIXTRAL))
    check_model_layout(recipe, dense, SHARDING)
    if "mlp_hidden" not in policy:
        check_model_layout(recipe, moe, SHARDING)
        return
    with pytest.raises(PrepError) as caught:
        check_model_layout(recipe, moe, SHARDING)
    why = "the experts of mixtral compute their hidden units again"
    assert str(caught.value) == f"`model.remat_policy` has mlp_hidden - {why} - remove it from the list"
