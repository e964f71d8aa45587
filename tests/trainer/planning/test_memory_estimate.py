"""Estimated memory of a step: recorded plans of XLA, optimizer states, and the inputs of a step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import pytest

from bench.memory_points import POINTS, RECURRENT_POINTS, TPU_POINTS, MemoryPoint
from bench.model_configs import MODEL_CONFIGS
from prepcli.core.errors import PrepError
from prepcli.models.attention_kernels import ANY_ACCELERATOR, CPU, AttentionFeature, DeviceKind
from prepcli.models.mesh import parse_mesh
from prepcli.models.param_tree import param_leaves
from prepcli.models.registry import FAMILIES
from prepcli.models.rules import DEFAULT_RULES
from tests.helpers import runs
from tests.helpers.hybrid_configs import GRANITE_HYBRID
from tests.helpers.optimizers import KEYS, make_optimizer
from tests.helpers.tiny_configs import T5
from tests.helpers.training_plans import TINY, load_text
from trainer.planning.memory_estimate import MemoryEstimate, estimate_memory
from trainer.planning.memory_inputs import MemoryInputs
from trainer.planning.model_shapes import model_of_config
from trainer.planning.step_inputs import (
    ChunkSizes,
    ModelShapes,
    attention_needs,
    check_patterns,
    chunk_sizes,
    context_warnings,
    default_chunk_sizes,
    state_leaves,
    step_inputs,
)
from trainer.planning.training_plan import Collective, read_collectives
from trainer.recipe.optimizer_tables import OPTIMIZER_TABLES
from trainer.training.step import state_shapes

# Tests of the memory estimate of a training step against XLA's memory plans of the same step.

MIB = 1 << 20

SMALL, DEEP, LLAMA_13B, MIXTRAL = (
    MODEL_CONFIGS[name] for name in ("small", "deep", "13b", "mixtral")
)

ATTENTION = ("q", "k", "v", "attention_output")


def make_inputs(
    family_name: str, config: Mapping[str, Any], mesh: str = "", **options: Any
) -> MemoryInputs:
    """Return the inputs of the estimate of a family's config."""
    family = FAMILIES[family_name]
    return MemoryInputs(
        arch_config=family.arch_config(config),
        leaves=param_leaves(family, config, family.is_tied(config)),
        mesh=parse_mesh(mesh) if mesh else None,
        rules=DEFAULT_RULES,
        **{"micro_batch_size": 1, **options},
    )


def estimate(
    family_name: str, config: Mapping[str, Any], mesh: str = "", **options: Any
) -> MemoryEstimate:
    """Estimate the memory of a family's config."""
    return estimate_memory(make_inputs(family_name, config, mesh, **options))


def test_estimate_is_close_to_xla_plan():
    for point in POINTS:
        estimated_mib = point.estimated_nbytes / MIB
        assert estimated_mib == pytest.approx(point.recorded_mib, rel=0.15), point.flags
        assert estimated_mib >= 0.89 * point.recorded_mib, point.flags


def test_estimate_is_within_5_percent_of_plans_for_tpus():
    """The plans of both versions of libtpu that the extra `tpu` installs."""
    plans_of_42 = (6230, 5447, 7790, 5528)
    for point, other_mib in zip(TPU_POINTS, plans_of_42, strict=True):
        for planned_mib in (point.recorded_mib, other_mib):
            assert 0.98 <= point.estimated_nbytes / MIB / planned_mib <= 1.05, point.flags


def test_estimate_is_little_below_plans_of_recurrent_models():
    for point in RECURRENT_POINTS:
        assert point.estimated_nbytes / MIB >= 0.94 * point.recorded_mib, point.flags


def test_kernel_does_not_change_layers_without_attention():
    flags = "--size mamba2 --rows 4 --tokens 1024 --remat nothing_saveable --ffn-chunk -1 --dtype float32"
    reference, blockwise = (
        MemoryPoint(f"{flags} --kernel {kernel}", 0).estimate
        for kernel in ("reference", "blockwise")
    )
    assert blockwise.layer == reference.layer


