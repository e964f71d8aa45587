"""Model FLOPs utilization of a run."""

from __future__ import annotations

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
    "overrides", [(), ("lora.rank=4",), ("optimizer.freeze=layers.mlp.up.weight",)], ids=str
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
