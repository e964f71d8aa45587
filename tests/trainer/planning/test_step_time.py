"""Operations, communication and time of a step, and the accelerators that they are computed for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from bench.model_configs import MODEL_CONFIGS
from prepcli.core.errors import UsageError
from prepcli.models.activation_memory import NO_SCORES
from prepcli.models.lora import build_adapters
from prepcli.models.lora_config import LoraConfig
from prepcli.models.presets import PRESETS
from prepcli.models.registry import FAMILIES
from prepcli.models.rules import ACTIVATION_RULES, DEFAULT_RULES, PARAM_RULES, WHOLE, Rules
from tests.helpers.later_configs import LATER_FAMILIES
from tests.helpers.training_plans import load_text
from tests.trainer.planning.test_memory_estimate import make_inputs
from trainer.planning.memory_inputs import MemoryInputs
from trainer.planning.model_shapes import model_of_config
from trainer.planning.step_flops import StepFlops, count_step_flops
from trainer.planning.step_time import (
    ACCELERATORS,
    COMPUTE_EFFICIENCY,
    AxisTraffic,
    StepTime,
    axis_strides,
    axis_traffic,
    parse_devices,
)
from trainer.planning.training_plan import TrainingPlan, plan_training
from trainer.recipe.key_types import MAX_INT32

# Operations of a step against counts by hand, by XLA, and published figures.

LLAMA_7B, MIXTRAL, T5 = (MODEL_CONFIGS[name] for name in ("7b", "mixtral", "t5"))

DEEPSEEK_V3 = MODEL_CONFIGS["deepseek_v3"]

LENGTH, ROWS = 2048, 4

TOKENS = LENGTH * ROWS

# Parameters of LLaMA 7B without the embedding and the norms.
MATRICES_7B = 6_738_415_616 - 32000 * 4096 - (2 * 32 + 1) * 4096


def count(family: str, config: Any, **options: Any) -> StepFlops:
    """Count the operations of a step of four sequences."""
    sizes = {"micro_batch_size": ROWS, "seq_length": LENGTH, **options}
    return count_step_flops(make_inputs(family, config, **sizes))


def test_matmul_is_six_per_parameter_and_token():
    assert count("llama", LLAMA_7B).matmul == 6 * MATRICES_7B * TOKENS
    tied = count("llama", LLAMA_7B | {"tie_word_embeddings": True})
    assert tied.matmul == 6 * MATRICES_7B * TOKENS, "a tied head is a matrix product too"


def test_attention_full_is_the_formula_of_palm():
    flops = count("llama", LLAMA_7B)
    assert flops.attention_full == 12 * 32 * 4096 * LENGTH * TOKENS
    assert flops.attention_causal == flops.attention_full * (LENGTH + 1) // (2 * LENGTH)
    assert flops.attention_causal + flops.masked == flops.attention_full


def test_differential_attention_reads_values_of_two_heads():
    plain = count("llama", LLAMA_7B)
    differential = count("diffllama", LLAMA_7B)
    # Products of queries and keys, and twice as many of probabilities and values.
    assert differential.attention_full == 3 * plain.attention_full // 2


def test_windows_limit_attention_per_layer():
    config = LLAMA_7B | {"sliding_window": 256}
    windowed, full = count("mistral", config), count("mistral", config | {"sliding_window": None})
    assert windowed.attention_full == full.attention_full * 256 // LENGTH
    pairs = sum(min(position + 1, 256) for position in range(LENGTH))
    heads_size = full.attention_full // (12 * 32 * LENGTH * TOKENS)
    assert windowed.attention_causal == 12 * 32 * heads_size * pairs * ROWS
    assert windowed.masked + windowed.attention_causal == full.attention_full, (
        "the reference kernel computes all"
    )


def test_chunks_limit_attention_to_their_own_pairs():
    config = tiny_llama4(attention_chunk_size=4)
    flops = count_step_flops(make_inputs("llama4_text", config, seq_length=10))
    whole = count_step_flops(
        make_inputs("llama4_text", tiny_llama4(attention_chunk_size=None), seq_length=10)
    )
    # 10 tokens: 55 pairs, or 10 + 10 + 3 in chunks of 4, 4 and 2.
    assert flops.attention_causal * 55 == whole.attention_causal * 23


def tiny_llama4(**changes: Any) -> dict[str, Any]:
    """Return a config of Llama 4 in which all layers rotate."""
    return LATER_FAMILIES["llama4_text"] | {"no_rope_layers": [1, 1, 1], **changes}


def test_experts_count_for_their_tokens():
    dense = MIXTRAL | {"num_experts_per_tok": 8}
    two, eight = count("mixtral", MIXTRAL), count("mixtral", dense)
    expert_size = 3 * MIXTRAL["hidden_size"] * MIXTRAL["intermediate_size"]
    assert eight.matmul - two.matmul == 6 * 6 * expert_size * MIXTRAL["num_hidden_layers"] * TOKENS


def test_flops_count_the_matrices_of_each_kind_of_layer():
    """The model has one dense layer, four MoE layers with 4 of 32 experts, and shared experts of twice the width."""
    flops = count("deepseek_v3", DEEPSEEK_V3)
    width, heads, mlp = 512, 8, 192
    queries = 192 * width + heads * 96 * 192
    keys_and_values = (128 + 32) * width + heads * (64 + 64) * 128
    attention = queries + keys_and_values + heads * 64 * width
    sparse = 32 * width + 3 * width * (4 * mlp + 2 * mlp)
    matrices = 5 * attention + 3 * width * 1024 + 4 * sparse + 32000 * width
    assert flops.matmul == 6 * matrices * TOKENS
    assert flops.attention_full == 5 * 3 * 2 * heads * (96 + 64) * LENGTH * TOKENS


def test_encoder_and_decoder_count_their_own_tokens():
    short, long = count("t5", T5, source_length=128), count("t5", T5, source_length=256)
    assert long.matmul > short.matmul
    assert long.attention_full > short.attention_full
    assert short.attention_causal < short.attention_full, (
        "only the decoder's own attention is causal"
    )


@pytest.mark.parametrize(
    ("options", "layers", "attention"),
    [
        ({}, 0, 0),
        ({"remat_policy": "dots_saveable"}, 0, 0),
        ({"remat_policy": "dots_with_no_batch_dims_saveable"}, 0, 1),
        ({"remat_policy": "nothing_saveable"}, 1, 1),
        ({"ffn_chunk_size": 512}, 1, 0),
        ({"attention_tile": (512, 512)}, 0, 0.5),
        ({"attention_tile": (512, 512), "remat_policy": "nothing_saveable"}, 1, 1.5),
    ],
)
def test_recomputed_follows_policy_and_chunks(
    options: dict[str, Any], layers: int, attention: float
):
    flops, plain = count("llama", LLAMA_7B, **options), count("llama", LLAMA_7B)
    forward_layers = 2 * (MATRICES_7B - 32000 * 4096) * TOKENS
    forward_attention = plain.attention_full // 3
    forward_attention = (
        forward_attention * 10 // 16 if "attention_tile" in options else forward_attention
    )
    assert flops.recomputed == layers * forward_layers + int(attention * forward_attention)
    assert flops.executed == flops.model_flops_of_visible_pairs + flops.masked + flops.recomputed


@given(st.integers(2, 60), st.integers(1, 70), st.integers(1, 70), st.none() | st.integers(1, 70))
@example(2, 1, 1, 1)
def test_masked_counts_the_tiles_of_a_mask(
    length: int, q_size: int, kv_size: int, window: int | None
):
    flops = count_step_flops(
        make_inputs(
            "mistral",
            LLAMA_7B | {"sliding_window": window},
            seq_length=length,
            attention_tile=(q_size, kv_size),
        )
    )
    q_size, kv_size = min(q_size, length), min(kv_size, length)
    queries, keys = np.mgrid[:length, :length]
    is_visible = (keys <= queries) & (queries - keys < (window or length))
    tiles = set(zip((queries // q_size)[is_visible], (keys // kv_size)[is_visible]))
    pairs = len(tiles) * q_size * kv_size
    assert flops.attention_causal + flops.masked == 12 * 32 * 4096 * pairs


def test_flops_of_a_very_long_sequence_are_counted_at_once():
    length = MAX_INT32
    flops = count("llama", LLAMA_7B, seq_length=length, attention_tile=(1, 1))
    assert flops.masked == 0


def test_sources_without_tokens_have_no_pairs():
    pairs = T5["num_layers"] * LENGTH * LENGTH * ROWS
    tiled = count("t5", T5, source_length=0, attention_tile=(LENGTH, LENGTH))
    assert tiled.attention_causal + tiled.masked == 12 * 8 * 64 * pairs


def test_kernels_without_scores_skip_masked_pairs():
    assert count("llama", LLAMA_7B, attention_tile=NO_SCORES).masked == 0


def test_flops_do_not_depend_on_micro_batches():
    inputs = make_inputs("llama", LLAMA_7B, micro_batch_size=ROWS, seq_length=LENGTH)
    half = replace(inputs, micro_batch_size=ROWS // 2, accumulate=2)
    assert count_step_flops(half) == count_step_flops(inputs)


def test_frozen_matrices_have_no_gradients():
    inputs = make_inputs("llama", LLAMA_7B, micro_batch_size=ROWS, seq_length=LENGTH)
    head = "head.weight"
    frozen = count_step_flops(replace(inputs, frozen=frozenset(inputs.leaves.keys() - {head})))
    assert frozen.matmul == 4 * MATRICES_7B * TOKENS + 2 * 32000 * 4096 * TOKENS
    assert frozen.attention_full == count_step_flops(inputs).attention_full
    assert (
        count_step_flops(replace(inputs, frozen=frozenset(inputs.leaves))).matmul
        == 4 * MATRICES_7B * TOKENS
    )


def test_adapters_are_trained_and_their_base_is_frozen():
    family, rank = FAMILIES["llama"], 8
    adapters = build_adapters(
        family, LLAMA_7B, LoraConfig(rank, 16.0, ("attn.q", "mlp.down"))
    ).leaves
    inputs = make_inputs("llama", LLAMA_7B, micro_batch_size=ROWS, seq_length=LENGTH)
    num_adapters = 32 * rank * (4096 + 4096 + 11008 + 4096)
    flops = count_step_flops(replace(inputs, adapters=adapters))
    assert flops.matmul == (4 * MATRICES_7B + 6 * num_adapters) * TOKENS


def test_forward_and_backward_match_the_count_of_xla():
    """XLA also counts elementwise operations, which are few in a wide model."""
    from bench.compiled_memory import lower_step
    from trainer.nn.model_spec import ForwardConfig, build_model

    config = {
        "hidden_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 1024,
    }
    model = build_model(FAMILIES["llama"], config | {"vocab_size": 512}, is_tied=False)
    forward_config = ForwardConfig(scan_layers=False, head_chunk_size=-1)
    cost = lower_step(model, forward_config, 1, 256).cost_analysis()
    flops = count_step_flops(
        make_inputs("llama", config | {"vocab_size": 512}, seq_length=256, head_chunk_size=-1)
    )
    assert cost is not None
    assert flops.executed == pytest.approx(cost["flops"], rel=0.05)


# Bytes that a device sends along each mesh axis.

SPLIT_LLAMA_7B, SPLIT_T5 = (MODEL_CONFIGS[name] for name in ("7b", "t5"))

PARAMETERS = 6_738_415_616

SPLIT_ROWS, SPLIT_LENGTH, WIDTH, LAYERS = 8, 2048, 4096, 32


def inputs_7b(mesh: str, **options: Any) -> MemoryInputs:
    """Return the inputs of eight sequences on a mesh."""
    return make_inputs(
        "llama",
        SPLIT_LLAMA_7B,
        mesh,
        micro_batch_size=SPLIT_ROWS,
        seq_length=SPLIT_LENGTH,
        itemsize=2,
        **options,
    )


def traffic_7b(mesh: str, **options: Any) -> dict[str, AxisTraffic]:
    """Return the traffic of eight sequences on a mesh, by axis."""
    return {axis.axis: axis for axis in axis_traffic(inputs_7b(mesh, **options))}


def test_one_device_sends_nothing():
    assert axis_traffic(inputs_7b("1,1,1")) == []
    assert axis_traffic(replace(inputs_7b("1,1,1"), mesh=None)) == []


def test_dp_all_reduces_gradients_in_float32():
    assert traffic_7b("8,1,1") == {"dp": AxisTraffic("dp", 8, 2 * 4 * PARAMETERS * 7 // 8, True)}


@pytest.mark.parametrize("count", [2, 4, 8])
def test_slices_divide_the_traffic_of_their_axis(count: int):
    (whole,) = traffic_7b("8,1,1").values()
    (axis,) = axis_traffic(inputs_7b("8,1,1"), {"dp": count})
    assert axis.nbytes + axis.slow_nbytes == whole.nbytes
    per_slice = 8 // count
    assert axis.slow_nbytes == 2 * 4 * PARAMETERS * (count - 1) // (count * per_slice)
    assert axis.num_slices == count


def test_slices_of_an_axis_leave_other_axes_unchanged():
    dp, fsdp = axis_traffic(inputs_7b("2,4,1"), {"dp": 2})
    assert (fsdp.slow_nbytes, dp.nbytes) == (0, 0)


def test_fsdp_gathers_weights_twice_and_scatters_gradients():
    (axis,) = traffic_7b("1,8,1").values()
    assert axis.nbytes == PARAMETERS * (2 * 2 + 4) * 7 // 8
    assert axis.overlaps
    unsplit = replace(inputs_7b("1,8,1"), rules=Rules(params={**PARAM_RULES, "embed": WHOLE}))
    (axis,) = axis_traffic(unsplit)
    assert axis.nbytes == 2 * 4 * PARAMETERS * 7 // 8, (
        "gradients are all-reduced where fsdp does not split"
    )


RANK = 8

# A [rank, 4096] and B [4096, rank] of queries in each layer
ADAPTERS = LAYERS * RANK * 2 * WIDTH


def with_query_adapters(inputs: MemoryInputs) -> MemoryInputs:
    """Return the inputs of a run that trains adapters of queries."""
    lora = LoraConfig(RANK, 16.0, ("attn.q",))
    return replace(inputs, adapters=build_adapters(FAMILIES["llama"], SPLIT_LLAMA_7B, lora).leaves)


def test_only_gradients_of_trained_parameters_are_sent():
    adapters, fsdp = (with_query_adapters(inputs_7b(mesh)) for mesh in ("8,1,1", "1,8,1"))
    assert axis_traffic(adapters)[0].nbytes == 2 * 4 * ADAPTERS * 7 // 8
    # All weights are gathered in both passes, and the gradients of adapters scattered.
    gathered, scattered = 2 * 2 * (PARAMETERS + ADAPTERS), 4 * ADAPTERS
    assert axis_traffic(fsdp)[0].nbytes == (gathered + scattered) * 7 // 8
    head = 32000 * WIDTH
    frozen = frozenset(inputs_7b("1,1,1").leaves.keys() - {"head.weight"})
    assert traffic_7b("8,1,1", frozen=frozen)["dp"].nbytes == 2 * 4 * head * 7 // 8
    assert traffic_7b("1,8,1", frozen=frozen)["fsdp"].nbytes == (
        (2 * 2 * PARAMETERS + 4 * head) * 7 // 8
    )


@pytest.mark.parametrize(("policy", "passes"), [("none", 2), ("nothing_saveable", 3)])
def test_mp_gathers_and_scatters_the_residual_stream(policy: str, passes: int):
    (axis,) = traffic_7b("1,1,8", remat_policy=policy).values()
    residual = SPLIT_ROWS * SPLIT_LENGTH * WIDTH * 2
    assert axis.nbytes == (2 * 2 * passes * LAYERS + 4) * residual * 7 // 8
    assert not axis.overlaps


def test_mp_counts_encoder_and_cross_attention():
    inputs = make_inputs(
        "t5", SPLIT_T5, "1,1,4", micro_batch_size=1, seq_length=64, source_length=128
    )
    (axis,) = axis_traffic(inputs)
    decoder, encoder = 2 * 2 * 3 * 4 * 64 * 512, 2 * 2 * 2 * 4 * 128 * 512
    assert axis.nbytes == 4 * (decoder + encoder + 4 * 64 * 512) * 3 // 4


def test_traffic_grows_with_micro_batches():
    once, twice = traffic_7b("2,2,2"), traffic_7b("2,2,2", accumulate=2)
    assert {axis: 2 * traffic.nbytes for axis, traffic in once.items()} == {
        axis: traffic.nbytes for axis, traffic in twice.items()
    }


def test_sp_rotates_keys_and_values_only_if_it_splits_them(monkeypatch: pytest.MonkeyPatch):
    mesh = "dp:1,fsdp:1,mp:1,sp:4"
    gradients = 2 * 4 * PARAMETERS * 3 // 4
    monkeypatch.setitem(ACTIVATION_RULES, "seq", ((),))  # pyright: ignore[reportArgumentType]
    assert traffic_7b(mesh)["sp"].nbytes == gradients
    monkeypatch.setitem(ACTIVATION_RULES, "seq", (("sp",),))  # pyright: ignore[reportArgumentType]
    keys_and_values = 2 * SPLIT_ROWS * SPLIT_LENGTH * WIDTH
    ring = LAYERS * keys_and_values * (2 * 2 + 4) * 3 // 4
    assert traffic_7b(mesh)["sp"].nbytes == gradients + ring


def test_axis_strides_follow_the_device_order():
    assert dict(axis_strides(inputs_7b("2,4,8"))) == {"mp": 1, "fsdp": 8, "dp": 32}


def test_mp_counts_one_block_for_layers_without_mlp():
    config = MODEL_CONFIGS["mamba2"]
    sizes = {"micro_batch_size": 2, "seq_length": 64, "itemsize": 2}
    inputs = make_inputs("mamba2", config, "1,1,8", remat_policy="none", **sizes)
    (axis,) = axis_traffic(inputs)
    residual = 2 * 64 * config["hidden_size"] * 2
    # Forward and backward pass: a gather and a scatter each.
    per_layer = 2 * 2
    assert axis.nbytes == (per_layer * config["num_hidden_layers"] + 4) * residual * 7 // 8


# The roofline of a step.

V5P = ACCELERATORS["v5p"]


def plan_7b(folder: Path, *overrides: str) -> TrainingPlan:
    """Plan a step of LLaMA 7B."""
    recipe = load_text(folder, "data.seq_length=2048", "model.dtype=bfloat16", *overrides)
    return plan_training(recipe, model_of_config(PRESETS["llama-7b"]), DEFAULT_RULES)


def test_step_time_adds_exposed_to_the_longest_part():
    time = StepTime(compute_s=3.0, memory_s=1.0, overlapped_s=2.0, exposed_s=0.5)
    assert (time.step_s, time.bound) == (3.5, "compute")
    assert StepTime(1.0, 2.0, 4.0, 0.5).bound == "overlapped communication"
    assert StepTime(1.0, 2.0, 1.5, 3.0).bound == "mp communication"


def test_compute_time_is_the_share_of_the_peak(tmp_path: Path):
    plan = plan_7b(tmp_path, "mesh=1,8,1")
    estimate = plan.estimate_on(V5P)
    assert estimate.time.compute_s == pytest.approx(
        plan.flops.executed / 8 / 459e12 / COMPUTE_EFFICIENCY
    )
    assert estimate.tokens_per_s == pytest.approx(8 * 2048 / estimate.time.step_s)
    assert estimate.mfu_causal < estimate.mfu_full < 1
    assert estimate.mfu_causal <= COMPUTE_EFFICIENCY, "an upper bound"


def test_frozen_weights_are_read_in_two_passes_and_not_written(tmp_path: Path):
    parameters, head = 6_738_415_616, 32000 * 4096
    all_trained = plan_7b(tmp_path, "mesh=1,1,1")
    freeze = "optimizer.freeze=['layers','embed','final_norm']"
    head_trained = plan_7b(tmp_path, "mesh=1,1,1", freeze)
    for plan, num_trained in ((all_trained, parameters), (head_trained, head)):
        # Parameter, two moments, gradient and update in float32, each read and written. Weights in bfloat16.
        updates = 2 * 5 * 4 * num_trained
        reads = 2 * (2 * parameters + num_trained)
        nbytes = updates + reads + 2 * plan.memory.saved
        memory_s = plan.estimate_on(V5P).time.memory_s
        assert memory_s == pytest.approx(nbytes / V5P.memory_bandwidth)


def test_adapters_shorten_the_memory_time_of_a_step(tmp_path: Path):
    words = ("mesh=1,1,1", "lora.base_dtype=float32")
    all_trained = plan_7b(tmp_path, "mesh=1,1,1").estimate_on(V5P).time.memory_s
    adapters = plan_7b(tmp_path, *words, "lora.rank=8").estimate_on(V5P).time.memory_s
    # The 20 bytes of the state of each parameter, both ways, and one of three reads.
    saved_s = (2 * 20 + 2) * 6_738_415_616 / V5P.memory_bandwidth
    assert all_trained - adapters == pytest.approx(saved_s, rel=0.01)


def test_communication_time_uses_the_bandwidth_of_the_axis(tmp_path: Path):
    plan = plan_7b(tmp_path, "mesh=1,2,4")
    traffic = {axis.axis: axis.nbytes for axis in plan.traffic}
    time = plan.estimate_on(V5P).time
    assert time.overlapped_s == pytest.approx(traffic["fsdp"] / V5P.link_bandwidth)
    assert time.exposed_s == pytest.approx(traffic["mp"] / V5P.link_bandwidth)


def test_slow_networks_bound_the_step(tmp_path: Path):
    plan = plan_7b(tmp_path, "mesh=64,1,1", "batch.size=64", "data.seq_length=128")
    assert plan.estimate_on(ACCELERATORS["H100"]).time.bound == "overlapped communication"


def test_bytes_between_slices_use_the_network(tmp_path: Path):
    words = ("mesh=8,1,1", "batch.size=8")
    one, two = (plan_7b(tmp_path, *words, *more) for more in ((), ("cluster.dcn_mesh=dp:2",)))
    (axis,) = two.traffic
    expected_s = axis.nbytes / V5P.link_bandwidth + axis.slow_nbytes / V5P.network_bandwidth
    assert two.estimate_on(V5P).time.overlapped_s == pytest.approx(expected_s)
    assert expected_s > one.estimate_on(V5P).time.overlapped_s


def test_estimate_is_a_bound_of_a_published_rate(tmp_path: Path):
    """Llama 3.1 8B on 8 H100, 8,192 tokens, 2 sequences per GPU, fsdp and torch.compile.

    torchtitan measures 6,667 tokens/s per GPU (benchmarks/llama3_h100_202412_torchtitan.md).
    """
    values = ("mesh=1,8,1", "data.seq_length=8192", "batch.size=16", "model.dtype=bfloat16")
    kernels = ("model.attention_kernel=blockwise", "model.remat_policy=nothing_saveable")
    recipe = load_text(tmp_path, *values, *kernels)
    plan = plan_training(recipe, model_of_config(PRESETS["llama-3-8b"]), DEFAULT_RULES)
    assert 6667 < plan.estimate_on(ACCELERATORS["H100"]).tokens_per_s / 8 < 1.5 * 6667


# Kinds of accelerators and their bandwidths.


@pytest.mark.parametrize(
    ("text", "name", "number"),
    [("v5p", "v5p", None), ("h100:8", "H100", 8), ("a100-80:16", "A100-80", 16)],
)
def test_parse_devices_accepts_kind_and_number(text: str, name: str, number: int | None):
    kind, parsed_number = parse_devices(text)
    assert kind is not None
    assert (kind.name, parsed_number) == (name, number)


def test_parse_devices_accepts_a_number_alone():
    assert parse_devices("256") == (None, 256)


@pytest.mark.parametrize(
    "text", ["v5p:0", "0", "1048577", "v5p:", "v5p:-1", "v5p:x", "v5p:1048577", 20 * "9"]
)
def test_parse_devices_rejects_invalid_numbers(text: str):
    with pytest.raises(UsageError, match="is invalid"):
        parse_devices(text)


def test_parse_devices_suggests_a_similar_kind():
    with pytest.raises(UsageError) as caught:
        parse_devices("H10O")
    assert "known: v4, v5e" in caught.value.why
    assert "H100" in caught.value.hint


def test_axis_bandwidth_depends_on_the_domain():
    h100 = ACCELERATORS["H100"]
    assert h100.axis_bandwidth(8, 1) == h100.link_bandwidth, "within a node"
    assert h100.axis_bandwidth(64, 4) == 2 * h100.network_bandwidth, (
        "two devices of each node are in the ring"
    )
    assert h100.axis_bandwidth(64, 8) == h100.network_bandwidth
    assert ACCELERATORS["v5p"].axis_bandwidth(64, 4) == ACCELERATORS["v5p"].link_bandwidth, (
        "within a pod"
    )
