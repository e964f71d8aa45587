"""The roofline of a step."""

from __future__ import annotations

from pathlib import Path

import pytest

from prepcli.models.presets import PRESETS
from prepcli.models.rules import DEFAULT_RULES
from tests.helpers.training_plans import load_text
from trainer.planning.model_shapes import model_of_config
from trainer.planning.step_time import ACCELERATORS, COMPUTE_EFFICIENCY, StepTime, compute_shards
from trainer.planning.training_plan import TrainingPlan, plan_training

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


def test_sp_divides_computation_only_if_it_splits_queries(tmp_path: Path):
    plan = plan_7b(tmp_path, "mesh=dp:2,fsdp:2,mp:2,sp:2")
    assert compute_shards(plan.inputs) == 8 * plan.inputs.num_sequence_shards


def test_estimate_is_a_bound_of_a_published_rate(tmp_path: Path):
    """Llama 3.1 8B on 8 H100, 8,192 tokens, 2 sequences per GPU, fsdp and torch.compile.

    torchtitan measures 6,667 tokens/s per GPU (benchmarks/llama3_h100_202412_torchtitan.md).
    """
    values = ("mesh=1,8,1", "data.seq_length=8192", "batch.size=16", "model.dtype=bfloat16")
    kernels = ("model.attention_kernel=blockwise", "model.remat_policy=nothing_saveable")
    recipe = load_text(tmp_path, *values, *kernels)
    plan = plan_training(recipe, model_of_config(PRESETS["llama-3-8b"]), DEFAULT_RULES)
    assert 6667 < plan.estimate_on(ACCELERATORS["H100"]).tokens_per_s / 8 < 1.5 * 6667
