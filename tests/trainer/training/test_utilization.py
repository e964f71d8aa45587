"""Model FLOPs utilization of a run."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from trainer.distributed.device_memory import peak_memory_nbytes
from trainer.distributed.sharding import ShardingContext
from trainer.models.mesh import parse_mesh
from trainer.planning.accelerators import JAX_KINDS, accelerator_of
from trainer.training import utilization
from trainer.training.utilization import peak_step_s


@dataclass
class FakeDevice:
    """A device with a kind and statistics of its memory."""

    device_kind: str = "cpu"
    stats: dict[str, int] | None = None

    def memory_stats(self) -> dict[str, int] | None:
        return self.stats


def sharding_of(*devices: FakeDevice) -> Any:
    mesh = SimpleNamespace(devices=SimpleNamespace(flat=devices), local_devices=devices)
    return SimpleNamespace(mesh=parse_mesh(f"{len(devices)},1,1"), device_mesh=mesh, rules={})


def test_peak_step_divides_flops_by_the_peak_of_devices(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(utilization, "step_inputs", lambda recipe, model, mesh, rules: None)
    monkeypatch.setattr(utilization, "count_step_flops", lambda inputs: SimpleNamespace(model_full=1978 * 10**12))
    anything: Any = None
    assert peak_step_s(anything, anything, sharding_of(FakeDevice("NVIDIA H200"), FakeDevice("NVIDIA H200"))) == 1.0
    assert peak_step_s(anything, anything, sharding_of(FakeDevice("cpu"))) is None


def test_jax_kinds_name_known_accelerators():
    assert all(accelerator_of(kind) for kind in JAX_KINDS)
    assert accelerator_of("NVIDIA H100 PCIe") is None


def test_peak_memory_is_that_of_the_fullest_device():
    full, empty = FakeDevice(stats={"peak_bytes_in_use": 9}), FakeDevice(stats={"peak_bytes_in_use": 3})
    assert peak_memory_nbytes(sharding_of(empty, full)) == 9
    assert peak_memory_nbytes(sharding_of(FakeDevice())) is None
    assert peak_memory_nbytes(ShardingContext()) is None
