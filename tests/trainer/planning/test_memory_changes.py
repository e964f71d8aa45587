"""Changes of a recipe that make a step fit."""

from __future__ import annotations

from pathlib import Path

import pytest

from prepcli.core.errors import PYTHON, TERMINAL
from prepcli.models.presets import PRESETS
from prepcli.models.rules import DEFAULT_RULES
from tests.helpers.training_plans import load_text
from trainer.planning.memory_changes import MemoryChange, find_memory_change
from trainer.planning.model_shapes import model_of_config
from trainer.planning.training_plan import TrainingPlan, plan_training, with_overrides

GB = 10**9
MODEL = model_of_config(PRESETS["llama-7b"])


DENSE = ("model.attention_kernel=reference",)
# All changes except those of the mesh and of micro-batches.
LEAN = (
    *(
        "model.remat_policy=nothing_saveable",
        "model.attention_kernel=blockwise",
        "model.ffn_chunk_size=512",
    ),
    *("model.head_chunk_size=128", "model.q_chunk_size=256", "model.k_chunk_size=256"),
)


def plan_7b(folder: Path, *overrides: str) -> TrainingPlan:
    """Plan a step of LLaMA 7B on 8 devices."""
    recipe = load_text(
        folder, "mesh=1,8,1", "data.seq_length=8192", "model.dtype=bfloat16", *DENSE, *overrides
    )
    return plan_training(recipe, MODEL, DEFAULT_RULES)


def find_change(plan: TrainingPlan, limit_gb: int) -> MemoryChange:
    """Return the changes to `limit_gb`, checked against a new plan of the changed recipe."""
    change = find_memory_change(plan, MODEL, DEFAULT_RULES, limit_nbytes=limit_gb * GB)
    assert change is not None
    again = plan_training(with_overrides(plan.recipe, change.values), MODEL, DEFAULT_RULES)
    assert again.memory.peak == change.plan.memory.peak <= limit_gb * GB < plan.memory.peak
    return change


@pytest.mark.parametrize("limit_gb", [16, 32, 80, 141])
def test_changes_are_sufficient_and_each_is_needed(tmp_path: Path, limit_gb: int):
    plan = plan_7b(tmp_path)
    change = find_change(plan, limit_gb)
    for key in change.values:
        fewer = with_overrides(
            plan.recipe, {name: value for name, value in change.values.items() if name != key}
        )
        assert plan_training(fewer, MODEL, DEFAULT_RULES).memory.peak > limit_gb * GB, key


def test_remat_is_tried_before_other_changes(tmp_path: Path):
    overrides = find_change(plan_7b(tmp_path), 141).overrides
    assert overrides.render(TERMINAL) == "`--set model.remat_policy=nothing_saveable`"
    assert overrides.render(PYTHON) == '`overrides=["model.remat_policy=nothing_saveable"]`'


def test_micro_batches_keep_the_batch_size(tmp_path: Path):
    overrides = (
        "batch.size=64",
        "model.remat_policy=nothing_saveable",
        "model.attention_kernel=blockwise",
    )
    change = find_change(plan_7b(tmp_path, *overrides), 30)
    assert change.plan.tokens == 64 * 8192
    assert change.values == {"batch.accumulate": 8}


def test_larger_meshes_are_the_last_resort(tmp_path: Path):
    change = find_change(plan_7b(tmp_path, *LEAN), 10)
    assert list(change.values) == ["mesh"]
    assert change.plan.mesh.n_devices > 8


def test_no_change_suffices_for_a_tiny_device(tmp_path: Path):
    plan = plan_7b(tmp_path, *LEAN)
    change = find_memory_change(plan, MODEL, DEFAULT_RULES, limit_nbytes=10**6, max_devices=64)
    assert change is None
