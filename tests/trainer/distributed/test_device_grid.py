"""Devices of several slices in the order of a mesh."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import mesh_utils

from prepcli.core.errors import UsageError
from prepcli.launch.hardware import TPU_GENERATIONS
from prepcli.models.mesh import Mesh, parse_mesh
from tests.helpers.tpu_devices import FakeTpu, make_tpu_devices
from trainer.distributed.sharding import arrange_devices, make_sharding_context
from trainer.planning.step_time import ACCELERATORS
from trainer.recipe import load_recipe

RECIPES = sorted((Path(__file__).parents[3] / "recipes").glob("*.toml"))
TOPOLOGIES = [
    f"{name}:{shape}"
    for name, generation in TPU_GENERATIONS.items()
    if name in ACCELERATORS
    for shape in generation.slices
]


@dataclass(frozen=True)
class FakeDevice:
    """A device with the attributes that decide on its place."""

    id: int
    process_index: int
    slice_index: int | None = None
    platform: str = "gpu"
    device_kind: str = "fake"


def make_devices(
    count: int, *, per_host: int = 4, per_slice: int | None = None, platform: str = "gpu"
) -> list[Any]:
    """Return devices in the order of their ids."""
    slice_indices = [None if per_slice is None else i // per_slice for i in range(count)]
    return [FakeDevice(i, i // per_host, slice_indices[i], platform) for i in range(count)]


def slice_numbers(grid: np.ndarray, per_slice: int) -> np.ndarray:
    """Return the slice of each device of a grid."""
    return np.vectorize(lambda device: device.id // per_slice, otypes=[int])(grid)


@pytest.mark.parametrize("has_index", [True, False])
@pytest.mark.parametrize(
    ("mesh", "slices"),
    [
        ("!2,8,1", {"dp": 2}),
        ("!4,2,2", {"dp": 2}),
        ("!1,16,1", {"fsdp": 4}),
        ("!4,4,1", {"dp": 2, "fsdp": 2}),
    ],
)
def test_consecutive_devices_along_an_axis_share_a_slice(
    mesh: str, slices: dict[str, int], has_index: bool
):
    parsed, count = parse_mesh(mesh), math.prod(slices.values())
    grid = arrange_devices(
        parsed, make_devices(16, per_slice=16 // count if has_index else None), slices
    )
    assert grid.shape == parsed.sizes
    assert sorted(device.id for device in grid.flat) == list(range(16))
    numbers = slice_numbers(grid, 16 // count)
    for axis, size in zip(parsed.names, parsed.sizes):
        runs = np.moveaxis(numbers, parsed.names.index(axis), -1).reshape(
            -1, slices.get(axis, 1), size // slices.get(axis, 1)
        )
        assert (runs == runs[..., :1]).all(), "a run crosses slices"
        assert all(len(set(row[:, 0])) == slices.get(axis, 1) for row in runs), (
            "a slice comes twice"
        )


@pytest.mark.parametrize(
    ("devices", "slices"),
    [
        (make_devices(16, per_slice=4, platform="tpu"), {"dp": 2}),
        (make_devices(16, per_host=16, per_slice=8, platform="tpu"), {"dp": 4}),
        (make_devices(16, per_host=6), {"dp": 2}),
    ],
)
def test_other_numbers_of_slices_are_rejected(devices: list[Any], slices: dict[str, int]):
    with pytest.raises(UsageError, match="slices"):
        arrange_devices(parse_mesh("!4,4,1"), devices, slices)


def test_context_computes_on_a_mesh_of_slices():
    sharding = make_sharding_context(parse_mesh("4,2,1"), slices={"dp": 2})
    x = jnp.arange(64.0).reshape(8, 8)
    placed = jax.device_put(x, sharding.activation_sharding((8, 8), "batch", "embed"))
    assert jax.jit(jnp.sum)(placed) == x.sum()
    with pytest.raises(UsageError, match="divides fsdp"):
        make_sharding_context(parse_mesh("4,2,1"), slices={"fsdp": 4})


@cache
def cached_tpus(topology: str) -> list[FakeTpu]:
    return make_tpu_devices(topology)


def powers_of_two(limit: int) -> list[int]:
    return [1 << bits for bits in range(limit.bit_length())]


def meshes_of(count: int) -> list[Mesh]:
    """Return all meshes of a number of devices over dp, fsdp and mp."""
    sizes = powers_of_two(count)
    pairs = [(fsdp, mp) for fsdp in sizes for mp in sizes if count % (fsdp * mp) == 0]
    return [parse_mesh(f"{count // (fsdp * mp)},{fsdp},{mp}") for fsdp, mp in pairs]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipes_build_their_mesh_on_every_topology(path: Path):
    mesh = parse_mesh(load_recipe(path).recipe.mesh)
    built = list[str]()
    for topology in TOPOLOGIES:
        devices = cached_tpus(topology)
        if len(devices) != mesh.n_devices:
            with pytest.raises(
                UsageError, match=rf"needs {mesh.n_devices} devices, there (are|is) {len(devices)}"
            ):
                make_sharding_context(mesh, devices=devices)
        else:
            device_mesh = make_sharding_context(mesh, devices=devices).device_mesh
            assert device_mesh is not None
            assert {device.id for device in device_mesh.devices.flat} == set(range(len(devices)))
            built.append(topology.partition(":")[0])
    assert built == ["v4", "v5e", "v5p", "v6e", "tpu7x"]


@pytest.mark.parametrize(
    "topology", [name for name in TOPOLOGIES if len(make_tpu_devices(name)) <= 256]
)
def test_every_mesh_is_built_on_every_topology(topology: str):
    devices = cached_tpus(topology)
    for mesh in meshes_of(len(devices)):
        grid = arrange_devices(mesh, devices)
        assert grid.shape == mesh.sizes
        assert len({device.id for device in grid.flat}) == len(devices)


@pytest.mark.parametrize(
    "topology", ["v4:4x8x8", "v5e:4x8", "v5p:2x2x2", "v5p:4x4x8", "v6e:16x16", "tpu7x:4x4x4"]
)
def test_devices_have_the_order_of_jax_if_it_supports_the_mesh(topology: str):
    devices, unsplit = cached_tpus(topology), 0
    for mesh in meshes_of(len(devices)):
        try:
            expected = mesh_utils.create_device_mesh(mesh.sizes, devices)
        except NotImplementedError:
            continue
        assert (arrange_devices(mesh, devices) == expected).all()
        unsplit += 1
    assert unsplit > 1


def test_gpus_of_several_hosts_are_in_the_order_of_their_ids():
    devices = make_devices(16, per_slice=4)
    shuffled = [*devices[8:], *devices[:8]]
    grid = arrange_devices(parse_mesh("2,4,2"), shuffled)
    assert [device.id for device in grid.flat] == list(range(16))
    plain = arrange_devices(parse_mesh("!2,4,2"), shuffled)
    assert list(plain.flat) == shuffled


def test_slice_in_recipe_may_span_several_gpu_hosts():
    grid = arrange_devices(parse_mesh("2,8,1"), make_devices(16, per_slice=4), {"dp": 2})
    assert [device.id for device in grid[0].flat] == list(range(8))


def test_cpus_have_the_order_of_jax():
    devices = jax.devices("cpu")
    mesh = parse_mesh("2,2,2")
    expected = jax.make_mesh(mesh.sizes, mesh.names, devices=devices).devices
    assert (arrange_devices(mesh, devices) == expected).all()


def test_tpus_of_several_slices_need_slices_in_the_recipe():
    devices = make_devices(16, per_slice=8, platform="tpu")
    with pytest.raises(
        UsageError, match=r"`cluster.dcn_mesh` has 1 slice - the devices form 2 slices"
    ) as caught:
        arrange_devices(parse_mesh("2,8,1"), devices)
    assert "cluster.dcn_mesh=dp:2" in caught.value.hint
