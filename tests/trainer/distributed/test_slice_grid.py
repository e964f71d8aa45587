"""Devices of several slices in the order of a mesh."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trainer.distributed.sharding import make_sharding_context
from trainer.distributed.slice_grid import slice_grid
from trainer.models.errors import UsageError
from trainer.models.mesh import parse_mesh


@dataclass(frozen=True)
class FakeDevice:
    """A device with the attributes that decide on its place."""

    id: int
    process_index: int
    slice_index: int | None = None
    platform: str = "gpu"
    device_kind: str = "fake"


def make_devices(count: int, *, per_host: int = 4, per_slice: int | None = None) -> list[Any]:
    """Return devices in the order of their ids."""
    return [FakeDevice(i, i // per_host, None if per_slice is None else i // per_slice) for i in range(count)]


def slice_numbers(grid: np.ndarray, per_slice: int) -> np.ndarray:
    """Return the slice of each device of a grid."""
    return np.vectorize(lambda device: device.id // per_slice, otypes=[int])(grid)


@pytest.mark.parametrize("has_index", [True, False])
@pytest.mark.parametrize(
    ("mesh", "slices"),
    [("!2,8,1", {"dp": 2}), ("!4,2,2", {"dp": 2}), ("!1,16,1", {"fsdp": 4}), ("!4,4,1", {"dp": 2, "fsdp": 2})],
)
def test_runs_along_an_axis_share_a_slice(mesh: str, slices: dict[str, int], has_index: bool):
    parsed, count = parse_mesh(mesh), math.prod(slices.values())
    grid = slice_grid(parsed, make_devices(16, per_slice=16 // count if has_index else None), slices)
    assert grid.shape == parsed.sizes
    assert sorted(device.id for device in grid.flat) == list(range(16))
    numbers = slice_numbers(grid, 16 // count)
    for axis, size in zip(parsed.names, parsed.sizes):
        runs = np.moveaxis(numbers, parsed.names.index(axis), -1).reshape(
            -1, slices.get(axis, 1), size // slices.get(axis, 1)
        )
        assert (runs == runs[..., :1]).all(), "a run crosses slices"
        assert all(len(set(row[:, 0])) == slices.get(axis, 1) for row in runs), "a slice comes twice"


@pytest.mark.parametrize(
    ("devices", "slices"),
    [
        (make_devices(16, per_slice=4), {"dp": 2}),
        (make_devices(16, per_host=16, per_slice=8), {"dp": 4}),
        (make_devices(16, per_host=6), {"dp": 2}),
    ],
)
def test_other_numbers_of_slices_are_rejected(devices: list[Any], slices: dict[str, int]):
    with pytest.raises(UsageError, match="slices"):
        slice_grid(parse_mesh("!4,4,1"), devices, slices)


def test_context_computes_on_a_mesh_of_slices():
    sharding = make_sharding_context(parse_mesh("4,2,1"), slices={"dp": 2})
    x = jnp.arange(64.0).reshape(8, 8)
    placed = jax.device_put(x, sharding.activation_sharding((8, 8), "batch", "embed"))
    assert jax.jit(jnp.sum)(placed) == x.sum()
    with pytest.raises(UsageError, match="divides fsdp"):
        make_sharding_context(parse_mesh("4,2,1"), slices={"fsdp": 4})
