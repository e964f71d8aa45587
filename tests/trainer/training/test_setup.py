"""The setup of a step: the attention kernel of a run, the sizes of its tiles, and plans compiled apart."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from prepcli.core.errors import USAGE, PrepError, UsageError
from prepcli.models.attention_kernels import (
    ANY_ACCELERATOR,
    AttentionFeature,
    AttentionNeeds,
    DeviceKind,
    KernelChoice,
    rank_kernels,
)
from prepcli.models.layer_config import DropoutConfig
from prepcli.models.mesh import parse_mesh
from prepcli.models.registry import family_of
from prepcli.models.rules import DEFAULT_RULES
from tests.helpers import runs
from tests.helpers.tiny_configs import LLAMA
from tests.trainer.planning.test_memory_estimate import llama
from tests.trainer.run.test_checks import RECIPE
from trainer.distributed.sharding import ShardingContext, make_sharding_context
from trainer.nn.model_spec import AttentionOptions, ForwardConfig, build_model, model_from_manifest
from trainer.planning.model_shapes import override_config
from trainer.planning.step_inputs import attention_needs
from trainer.recipe import Recipe, load_recipe
from trainer.training import setup as step_setup
from trainer.training.compiled_plan import compile_plan, compiled_plan
from trainer.training.feed import batch_shapes
from trainer.training.setup import build_step_setup, choose_kernel, first_correct

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


# The attention kernel of a run: the recipe's, or the first that passes its numeric check.

HOPPER = DeviceKind("cuda", (9, 0))


NEEDS = AttentionNeeds(frozenset({AttentionFeature.CAUSAL}), "bfloat16", 64)


@pytest.fixture(autouse=True)
def _in_recipe_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path("recipe.toml").write_text(RECIPE)


def load(*overrides: str) -> Recipe:
    """Load recipe.toml with overrides."""
    return load_recipe(Path("recipe.toml"), overrides).recipe


def fail_checks(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Let the numeric check of some kernels fail, and that of all others pass."""
    monkeypatch.setattr(
        step_setup, "find_mismatch", lambda name, *_: "it is wrong" if name in names else ""
    )


def choose_auto(device: DeviceKind, length: int = 4096) -> tuple[KernelChoice, list[str]]:
    """Return the choice of `auto` on a device, and the warnings."""
    warnings: list[str] = []
    choices = rank_kernels("auto", NEEDS, device=device, length=length)
    return first_correct(choices, NEEDS, device, is_auto=True, warn=warnings.append), warnings


def test_needs_come_from_model_recipe_and_mesh():
    recipe = load("model.dtype=bfloat16", "model.remat_policy=dots_saveable")
    needs = attention_needs(
        recipe, llama(num_key_value_heads=2), parse_mesh("1,2,4"), DEFAULT_RULES
    )
    assert needs == AttentionNeeds(
        frozenset(
            {AttentionFeature.CAUSAL, AttentionFeature.GROUPED_HEADS, AttentionFeature.SAVED_SCORES}
        ),
        "bfloat16",
        8,
    )


def test_needs_include_random_masks():
    rates = DropoutConfig(attention=0.1, fcm_ratio=(0.0, 0.2))
    needs = attention_needs(load(), llama(), None, DEFAULT_RULES, rates)
    assert needs.features == {
        AttentionFeature.CAUSAL,
        AttentionFeature.DROPOUT,
        AttentionFeature.FCM,
    }


@pytest.mark.parametrize(("length", "name"), [(255, "reference"), (256, "blockwise")])
def test_auto_depends_on_the_length(monkeypatch: pytest.MonkeyPatch, length: int, name: str):
    fail_checks(monkeypatch)
    choice = choose_kernel(
        load(f"data.seq_length={length}"), llama(), ShardingContext(), warn=pytest.fail
    )
    assert choice.name == name
    assert "no kernel for cpu" in choice.reason


def test_auto_takes_the_kernel_of_the_platform_if_it_is_right(monkeypatch: pytest.MonkeyPatch):
    fail_checks(monkeypatch)
    assert choose_auto(HOPPER) == (KernelChoice("cudnn", "auto: the kernel for cuda"), [])


def test_auto_warns_and_falls_back_if_a_check_fails(monkeypatch: pytest.MonkeyPatch):
    fail_checks(monkeypatch, "cudnn")
    choice, warnings = choose_auto(HOPPER)
    assert str(choice) == (
        "attention blockwise (auto: sequences of more than 1,024 tokens; cudnn failed its numeric check)"
    )
    assert warnings == ["attention kernel `cudnn` failed its numeric check: it is wrong"]


def test_auto_ends_with_the_reference_kernel(monkeypatch: pytest.MonkeyPatch):
    fail_checks(monkeypatch, "cudnn", "blockwise", "reference")
    choice, warnings = choose_auto(HOPPER)
    assert choice.name == "reference"
    assert len(warnings) == 2


def test_failure_of_all_kernels_is_an_error(monkeypatch: pytest.MonkeyPatch):
    fail_checks(monkeypatch, "blockwise")
    choices = (KernelChoice("blockwise", "auto: the only one for split sequences"),)
    with pytest.raises(
        PrepError, match="all attention kernels failed their numeric check - blockwise failed"
    ):
        first_correct(choices, NEEDS, HOPPER, is_auto=True, warn=lambda _: None)


