"""Bytes that a device sends along each mesh axis."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from bench.model_configs import MODEL_CONFIGS
from prepcli.models.lora import build_adapters
from prepcli.models.lora_config import LoraConfig
from prepcli.models.registry import FAMILIES
from prepcli.models.rules import ACTIVATION_RULES, PARAM_RULES, WHOLE, Rules
from tests.trainer.planning.test_memory_estimate import make_inputs
from trainer.planning.memory_inputs import MemoryInputs
from trainer.planning.step_time import AxisTraffic, axis_strides, axis_traffic

LLAMA_7B, T5 = (MODEL_CONFIGS[name] for name in ("7b", "t5"))
PARAMETERS = 6_738_415_616
ROWS, LENGTH, WIDTH, LAYERS = 8, 2048, 4096, 32


def inputs_7b(mesh: str, **options: Any) -> MemoryInputs:
    """Return the inputs of eight sequences on a mesh."""
    return make_inputs(
        "llama", LLAMA_7B, mesh, micro_batch_size=ROWS, seq_length=LENGTH, itemsize=2, **options
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
    return replace(inputs, adapters=build_adapters(FAMILIES["llama"], LLAMA_7B, lora).leaves)


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
    residual = ROWS * LENGTH * WIDTH * 2
    assert axis.nbytes == (2 * 2 * passes * LAYERS + 4) * residual * 7 // 8
    assert not axis.overlaps


def test_mp_counts_encoder_and_cross_attention():
    inputs = make_inputs("t5", T5, "1,1,4", micro_batch_size=1, seq_length=64, source_length=128)
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
    keys_and_values = 2 * ROWS * LENGTH * WIDTH
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
