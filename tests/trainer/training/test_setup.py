"""Tests of the checks of a model against a recipe, and of the options of its step."""

from __future__ import annotations

from pathlib import Path

import pytest

from prepcli.models.attention_kernels import ANY_ACCELERATOR, DeviceKind
from prepcli.models.mesh import parse_mesh
from prepcli.models.registry import family_of
from tests.helpers.tiny_configs import LLAMA
from tests.trainer.run.test_checks import RECIPE
from trainer.distributed.sharding import ShardingContext
from trainer.nn.model_spec import AttentionOptions, ForwardConfig, build_model
from trainer.planning.model_shapes import override_config
from trainer.recipe import load_recipe
from trainer.training.setup import build_step_setup

SHARDING = ShardingContext(parse_mesh("1,1,1"))


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


def test_stored_rope_type_is_kept_with_mrope(tmp_path: Path):
    config = {**LLAMA, "rope_scaling": YARN}
    manifest = {"config": config, "towers": {"mrope": True, "model_type": "qwen2_vl"}}
    (tmp_path / "x.toml").write_text(RECIPE)
    recipe = load_recipe(tmp_path / "x.toml", ["model.rope_theta=2e4"]).recipe
    assert override_config(manifest, recipe)["config"]["rope_scaling"] == YARN | {"rope_theta": 2e4}


def build_forward_config(
    tmp_path: Path, *overrides: str, device: DeviceKind | None = None
) -> ForwardConfig:
    """Return the options of a step on two CPU devices, with 8 sequences of 300 tokens."""
    (tmp_path / "x.toml").write_text(RECIPE)
    recipe = load_recipe(tmp_path / "x.toml", ["data.seq_length=300", *overrides]).recipe
    model, sharding = (
        build_model(family_of(LLAMA), LLAMA, is_tied=False),
        ShardingContext(parse_mesh("1,2,1")),
    )
    return build_step_setup(
        recipe, model, sharding=sharding, kernel="blockwise", steps=9, device=device
    ).forward_config


@pytest.mark.parametrize(
    ("overrides", "device", "tile", "head_chunk_size"),
    [
        ((), None, (64, 64), 64),
        (("batch.accumulate=4",), None, (64, 64), 256),
        (("data.seq_length=2048",), None, (128, 128), 64),
        ((), ANY_ACCELERATOR, (512, 512), 512),
        (("model.q_chunk_size=512", "model.head_chunk_size=-1"), None, (512, 64), -1),
    ],
)
def test_step_has_the_sizes_of_recipe_or_devices(
    tmp_path: Path,
    overrides: tuple[str, ...],
    device: DeviceKind | None,
    tile: tuple[int, int],
    head_chunk_size: int,
):
    forward_config = build_forward_config(tmp_path, *overrides, device=device)
    assert forward_config.attention_options == AttentionOptions("blockwise", *tile)
    assert forward_config.head_chunk_size == head_chunk_size