@pytest.mark.parametrize(
    ("family", "config", "name", "num_arrays"),
    [
        ("llama", DEEP, "o", 8),
        ("llama", DEEP, "mlp_output", 0),
        ("gpt_neox", MODEL_CONFIGS["gpt_neox"], "o", 0),
        ("gemma2", {}, "o", 26),
    ],
)
def test_outputs_of_blocks_are_saved_for_norms(
    family: str, config: Mapping[str, Any], name: str, num_arrays: int
):
    plain, named = (
        make_inputs(family, config, seq_length=64, remat_policy=policy)
        for policy in ("nothing_saveable", (name,))
    )
    difference = estimate_memory(named).saved - estimate_memory(plain).saved
    assert difference == num_arrays * 64 * plain.embed_size * 4


def test_offload_moves_inputs_of_layers_out_of_the_peak():
    options: dict[str, Any] = {
        "seq_length": 4096,
        "attention_tile": (512, 512),
        "remat_policy": ATTENTION,
    }
    kept, offloaded = (
        estimate("llama", DEEP, **options, offload=place) for place in ("none", "residuals")
    )
    inputs_nbytes = 8 * 4096 * 512 * 4
    assert (kept.offloaded, offloaded.offloaded) == (0, inputs_nbytes)
    assert kept.peak - offloaded.peak == inputs_nbytes


def test_tile_of_ring_attention_lies_in_one_block():
    """Each of 4 devices has two blocks of 1,024 of 8,192 tokens."""
    memory = estimate("llama", SMALL, "sp:4", seq_length=8192, attention_tile=(-1, -1))
    assert memory.scores == 8 * 1024 * 1024 * 4


@pytest.mark.parametrize(
    ("remat_policy", "has_mask"), [("none", True), ("nothing_saveable", False)]
)
def test_one_accelerator_computes_layers_like_a_cpu(remat_policy: str, has_mask: bool):
    """A single device gathers no weights. Only CPUs save a mask, of 8 heads and one byte per score."""
    cpu, accelerator = (
        estimate("llama", DEEP, seq_length=4096, remat_policy=remat_policy, plans_for_cpu=is_cpu)
        for is_cpu in (True, False)
    )
    assert cpu.saved == accelerator.saved
    assert cpu.layer - accelerator.layer == has_mask * 8 * 4096 * 4096


def test_cpus_have_copies_of_moments_and_the_gradient_of_the_head():
    memory = estimate("llama", DEEP, seq_length=64)
    assert memory.gradients == memory.moments + 4 * 32000 * 512


def test_t5_saves_its_position_bias_and_a_gradient():
    """Encoder and decoder have one bias each, of 8 heads, 64 queries and 64 keys. Tiles compute it again."""
    options: dict[str, Any] = {"seq_length": 64, "source_length": 64}
    config = MODEL_CONFIGS["t5"]
    dense, tiles = (
        estimate("t5", config, **options, remat_policy="nothing_saveable", attention_tile=tile)
        for tile in (None, (64, 64))
    )
    assert dense.saved - tiles.saved == 2 * 2 * 8 * 64 * 64 * 4


def test_hybrid_models_slice_the_weights_of_a_period_on_cpus():
    """A period is 3 of 6 layers."""
    options: dict[str, Any] = {"seq_length": 64, "remat_policy": "nothing_saveable"}
    config = MODEL_CONFIGS["lfm2"]
    cpu, accelerator = (
        estimate("lfm2", config, **options, plans_for_cpu=is_cpu) for is_cpu in (True, False)
    )
    leaves = make_inputs("lfm2", config, **options).leaves
    outside = ("embed.tokens", "final_norm.scale")
    layer_sizes = [math.prod(leaf.shape) for path, leaf in leaves.items() if path not in outside]
    assert cpu.saved - accelerator.saved == 4 * sum(layer_sizes) // 2