def test_requested_kernel_that_fails_its_check_is_an_error(monkeypatch: pytest.MonkeyPatch):
    fail_checks(monkeypatch, "blockwise")
    with pytest.raises(PrepError) as caught:
        choose_kernel(
            load("model.attention_kernel=blockwise"), llama(), ShardingContext(), warn=pytest.fail
        )
    assert not isinstance(caught.value, UsageError)
    assert str(caught.value) == (
        'attention kernel `blockwise` failed its numeric check - it is wrong - `model.attention_kernel = "auto"`'
    )


def test_requested_kernel_without_its_platform_is_a_usage_error():
    with pytest.raises(UsageError, match="it runs on cuda, not on cpu"):
        choose_kernel(
            load("model.attention_kernel=cudnn"), llama(), ShardingContext(), warn=pytest.fail
        )


def test_reference_kernel_is_not_checked(monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: Any) -> str:
        raise AssertionError("checked")

    monkeypatch.setattr(step_setup, "find_mismatch", refuse)
    assert choose_kernel(load(), llama(), ShardingContext(), warn=pytest.fail).name == "reference"


# Tests of compiling a recipe's training step in a process of its own.

MESH = "1,2,4"


TEXTS = {"type": "text", "path": ("nowhere.txt",)}


needs_libtpu = pytest.mark.skipif(find_spec("libtpu") is None, reason="needs the extra `tpu`")


def make_recipe(data: Mapping[str, Any] = TEXTS, **model: Any) -> Recipe:
    """Return a recipe whose checkpoint and data do not exist."""
    return Recipe.model_validate(
        {
            "name": "planned",
            "mesh": MESH,
            "model": {"path": "nowhere", "head_chunk_size": 5, **model},
            "data": {"seq_length": runs.LENGTH, **data},
            "batch": {"size": 8},
            # SGD compiles fast.
            "optimizer": {"type": "sgd", "lr": 1e-3, "warmup_ratio": 0.1},
            "train": {"epochs": 1},
        }
    )


def make_manifest(config: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of a manifest that describe a model."""
    return {"config": config, "tied": False, "scan": True, "scan_axis": 0, "rules": []}


def test_plan_matches_the_training_step():
    """The process compiles for as many CPU devices as this one has."""
    recipe = make_recipe(remat_policy="nothing_saveable", param_dtype="bfloat16")
    manifest = make_manifest(runs.LLAMA)
    plan = compiled_plan(recipe, manifest, parse_mesh(MESH))
    sharding = make_sharding_context(parse_mesh(MESH))
    setup = build_step_setup(
        recipe, model_from_manifest(manifest), sharding=sharding, kernel="reference", steps=10
    )
    expected = compile_plan(
        setup, batch_shapes(runs.make_job(setup).train, 8, setup.sharding), "8 CPU devices"
    )
    assert (plan.target, plan.is_upper_bound) == ("8 CPU devices", True)
    assert plan.alias_nbytes >= 0.9 * plan.output_nbytes > 0, "the state is donated"
    cost_of_process = {"compile_s": 0, "host_nbytes": 0}
    assert plan.to_json() | cost_of_process == expected.to_json() | cost_of_process
    assert {collective.kind for collective in plan.collectives} >= {"all-gather", "all-reduce"}


@pytest.mark.parametrize(
    "schedule",
    [
        {"schedule": "cosine_restarts", "cycles": 4},
        {"schedule": "linear", "warmup_ratio": 0.03, "decay_steps": 10_000},
    ],
    ids=str,
)
def test_plan_of_epochs_needs_no_number_of_steps(schedule: dict[str, Any]):
    recipe = make_recipe()
    optimizer = recipe.optimizer.model_copy(update={"warmup_ratio": None, **schedule})
    recipe = Recipe.model_validate(
        recipe.model_copy(update={"optimizer": optimizer}).model_dump(mode="json")
    )
    plan = compiled_plan(recipe, make_manifest(runs.LLAMA), parse_mesh("1,1,1"))
    assert plan.alias_nbytes >= 0.9 * plan.output_nbytes > 0


def test_errors_of_the_process_are_raised():
    with pytest.raises(
        PrepError, match="a micro-batch of 8 does not divide among 16 replicas"
    ) as caught:
        compiled_plan(make_recipe(), make_manifest(runs.LLAMA), parse_mesh("1,16,1"))
    assert caught.value.code == USAGE


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tpu_plan_is_not_an_upper_bound(dtype: str, monkeypatch: pytest.MonkeyPatch):
    """XLA_FLAGS of the test suite are unknown to libtpu."""
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    recipe, manifest = make_recipe(dtype=dtype), make_manifest(runs.LLAMA)
    plan = compiled_plan(recipe, manifest, parse_mesh("1,2,2"), "v5e:2x2")
    assert (plan.target, plan.is_upper_bound) == ("v5e:2x2", False)
    assert min(plan.temp_nbytes, plan.alias_nbytes) > 0


@needs_libtpu
@pytest.mark.slow
def test_unknown_topology_is_a_usage_error():
    with pytest.raises(
        PrepError, match=r"unknown TPU topology 'v5p' - INVALID_ARGUMENT.* - for example"
    ) as caught:
        compiled_plan(make_recipe(), make_manifest(runs.LLAMA), parse_mesh("1,2,2"), "v5p")
    assert caught.value.code == USAGE
