"""Plans of training: meshes, overrides of the config, and exact reduction."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from prepcli.core.errors import USAGE, PrepError, UsageError
from prepcli.core.json_values import JsonValue
from prepcli.models.mesh import parse_mesh
from prepcli.models.partition import num_batch_shards
from prepcli.models.presets import PRESETS
from prepcli.models.registry import FAMILIES, fields_read
from prepcli.models.rules import ACTIVATION_RULES, DEFAULT_RULES, merge_rules
from tests.helpers.runs import make_setup
from tests.helpers.tiny_configs import T5
from tests.helpers.training_plans import RECIPE, TINY, load_text, plan_text
from tests.trainer.planning.test_memory_estimate import LLAMA_13B, make_inputs
from tests.trainer.run.test_checks import RECIPE as LLAMA_RECIPE
from trainer.planning.memory_estimate import estimate_memory
from trainer.planning.model_shapes import (
    PlannedModel,
    model_of_config,
    model_of_manifest,
    override_fields,
)
from trainer.planning.step_inputs import check_exact_model, reduction_shards
from trainer.planning.step_time import ACCELERATORS
from trainer.planning.training_plan import (
    memory_fields,
    memory_table,
    plan_training,
    search_meshes,
    with_overrides,
)
from trainer.recipe import batch_shape, load_recipe

# Plans of whole training steps.


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


def test_memory_table_shows_the_larger_scores_of_an_encoder():
    """Sources of 64 tokens have larger scores than targets of 16, in self-attention of the encoder."""
    run = make_inputs("t5", T5, seq_length=16, source_length=64)
    text = " ".join(memory_table(run, estimate_memory(run)).split())
    assert "of it scores [1, 3, 64, 64] 48.0 KiB" in text


def test_memory_fields_state_whether_the_step_fits():
    estimated = estimate_memory(RUN_13B)
    assert memory_fields(estimated, estimated.peak)["fits"] is True
    assert memory_fields(estimated, estimated.peak - 1)["fits"] is False
    assert memory_fields(estimated, None)["fits"] is None


# Search of meshes.


def test_search_returns_fitting_meshes_by_time(tmp_path: Path):
    recipe = load_text(tmp_path, "data.seq_length=2048", "model.dtype=bfloat16")
    search = search_meshes(
        recipe,
        model_of_config(PRESETS["llama-7b"]),
        DEFAULT_RULES,
        kind=ACCELERATORS["H100"],
        num_devices=8,
    )
    times = [option.estimate.time.step_s for option in search.options]
    assert times == sorted(times)
    assert search.num_too_large > 0, "one device cannot hold the state"
    assert all(
        option.plan.mesh.n_devices == 8 and option.estimate.fits for option in search.options
    )
    assert "8,1,1" not in [str(option.plan.mesh) for option in search.options]


def test_search_covers_every_mesh_once(tmp_path: Path):
    search = search_meshes(
        load_text(tmp_path),
        model_of_config(TINY),
        DEFAULT_RULES,
        kind=ACCELERATORS["v5e"],
        num_devices=12,
    )
    meshes = [str(option.plan.mesh) for option in search.options]
    assert len(meshes) == len(set(meshes))
    num_axes = 3 + any("sp" in choice for choice in ACTIVATION_RULES["seq"])
    num_meshes = {3: 18, 4: 40}[num_axes]  # 12 = 2 * 2 * 3
    assert len(meshes) + search.num_too_large + search.refusals.total() == num_meshes


def test_search_counts_reasons_of_refusal(tmp_path: Path):
    search = search_meshes(
        load_text(tmp_path),
        model_of_config(TINY),
        DEFAULT_RULES,
        kind=ACCELERATORS["v5e"],
        num_devices=8,
    )
    assert search.refusals["heads 4 cannot be split over mp 8"] == 1
    assert {str(option.plan.mesh) for option in search.options} >= {
        "8,1,1",
        "1,8,1",
        "1,2,4",
        "2,2,2",
    }


# Types of the values that a recipe sets in a config.

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 131,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "pad_token_id": None,
}


@pytest.mark.parametrize(
    ("field", "value", "kind"),
    [
        ("tie_word_embeddings", "yes", "true or false"),
        ("tie_word_embeddings", 1, "true or false"),
        ("pad_token_id", "x", "an integer"),
        ("bos_token_id", True, "an integer"),
        ("attention_dropout", "x", "a number"),
        ("rms_norm_eps", "x", "a number"),
        ("eos_token_id", "x", "an integer"),
        ("eos_token_id", [1, "x"], "an integer"),
    ],
)
def test_override_of_unset_field_must_have_its_type(field: str, value: JsonValue, kind: str):
    with pytest.raises(UsageError) as caught:
        override_fields(LLAMA, {field: value})
    assert caught.value.what == f"`model.overrides` sets `{field}` to {value!r}"
    assert caught.value.why == f"it must be {kind}"
    assert caught.value.hint.startswith("for example ")


def test_override_can_set_an_unset_field():
    values = {
        "tie_word_embeddings": True,
        "pad_token_id": 0,
        "attention_dropout": 0.1,
        "eos_token_id": [1, 2],
    }
    assert override_fields(LLAMA, values) == LLAMA | values


def test_rate_that_the_config_has_as_an_integer_takes_a_number():
    config = LLAMA | {"attention_dropout": 0, "rope_theta": 10000}
    assert (
        override_fields(config, {"attention_dropout": 0.1, "rope_theta": 5e5})["rope_theta"] == 5e5
    )


@pytest.mark.parametrize("before", [1, [1, 2]])
@pytest.mark.parametrize("after", [3, [3, 4]])
def test_end_token_may_be_one_or_a_list(before: JsonValue, after: JsonValue):
    assert (
        override_fields(LLAMA | {"eos_token_id": before}, {"eos_token_id": after})["eos_token_id"]
        == after
    )


@pytest.mark.parametrize("base", [10000, 12345.5])
def test_rotary_base_of_local_layers_is_a_number(base: float):
    config = {**LLAMA, "model_type": "gemma3_text", "head_dim": 8, "rope_local_base_freq": 10000}
    assert override_fields(config, {"rope_local_base_freq": base})["rope_local_base_freq"] == base


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0, it must be an integer from 1"),
        ({"hidden_act": "foo"}, "activation `foo` is not supported: hidden_act of config.json"),
    ],
)
def test_error_of_an_invalid_value_names_the_key(overrides: dict[str, Any], why: str):
    with pytest.raises(UsageError) as caught:
        override_fields(LLAMA, overrides)
    assert str(caught.value).startswith(f"`model.overrides` is invalid - {why}")


def test_invalid_base_config_error_does_not_name_the_override():
    with pytest.raises(PrepError, match=r"config\.json is invalid - hidden_size is 0"):
        override_fields({**LLAMA, "hidden_size": 0}, {"num_hidden_layers": 3})


# Names of the field with the number of positions, in families with a rotary embedding.
POSITION_FIELDS = {"max_position_embeddings", "n_positions", "max_seq_len"}

ROTARY_FAMILIES = {
    name: family for name, family in FAMILIES.items() if family.arch_config({}).rope is not None
}


def test_rotary_families_read_positions_and_deviation():
    """The lists of fields are recorded on one config object. A copy of it would hide fields."""
    for family in ROTARY_FAMILIES.values():
        fields = fields_read(family)
        assert fields & POSITION_FIELDS, family.name
        assert "initializer_range" in fields


def test_families_read_no_field_without_a_name():
    for family in FAMILIES.values():
        assert "" not in fields_read(family), family.name


@pytest.mark.parametrize("name", ["lfm2", "lfm2_moe"])
def test_override_can_set_the_epsilon_of_lfm2(name: str):
    assert override_fields({"model_type": name}, {"norm_eps": 1e-6})["norm_eps"] == 1e-6


def test_override_can_set_a_field_by_its_alias():
    config = {"model_type": "granitemoehybrid", "num_hidden_layers": 2}
    layer_types: list[JsonValue] = ["mamba", "attention"]
    changed = override_fields(config, {"layers_block_type": layer_types})
    assert changed["layers_block_type"] == layer_types


# Logical shards of a recipe, and errors for what an exact reduction does not support.

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
