"""The attention kernel of a run: the recipe's, or the first that passes its numeric check."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from prepcli.core.errors import PrepError, UsageError
from prepcli.models.attention_kernels import (
    AttentionFeature,
    AttentionNeeds,
    DeviceKind,
    KernelChoice,
    rank_kernels,
)
from prepcli.models.dropout_config import DropoutConfig
from prepcli.models.mesh import parse_mesh
from prepcli.models.rules import DEFAULT_RULES
from tests.trainer.planning.test_step_inputs import llama
from tests.trainer.run.test_checks import RECIPE
from trainer.distributed.sharding import ShardingContext
from trainer.planning.step_inputs import attention_needs
from trainer.recipe import Recipe, load_recipe
from trainer.training import setup as step_setup
from trainer.training.setup import choose_kernel, first_correct

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
