"""Logical shards of a recipe, and errors for what an exact reduction does not support."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from prepcli.core.errors import USAGE, PrepError
from prepcli.models.mesh import parse_mesh
from prepcli.models.partition import num_batch_shards
from prepcli.models.rule_text import merge_rules
from tests.helpers.runs import make_setup
from tests.trainer.run.test_checks import RECIPE as LLAMA_RECIPE
from trainer.planning.step_inputs import check_exact_model, reduction_shards
from trainer.recipe import batch_shape, load_recipe

EXACT = "train.reduction=exact"


def count_shards(folder: Path, mesh: str, *overrides: str, rules: tuple[str, ...] = ()) -> int:
    """Return the logical shards of a recipe with batches of 8."""
    (folder / "recipe.toml").write_text(LLAMA_RECIPE)
    recipe = load_recipe(folder / "recipe.toml", overrides).recipe
    parsed, merged = parse_mesh(mesh), merge_rules(rules)
    shape = batch_shape(
        recipe.batch, n_devices=parsed.n_devices, n_replicas=num_batch_shards(parsed, merged)
    )
    return reduction_shards(recipe, shape, mesh=parsed, rules=merged)


@pytest.mark.parametrize(
    ("mesh", "overrides", "num_shards"),
    [
        ("1,1,1", (), 0),
        ("2,2,2", (), 0),
        ("1,1,1", (EXACT,), 8),
        ("2,4,1", (EXACT,), 8),
        ("2,1,1", (EXACT, "batch.accumulate=4"), 8),
        ("2,1,1", (EXACT, "batch.size=12"), 4),
        ("2,1,1", (EXACT, "batch.size=64"), 8),
        ("2,1,1", (EXACT, "batch.size=64", "train.reduction_shards=64"), 64),
    ],
)
def test_reduction_shards_follow_recipe_and_batch(
    tmp_path: Path, mesh: str, overrides: tuple[str, ...], num_shards: int
):
    assert count_shards(tmp_path, mesh, *overrides) == num_shards


@pytest.mark.parametrize(
    ("mesh", "overrides", "text"),
    [
        (
            "1,2,2",
            (),
            "`train.reduction` is exact, and the mesh has mp 2 - results are exact for dp and fsdp only: other axes "
            "split sums that XLA orders - use a mesh of dp and fsdp only, or `--set train.reduction=fast`",
        ),
        (
            "dp:2,sp:2",
            (),
            "`train.reduction` is exact, and the mesh has sp 2 - results are exact for dp and fsdp only: other axes "
            "split sums that XLA orders - use a mesh of dp and fsdp only, or `--set train.reduction=fast`",
        ),
        (
            "1,1,1",
            ("train.reduction_shards=3",),
            "`train.reduction_shards` is 3 - it has to be a power of two that divides the batch of 8"
            " - `--set train.reduction_shards=8`",
        ),
        (
            "1,1,1",
            ("train.reduction_shards=16",),
            "`train.reduction_shards` is 16 - it has to be a power of two that divides the batch of 8"
            " - `--set train.reduction_shards=8`",
        ),
        (
            "4,4,1",
            ("batch.size=32",),
            "`train.reduction` is exact, and the batch has 8 logical shards - 16 replicas x `batch.accumulate` 1 = 16, "
            "which does not divide them - `--set train.reduction_shards=16`",
        ),
        (
            "3,1,1",
            ("batch.size=24",),
            "`train.reduction` is exact, and the batch has 8 logical shards - 3 replicas x `batch.accumulate` 1 = 3, "
            "which does not divide them - make replicas x `batch.accumulate` a power of two",
        ),
        (
            "1,1,1",
            ("model.offload=residuals", "model.remat_policy=nothing_saveable"),
            "`train.reduction` is exact, and `model.offload` is residuals - both together are not supported"
            " - `--set model.offload=none` or `--set train.reduction=fast`",
        ),
        *(
            (
                "1,1,1",
                (f"optimizer.type={name}",),
                f"`train.reduction` is exact, and `optimizer.type` is {name} - it sums over parameters in the order of "
                "the mesh; adamw, lion, sgd do not - `--set optimizer.type=adamw` or `--set train.reduction=fast`",
            )
            for name in ("adafactor", "muon", "palm")
        ),
    ],
)
def test_reduction_shards_rejects_inexact_settings(
    tmp_path: Path, mesh: str, overrides: tuple[str, ...], text: str
):
    with pytest.raises(PrepError) as caught:
        count_shards(tmp_path, mesh, EXACT, *overrides)
    assert (caught.value.message, caught.value.code) == (text, USAGE)


def test_reduction_shards_rejects_axes_that_split_no_batch(tmp_path: Path):
    with pytest.raises(PrepError, match="the mesh has fsdp 2"):
        count_shards(tmp_path, "2,2,1", EXACT, rules=("act:batch=dp",))


@pytest.mark.parametrize("kernel", ["cudnn", "pallas-splash"])
def test_check_exact_model_rejects_accelerator_kernels(kernel: str):
    arch_config = make_setup().model.arch_config
    check_exact_model(arch_config, "reference")
    check_exact_model(arch_config, "blockwise")
    with pytest.raises(PrepError, match=f"`model.attention_kernel` is {kernel} - "):
        check_exact_model(arch_config, kernel)


def test_check_exact_model_rejects_encoders():
    arch_config = make_setup().model.arch_config
    with pytest.raises(PrepError, match="the model has an encoder"):
        check_exact_model(replace(arch_config, encoder=arch_config), "reference")
