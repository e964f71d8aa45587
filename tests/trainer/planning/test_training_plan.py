"""Plans of whole training steps."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from prepcli.core.errors import UsageError
from prepcli.models.mesh import parse_mesh
from prepcli.models.registry import FAMILIES
from prepcli.models.rules import DEFAULT_RULES
from tests.helpers.training_plans import RECIPE, TINY, load_text, plan_text
from tests.trainer.planning.test_memory_estimate import LLAMA_13B, make_inputs
from trainer.planning.memory_estimate import estimate_memory
from trainer.planning.model_shapes import PlannedModel, model_of_config, model_of_manifest
from trainer.planning.step_time import ACCELERATORS
from trainer.planning.training_plan import (
    memory_fields,
    memory_table,
    plan_training,
    with_overrides,
)


def test_plan_has_the_memory_of_the_estimate(tmp_path: Path):
    plan = plan_text(tmp_path, "mesh=1,2,4")
    assert plan.memory == estimate_memory(plan.inputs)
    assert (plan.tokens, plan.mesh.n_devices) == (8 * 16, 8)


@pytest.mark.parametrize(
    ("overrides", "what"),
    [
        (["mesh=1,1,3"], "heads 4 cannot be split over mp 3"),
        (["mesh=1,16,1"], "a micro-batch of 8 does not divide among 16 replicas"),
        (["mesh=-1,1,1"], "mesh -1,1,1 has no size for dp"),
        (
            ["mesh=sp:4", "data.seq_length=20"],
            "`data.seq_length` is 20: 20 tokens cannot be split over sp 4",
        ),
        (
            ["mesh=sp:4", "data.seq_length=18"],
            "`data.seq_length` is 18: 18 tokens cannot be split over sp 4",
        ),
    ],
)
def test_plan_rejects_meshes_that_do_not_divide(tmp_path: Path, overrides: list[str], what: str):
    with pytest.raises(UsageError) as caught:
        plan_text(tmp_path, *overrides)
    assert caught.value.what == what


def test_plan_rejects_kernels_without_the_features_of_a_run(tmp_path: Path):
    with pytest.raises(UsageError) as caught:
        plan_text(tmp_path, "mesh=sp:4", "model.attention_kernel=reference")
    assert caught.value.what == "attention kernel `reference` cannot compute this model's attention"
    assert caught.value.why == "it does not support sequences split over devices"


def test_bfloat16_parameters_take_2_bytes(tmp_path: Path):
    wide, narrow = (
        plan_text(tmp_path, "mesh=1,1,1", f"model.param_dtype={x}") for x in ("float32", "bfloat16")
    )
    num_parameters = sum(math.prod(leaf.shape) for leaf in wide.inputs.leaves.values())
    assert (wide.memory.parameters, narrow.memory.parameters) == (
        4 * num_parameters,
        2 * num_parameters,
    )
    assert wide.memory.peak - narrow.memory.peak == 2 * num_parameters
    assert narrow.memory.moments == wide.memory.moments


def test_bfloat16_adapters_take_2_bytes(tmp_path: Path):
    lora = ["mesh=1,1,1", "lora.rank=4", "lora.targets=['attn.q']", "lora.base_dtype=float32"]
    wide, narrow = (
        plan_text(tmp_path, *lora, f"model.param_dtype={x}") for x in ("float32", "bfloat16")
    )
    num_adapters = sum(math.prod(leaf.shape) for leaf in wide.inputs.saved_leaves.values())
    assert wide.memory.parameters - narrow.memory.parameters == 2 * num_adapters > 0


# Peaks of `prep plan --compile` in MiB, on CPUs with jax 0.10.2
@pytest.mark.parametrize(
    ("mesh", "words", "xla_mib"),
    [
        ("2,1,1", [], 139.7),
        ("2,1,1", ["lora.rank=4", "lora.base_dtype=float32"], 55.6),
        ("4,1,1", ["lora.rank=4", "lora.base_dtype=float32"], 55.5),
        ("1,4,1", ["lora.rank=4", "lora.base_dtype=float32"], 59.7),
        ("2,1,1", ["optimizer.freeze=['layers.mlp','embed']"], 77.2),
        ("1,4,1", ["optimizer.freeze=['layers.mlp','embed']"], 73.5),
    ],
    ids=str,
)
def test_exact_reduction_sums_gradients_of_trained_parameters(
    tmp_path: Path, mesh: str, words: list[str], xla_mib: float
):
    sizes = {"hidden_size": 256, "num_hidden_layers": 4, "vocab_size": 512}
    settings = ("data.seq_length=32", "optimizer.type=sgd", "train.reduction=exact")
    kernel = "model.attention_kernel=reference"
    config = TINY | sizes | {"intermediate_size": 1024}
    plan = plan_text(tmp_path, f"mesh={mesh}", *settings, kernel, *words, config=config)
    assert plan.memory.peak / 2**20 == pytest.approx(xla_mib, rel=0.15)


def test_vocabulary_is_padded_before_conversion_only():
    mesh, config = parse_mesh("1,1,4"), TINY | {"vocab_size": 97}
    assert model_of_config(config).shapes(mesh, DEFAULT_RULES).leaves["embed.tokens"].shape == (
        100,
        32,
    )
    manifest = {"config": config, "tied": False, "scan": True, "scan_axis": 0}
    assert model_of_manifest(manifest).shapes(mesh, DEFAULT_RULES).leaves["embed.tokens"].shape == (
        97,
        32,
    )


def test_model_of_config_ties_the_head_as_the_checkpoint():
    assert model_of_config(TINY | {"tie_word_embeddings": True}).is_tied
    assert not model_of_config(TINY).is_tied
    assert isinstance(model_of_config(TINY), PlannedModel)


def test_with_overrides_changes_only_the_given_keys(tmp_path: Path):
    recipe = load_text(tmp_path)
    changed = with_overrides(
        recipe, {"mesh": "1,2,4", "model.ffn_chunk_size": 8, "model.q_chunk_size": 4}
    )
    assert (changed.mesh, changed.model.ffn_chunk_size, changed.model.q_chunk_size) == (
        "1,2,4",
        8,
        4,
    )
    assert changed.model.k_chunk_size == recipe.model.k_chunk_size
    assert recipe.model.ffn_chunk_size == -1


# Defaults that the mesh does not divide: 71 heads of FalconConfig, 1,407 hidden units of DeepseekV2Config's experts.
EVEN_SIZES = {
    "falcon": {"hidden_size": 4608, "num_attention_heads": 72},
    "deepseek_v2": {"moe_intermediate_size": 1408},
}


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_can_be_planned(tmp_path: Path, name: str):
    recipe = load_text(
        tmp_path, "mesh=1,2,2", text=RECIPE.replace('type = "text"', 'type = "json"')
    )
    model = model_of_config({"model_type": name} | EVEN_SIZES.get(name, {}))
    has_encoder = model.shapes(parse_mesh("1,1,1"), DEFAULT_RULES).arch_config.encoder is not None
    if has_encoder:
        recipe = with_overrides(recipe, {"data.source_length": 32})
    plan = plan_training(recipe, model, DEFAULT_RULES)
    assert (
        0
        < plan.flops.attention_causal
        < plan.flops.model_flops_of_visible_pairs
        <= plan.flops.executed
    )
    assert {axis.axis for axis in plan.traffic} == {"fsdp", "mp"}
    estimate = plan.estimate_on(ACCELERATORS["B200"])
    assert 0 < estimate.mfu_causal <= estimate.mfu_full < 1


RUN_13B = make_inputs(
    "llama", LLAMA_13B, "1,8,4", micro_batch_size=16, seq_length=32768, itemsize=2
)


def test_memory_table_shows_the_attention_scores():
    lines = memory_table(RUN_13B, estimate_memory(RUN_13B), "80.00 GiB").splitlines()
    assert any(
        " ".join(line.split()) == "of it scores [2, 10, 32768, 32768] 80.00 GiB" for line in lines
    )
    assert any(line.startswith("saved by 40 layers (remat none)") for line in lines)
    assert lines[-1].split() == ["available", "80.00", "GiB"]


def test_memory_table_has_no_available_row_without_devices():
    assert "available" not in memory_table(RUN_13B, estimate_memory(RUN_13B))


def test_memory_table_shows_the_scores_of_a_tile():
    tiled = replace(RUN_13B, attention_tile=(512, 1024))
    text = " ".join(memory_table(tiled, estimate_memory(tiled)).split())
    assert "of it scores [2, 10, 512, 1024] 40.0 MiB" in text


def test_memory_fields_state_whether_the_step_fits():
    estimated = estimate_memory(RUN_13B)
    assert memory_fields(estimated, estimated.peak)["fits"] is True
    assert memory_fields(estimated, estimated.peak - 1)["fits"] is False
    assert memory_fields(estimated, None)["fits"] is None
