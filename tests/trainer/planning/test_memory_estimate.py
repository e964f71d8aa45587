"""Tests of the memory estimate of a training step against XLA's memory plans of the same step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from bench.memory_points import POINTS, TPU_POINTS, MemoryPoint
from bench.model_configs import MODEL_CONFIGS
from prepcli.models.mesh import parse_mesh
from prepcli.models.param_tree import param_leaves
from prepcli.models.registry import FAMILIES
from prepcli.models.rules import DEFAULT_RULES
from tests.helpers.hybrid_configs import GRANITE_HYBRID
from trainer.planning.memory_estimate import MemoryEstimate, estimate_memory
from trainer.planning.memory_inputs import MemoryInputs

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


def test_estimate_is_within_5_percent_of_plans_for_tpus():
    """The plans of both versions of libtpu that the extra `tpu` installs."""
    plans_of_42 = (6230, 5447, 7790, 5528)
    for point, other_mib in zip(TPU_POINTS, plans_of_42, strict=True):
        for planned_mib in (point.recorded_mib, other_mib):
            assert 0.98 <= point.estimated_nbytes / MIB / planned_mib <= 1.05, point.flags


def test_attention_kernel_does_not_change_layers_without_attention():
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


@pytest.mark.parametrize("remat_policy", ["none", "nothing_saveable"])
def test_one_accelerator_needs_the_memory_of_a_cpu(remat_policy: str):
    """A single device gathers no weights, and splits no residual stream."""
    cpu, accelerator = (
        estimate("llama", DEEP, seq_length=1024, remat_policy=remat_policy, plans_for_cpu=is_cpu)
        for is_cpu in (True, False)
    )
    assert cpu == accelerator


def test_accelerators_gather_the_next_layer_and_hold_whole_gradients():
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


def test_mesh_splits_state_and_activations():
    one_device = estimate("llama", DEEP, micro_batch_size=8, seq_length=1024)
    split = estimate("llama", DEEP, "1,2,4", micro_batch_size=8, seq_length=1024)
    assert split.parameters == pytest.approx(one_device.parameters / 8, rel=0.01)
    assert split.scores == one_device.scores / 8
    assert one_device.saved / 8 < split.saved < one_device.saved / 4


def test_bfloat16_halves_part_of_saved_activations():
    float32, bfloat16 = (
        estimate("llama", DEEP, micro_batch_size=8, seq_length=1024, itemsize=itemsize)
        for itemsize in (4, 2)
    )
    assert 0.5 < bfloat16.saved / float32.saved < 0.8
    assert bfloat16.scores == float32.scores, "scores are float32"
    assert bfloat16.state == float32.state


def test_remat_policies_are_ordered_by_saved_bytes():
    policies = (
        "everything_saveable",
        "none",
        "dots_saveable",
        "dots_with_no_batch_dims_saveable",
        "nothing_saveable",
    )
    saved = [
        estimate("llama", DEEP, micro_batch_size=4, seq_length=1024, remat_policy=policy).saved
        for policy in policies
    ]
    assert saved == sorted(saved, reverse=True)
    assert len({*saved}) == len(policies)


def test_indivisible_kv_heads_count_as_repeated():
    grouped = DEEP | {"num_key_value_heads": 2}
    divided = estimate("llama", grouped, "1,1,2", seq_length=1024)
    repeated = estimate("llama", grouped, "1,1,4", seq_length=1024)
    assert repeated.saved > divided.saved / 2


@pytest.mark.parametrize("head_chunk_size", [512, 1024, 4096, -1])
def test_lm_head_grows_with_chunk_size(head_chunk_size: int):
    memory = estimate("llama", SMALL, seq_length=4096, head_chunk_size=head_chunk_size)
    tokens = 4096 if head_chunk_size == -1 else head_chunk_size
    assert memory.head == 4 * 2 * tokens * 32000


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
