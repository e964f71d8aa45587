"""Model FLOPs utilization of a run."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from prepcli.models.mesh import parse_mesh
from prepcli.models.registry import family_of
from prepcli.models.rules import DEFAULT_RULES
from tests.helpers.training_plans import TINY, plan_text
from trainer.distributed.sharding import ShardingContext, peak_memory_nbytes
from trainer.nn.model_spec import build_model
from trainer.planning.step_time import ACCELERATORS, JAX_KINDS, accelerator_of
from trainer.training.setup import peak_step_s


@dataclass
class FakeDevice:
    """A device with a kind and statistics of its memory."""

    device_kind: str = "cpu"
    stats: dict[str, int] | None = None

    def memory_stats(self) -> dict[str, int] | None:
        return self.stats


def sharding_of(*devices: FakeDevice) -> Any:
    """Return a sharding over fake devices."""
    mesh = SimpleNamespace(devices=SimpleNamespace(flat=devices), local_devices=devices)
    return SimpleNamespace(
        mesh=parse_mesh(f"{len(devices)},1,1"), device_mesh=mesh, rules=DEFAULT_RULES
    )


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("lora.rank=4",),
        ("lora.rank=4", "lora.modules_to_save=['head']"),
        ("lora.rank=4", "lora.modules_to_save=['embed.tokens', 'head']"),
        ("optimizer.freeze=layers.mlp.up.weight",),
    ],
    ids=str,
)
def test_mfu_counts_the_operations_of_the_plan(tmp_path: Path, overrides: tuple[str, ...]):
    plan = plan_text(tmp_path, "mesh=2,1,1", *overrides)
    family, lora = family_of(TINY), plan.recipe.lora.new_adapters
    model = build_model(family, TINY, is_tied=False, lora=lora)
    sharding = sharding_of(FakeDevice("NVIDIA H200"), FakeDevice("NVIDIA H200"))
    peak_flops = 2 * ACCELERATORS["H200"].peak_flops
    step_flops = plan.flops.model_flops_of_all_pairs
    default_flops = plan_text(tmp_path, "mesh=2,1,1").flops.model_flops_of_all_pairs
    assert peak_step_s(plan.recipe, model, sharding) == step_flops / peak_flops
    assert (step_flops < default_flops) == bool(overrides)
    assert (
        peak_step_s(plan.recipe, model, sharding_of(FakeDevice("cpu"), FakeDevice("cpu"))) is None
    )


def test_mfu_counts_a_trained_tied_embedding(tmp_path: Path):
    config = TINY | {"tie_word_embeddings": True}
    overrides = ("mesh=1,1,1", "lora.rank=4", "lora.modules_to_save=['embed.tokens']")
    plan = plan_text(tmp_path, *overrides, config=config)
    lora = plan.recipe.lora.new_adapters
    model = build_model(family_of(config), config, is_tied=True, lora=lora)
    step_s = peak_step_s(plan.recipe, model, sharding_of(FakeDevice("NVIDIA H100 80GB HBM3")))
    assert step_s is not None
    # The head of 96 tokens and width 32: y, dx and dW for 8 sequences of 16 tokens. Two layers without dW.
    head = 6 * 96 * 32
    layers = 4 * 2 * (4 * 32 * 32 + 3 * 32 * 64)
    adapters = plan_text(tmp_path, *overrides[:2]).inputs.saved_leaves.values()
    num_adapters = sum(math.prod(leaf.shape) for leaf in adapters)
    matmul = (head + layers + 6 * num_adapters) * 8 * 16
    assert plan.flops.matmul == matmul
    expected = matmul + plan.flops.attention_full
    assert step_s * ACCELERATORS["H100"].peak_flops == pytest.approx(expected)


def test_jax_kinds_name_known_accelerators():
    assert all(accelerator_of(kind) for kind in JAX_KINDS)
    assert accelerator_of("NVIDIA H100 PCIe") is None


def test_peak_memory_is_the_maximum_over_devices():
    full, empty = (
        FakeDevice(stats={"peak_bytes_in_use": 9}),
        FakeDevice(stats={"peak_bytes_in_use": 3}),
    )
    assert peak_memory_nbytes(sharding_of(empty, full)) == 9
    assert peak_memory_nbytes(sharding_of(FakeDevice())) is None
    assert peak_memory_nbytes(ShardingContext()) is None
