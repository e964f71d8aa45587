"""Tests of compiling a recipe's training step in a process of its own."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import pytest

from prepcli.core.errors import USAGE, PrepError
from prepcli.models.mesh import parse_mesh
from tests.helpers import runs
from trainer.distributed.sharding import make_sharding_context
from trainer.nn.model_spec import model_from_manifest
from trainer.recipe import Recipe
from trainer.training.compiled_plan import compile_plan, compiled_plan
from trainer.training.feed import batch_shapes
from trainer.training.setup import build_step_setup

MESH = "1,2,4"
T5 = {
    "model_type": "t5", "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4,
    "vocab_size": 136, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 32,
    "feed_forward_proj": "gated-gelu", "decoder_start_token_id": 0, "pad_token_id": 0,
}  # fmt: skip
TEXTS = {"type": "text", "path": ("nowhere.txt",)}
PAIRS = {
    "type": "json",
    "path": ("nowhere.jsonl",),
    "fields": "[source], target",
    "source_length": 24,
}
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


# By default test_plan_matches_the_training_step shows a donated state.
@pytest.mark.slow
def test_state_is_donated():
    """The batch of a model with an encoder has a source as well."""
    plan = compiled_plan(make_recipe(PAIRS), make_manifest(T5), parse_mesh("1,1,2"))
    assert plan.alias_nbytes >= 0.9 * plan.output_nbytes > 0
    assert plan.argument_nbytes - plan.alias_nbytes >= 8 * (24 * 5 + runs.LENGTH * 12)
    assert plan.peak_nbytes < plan.temp_nbytes + 1.1 * plan.argument_nbytes


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