def test_accelerators_gather_a_layer_and_hold_whole_gradients():
    """One layer has 3,162,112 weights, of which mp leaves a quarter. 1,024 tokens of width 512 have two gradients."""
    options: dict[str, Any] = {"seq_length": 1024, "micro_batch_size": 2, "ffn_chunk_size": 512}
    remat: dict[str, Any] = {"remat_policy": "nothing_saveable"}
    cpu, accelerator = (
        estimate("llama", DEEP, "1,2,4", **options, **remat, plans_for_cpu=is_cpu)
        for is_cpu in (True, False)
    )
    weights_nbytes = 4 * (4 * 512 * 512 + 3 * 512 * 1376) // 4
    gradients_nbytes = 2 * 4 * 1024 * 512
    difference = accelerator.layer - cpu.layer
    assert difference == pytest.approx(weights_nbytes + gradients_nbytes * 3 // 4, rel=0.01)


def test_experts_need_rows_of_one_chunk_and_save_nothing():
    """Each token has 2 outputs and 2 gradients of 512 float32 elements."""
    options: dict[str, Any] = {"seq_length": 4096, "remat_policy": "dots_saveable"}
    two, four = (
        estimate(
            "mixtral", MIXTRAL | {"num_experts_per_tok": top_k}, **options, ffn_chunk_size=1024
        )
        for top_k in (2, 4)
    )
    assert 2 * 2 * 1024 * 512 * 4 <= four.layer - two.layer <= 3 * 2 * 1024 * 512 * 4
    assert four.saved == two.saved


def test_scores_of_13b_at_32k_take_40_gib_per_layer():
    memory = estimate("llama", LLAMA_13B, "1,8,4", micro_batch_size=8, seq_length=32768)
    assert memory.scores == 10 * 32768**2 * 4, "1 row x 10 heads x queries x keys, float32"
    assert memory.peak > memory.scores * 40, "without rematerialization each layer saves its scores"


def test_state_takes_12_bytes_per_parameter():
    memory = estimate("llama", SMALL, seq_length=64)
    count = 2 * (4 * 512 * 512 + 3 * 512 * 1376 + 2 * 512) + 2 * 32000 * 512 + 512
    assert (memory.parameters, memory.moments, memory.state) == (4 * count, 8 * count, 12 * count)


def test_indivisible_kv_heads_count_as_repeated():
    grouped = DEEP | {"num_key_value_heads": 2}
    divided = estimate("llama", grouped, "1,1,2", seq_length=1024)
    repeated = estimate("llama", grouped, "1,1,4", seq_length=1024)
    assert repeated.saved > divided.saved / 2


@pytest.mark.parametrize("head_chunk_size", [512, 1024, 4096, -1])
def test_lm_head_grows_with_chunk_size(head_chunk_size: int):
    memory = estimate("llama", SMALL, seq_length=4096, head_chunk_size=head_chunk_size)
    tokens = 4096 if head_chunk_size == -1 else head_chunk_size
    logits_nbytes = (4 + 4) * tokens * 32000
    hidden_nbytes = 2 * 4 * 4096 * 512
    assert memory.head == logits_nbytes + hidden_nbytes


@pytest.mark.parametrize(("itemsize", "nbytes"), [(4, 12), (2, 8)])
def test_fsdp_gathers_the_lm_head_twice(itemsize: int, nbytes: int):
    """The two copies have the dtype of the computation, the gradient is float32."""
    whole, split = (
        estimate("llama", SMALL, mesh, micro_batch_size=2, seq_length=512, itemsize=itemsize)
        for mesh in ("2,1,1", "1,2,1")
    )
    assert split.head - whole.head == nbytes * 32000 * 512


def test_layers_of_a_window_period_overlap():
    """Another layer adds its dense scores, but no tiles."""
    gpt_neo, options = (
        MODEL_CONFIGS["gpt_neo"],
        {"seq_length": 1024, "remat_policy": "nothing_saveable"},
    )
    alternating, uniform = gpt_neo, gpt_neo | {"attention_types": [[["global"], 4]]}
    dense, tiled = (
        estimate("gpt_neo", alternating, attention_tile=tile, **options).layer
        - estimate("gpt_neo", uniform, attention_tile=tile, **options).layer
        for tile in (None, (512, 512))
    )
    copies = (dense - tiled) / (8 * 1024 * 1024 * 4)
    assert copies == pytest.approx(4, rel=0.01), "two are saved and two transient"


def test_every_family_has_an_estimate():
    for name in FAMILIES:
        inputs = make_inputs(name, {}, seq_length=16)
        memory = estimate_memory(
            replace(inputs, source_length=16 if inputs.arch_config.encoder else 0)
        )
        assert min(memory.parameters, memory.saved, memory.layer, memory.head) > 0, name
        assert (memory.scores > 0) == bool(inputs.arch_config.attention_layers)


@pytest.mark.parametrize(("mesh", "num_copies"), [("8,1,1", 3), ("1,8,1", 4)])
def test_exact_reduction_needs_unsplit_gradients(mesh: str, num_copies: int):
    fast = make_inputs("llama", SMALL, mesh, micro_batch_size=8, seq_length=64, accumulate=4)
    exact = estimate_memory(replace(fast, is_exact=True))
    num_parameters = estimate_memory(replace(fast, mesh=None)).parameters // 4
    assert exact.gradients - estimate_memory(fast).gradients == 4 * num_copies * num_parameters
    assert exact.peak - estimate_memory(fast).peak == 4 * num_copies * num_parameters


def test_dense_granite_counts_the_hidden_units_of_its_mlp():
    """A wider MLP of 4 x 256 tokens adds the arrays of its hidden units to each layer."""
    options: dict[str, Any] = {"micro_batch_size": 4, "seq_length": 256}
    dense = GRANITE_HYBRID | {"num_local_experts": 0, "layer_types": ["mamba"] * 3}
    narrow, wide = (
        estimate("granitemoehybrid", dense | {"shared_intermediate_size": width}, **options)
        for width in (64, 1024)
    )
    num_tokens = 4 * 256
    num_layers = 3
    hidden_nbytes = num_tokens * (1024 - 64) * 4
    # At least the outputs of the up and gate projections, in float32.
    assert wide.saved - narrow.saved >= num_layers * 2 * hidden_nbytes


def test_layers_outside_the_scan_overlap_on_cpus_only():
    """A single period of 4 layers is no loop. XLA for CPUs computes 3 of them again before it needs them."""
    options: dict[str, Any] = {"seq_length": 1024, "remat_policy": "nothing_saveable"}
    config = MODEL_CONFIGS["qwen3_5-period"]
    cpu, accelerator = (
        estimate("qwen3_5_text", config, **options, plans_for_cpu=overlaps)
        for overlaps in (True, False)
    )
    assert cpu.layer > 3 * accelerator.layer


def test_heads_of_a_mixer_are_split_once():
    """Mamba-2 has 8 groups of 16 heads. The mesh axis mp splits either the groups or their heads."""
    options: dict[str, Any] = {"seq_length": 1024, "remat_policy": "none"}
    config = {"num_hidden_layers": 2, "vocab_size": 512}
    whole, split = (estimate("mamba2", config, mesh, **options) for mesh in ("", "1,1,4"))
    assert whole.saved / 4 <= split.saved


# The optimizer state as shapes: it has the bytes of the state that training allocates.

VARIANTS: tuple[dict[str, Any], ...] = (
    {},
    {"moment_dtype": "bfloat16", "ema": 0.9, "freeze": ("embed.tokens", "re:attn")},
    {"momentum": 0.0},
)


@pytest.mark.parametrize("name", KEYS)
@pytest.mark.parametrize("keys", VARIANTS)
def test_state_leaves_have_the_bytes_of_the_state(name: str, keys: dict[str, Any]):
    table = OPTIMIZER_TABLES[name]
    if not keys.keys() <= table.model_fields.keys():
        pytest.skip("the optimizer has no momentum to turn off")
    values = {"type": name, **KEYS[name], **keys}
    setup = runs.make_setup(runs.MIXTRAL, optimizer=make_optimizer(name, **keys))
    leaves = [leaf for leaf in jax.tree.leaves(state_shapes(setup)["opt_state"]) if leaf.size > 3]
    planned = state_leaves(table.model_validate(values), setup.model.leaves)
    assert sorted(leaf.nbytes for leaf in planned) == sorted(
        leaf.size * leaf.dtype.itemsize for leaf in leaves
    )


def test_check_patterns_rejects_patterns_without_leaves():
    leaves = runs.make_setup().model.leaves
    table = OPTIMIZER_TABLES["adamw"]
    check_patterns(table.model_validate({"lr": 1, "freeze": ("embed", "layers.attn.q")}), leaves)
    with pytest.raises(
        PrepError, match=r"`embed\.token` of `optimizer\.freeze` matches no leaf"
    ) as caught:
        check_patterns(table.model_validate({"lr": 1, "freeze": ("embed.token",)}), leaves)
    assert caught.value.hint == "did you mean `embed.tokens`?"
    with pytest.raises(PrepError, match=r"`re:xyz` of `optimizer\.decay_exclude` matches no leaf"):
        check_patterns(table.model_validate({"lr": 1, "decay_exclude": ("re:xyz",)}), leaves)
    with pytest.raises(PrepError, match=r"`optimizer\.freeze` matches all parameters"):
        check_patterns(table.model_validate({"lr": 1, "freeze": ("re:.",)}), leaves)


# Inputs of the estimates, and warnings about the context.

MESH = parse_mesh("1,2,4")


def llama(**changes: Any) -> ModelShapes:
    """Return the shapes of a tiny Llama."""
    return model_of_config({**TINY, **changes}).shapes(MESH, DEFAULT_RULES)


def test_step_inputs_have_the_source_length_of_the_recipe(tmp_path: Path):
    model = model_of_config(T5).shapes(MESH, DEFAULT_RULES)
    pairs = ("data.type=json", "data.fields=[a], b", "batch.size=8")
    recipe = load_text(tmp_path, *pairs, "data.source_length=24")
    assert step_inputs(recipe, model, mesh=MESH, rules=DEFAULT_RULES).source_length == 24
    assert (
        step_inputs(
            load_text(tmp_path, *pairs), llama(), mesh=MESH, rules=DEFAULT_RULES
        ).source_length
        == 0
    )


def test_span_corruption_has_the_source_length_of_the_recipe(tmp_path: Path):
    t5 = model_of_config(T5).shapes(MESH, DEFAULT_RULES)
    spans = load_text(
        tmp_path, "data.objective=span_corruption", "data.source_length=40", "batch.size=8"
    )
    assert step_inputs(spans, t5, mesh=MESH, rules=DEFAULT_RULES).source_length == 40


def test_step_inputs_follow_batch_and_dtype(tmp_path: Path):
    recipe = load_text(
        tmp_path,
        "batch.accumulate=2",
        "model.dtype=bfloat16",
        "model.remat_policy=nothing_saveable",
    )
    inputs = step_inputs(recipe, llama(), mesh=MESH, rules=DEFAULT_RULES)
    assert (inputs.micro_batch_size, inputs.local_batch_size, inputs.accumulate) == (4, 2, 2)
    assert (inputs.seq_length, inputs.itemsize, inputs.remat_policy) == (16, 2, "nothing_saveable")
    assert (
        step_inputs(recipe, llama(), mesh=MESH, rules=DEFAULT_RULES, widens_bfloat16=True).itemsize
        == 4
    )


def test_packed_documents_need_segments_and_two_more_columns(tmp_path: Path):
    plain, packed = load_text(tmp_path), load_text(tmp_path, "data.packing=documents")
    needs = [
        attention_needs(recipe, llama(), MESH, DEFAULT_RULES).features for recipe in (plain, packed)
    ]
    assert needs[1] - needs[0] == {AttentionFeature.SEGMENTS}
    inputs, more = (
        step_inputs(recipe, llama(), mesh=MESH, rules=DEFAULT_RULES) for recipe in (plain, packed)
    )
    added = estimate_memory(more).batch - estimate_memory(inputs).batch
    assert added == 4 * 2 * inputs.seq_length * inputs.local_batch_size * inputs.accumulate
    cudnn = load_text(tmp_path, "data.packing=documents", "model.attention_kernel=cudnn")
    with pytest.raises(PrepError, match="does not support segment ids"):
        step_inputs(cudnn, llama(), mesh=MESH, rules=DEFAULT_RULES)


def test_step_inputs_have_a_tile_only_for_tiled_attention(tmp_path: Path):
    tiled = load_text(tmp_path, "model.attention_kernel=blockwise", "model.q_chunk_size=4")
    assert step_inputs(tiled, llama(), mesh=MESH, rules=DEFAULT_RULES).attention_tile == (4, 512)
    assert (
        step_inputs(load_text(tmp_path), llama(), mesh=MESH, rules=DEFAULT_RULES).attention_tile
        is None
    )


@pytest.mark.parametrize(
    ("device", "length", "tile", "head_chunk_size"),
    [
        (CPU, 255, None, 128),
        (CPU, 256, (64, 64), 128),
        (CPU, 1025, (128, 128), 128),
        (ANY_ACCELERATOR, 1024, None, 512),
        (ANY_ACCELERATOR, 1025, (512, 512), 512),
    ],
)
def test_step_inputs_have_sizes_for_the_devices(
    tmp_path: Path,
    device: DeviceKind,
    length: int,
    tile: tuple[int, int] | None,
    head_chunk_size: int,
):
    recipe = load_text(tmp_path, f"data.seq_length={length}", "batch.accumulate=2")
    inputs = step_inputs(recipe, llama(), mesh=MESH, rules=DEFAULT_RULES, device=device)
    assert (inputs.attention_tile, inputs.head_chunk_size) == (tile, head_chunk_size)


@pytest.mark.parametrize("device", [CPU, ANY_ACCELERATOR])
def test_chunk_sizes_of_the_recipe_take_precedence(tmp_path: Path, device: DeviceKind):
    keys = ("model.q_chunk_size=7", "model.k_chunk_size=-1", "model.head_chunk_size=512")
    assert chunk_sizes(load_text(tmp_path, *keys), device, num_rows=2) == ChunkSizes(
        7, -1, head=512
    )


def test_context_warnings_name_too_long_sequences(tmp_path: Path):
    assert list(context_warnings(load_text(tmp_path, "data.seq_length=64"), llama())) == []
    (warning,) = context_warnings(load_text(tmp_path, "data.seq_length=65"), llama())
    assert (
        warning
        == "`data.seq_length` is 65, and the model was made for 64 positions; `model.rope_scaling` extends them"
    )


def test_context_warnings_include_rope_scaling(tmp_path: Path):
    model = llama(
        rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    )
    assert list(context_warnings(load_text(tmp_path, "data.seq_length=256"), model)) == []
    assert list(context_warnings(load_text(tmp_path, "data.seq_length=257"), model))


# Tests of the sizes of tiles and head chunks that fit the devices.


@pytest.mark.parametrize(("num_rows", "head"), [(1, 256), (2, 128), (3, 85), (256, 1), (1000, 1)])
def test_cpu_head_chunk_shares_its_tokens_among_rows(num_rows: int, head: int):
    assert default_chunk_sizes(CPU, length=512, num_rows=num_rows).head == head


# Tests of compiled plans: the collectives in HLO text, and the JSON form.

HLO = """\
HloModule jit_train_step, is_scheduled=true

%all-reduce-scatter.1 (input.1: f32[8,64]) -> f32[8,16] {
  %input.1 = f32[8,64]{1,0} parameter(0)
  %all-reduce.1 = f32[8,64]{1,0:T(8,128)} all-reduce(%input.1), replica_groups={{0,1,2,3}}, to_apply=%add
}

%body (p: (f32[8,16])) -> (f32[8,16]) {
  %fusion.1 = f32[8,16]{1,0:T(8,128)} fusion(%p.1), kind=kCustom, calls=%all-reduce-scatter.1
  %ag = bf16[4,2,8]{2,1,0:T(8,128)(2,1)} all-gather(%copy), channel_id=1, dimensions={1}
  ROOT %fusion.2 = f32[8,16]{1,0} fusion(%p.1), kind=kLoop, calls=%fused_computation.1
}

ENTRY %main (p0: f32[4]) -> f32[] {
  %start = (bf16[24,4]{1,0:T(8,128)(2,1)}, bf16[24,4]{1,0}, u32[]{:S(2)}) collective-permute-start(%slice.1)
  %done = bf16[24,4]{1,0:T(8,128)(2,1)} collective-permute-done(%start)
  %all-reduce.2 = (f32[]{:T(128)}, pred[3]{0}) all-reduce(%a, %b), channel_id=3, to_apply=%add
  all-reduce.3 = s8[10]{0} all-reduce(c), to_apply=add
  ROOT %rs = f8e4m3fn[6]{0} reduce-scatter(%d), dimensions={0}
}
"""


def test_collectives_count_the_bytes_of_results():
    assert read_collectives(HLO) == (
        Collective("all-gather", 1, 4 * 2 * 8 * 2),
        Collective("all-reduce", 2, 4 + 3 + 10),
        Collective("collective-permute", 1, 24 * 4 * 2),
        Collective("reduce-scatter", 2, 8 * 16 * 4 + 6),
    )
