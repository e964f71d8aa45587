"""Devices and meshes: their order, topology, and the internals of JAX that prep uses."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]
from jax.experimental import mesh_utils
from packaging.specifiers import SpecifierSet

from prepcli.core.errors import FAILED, PrepError, UsageError
from prepcli.launch.hardware import TPU_GENERATIONS
from prepcli.models.attention_kernels import DeviceKind
from prepcli.models.mesh import Mesh, parse_mesh
from tests.helpers.tpu_devices import FakeTpu, make_tpu_devices
from trainer.distributed import devices
from trainer.distributed.compilation import CompileWatch, run_compile_process
from trainer.distributed.devices import PLATFORM_HINT, all_devices, local_devices, tpu_devices
from trainer.distributed.processes import CALLBACK, CLIENT_FACTORY
from trainer.distributed.sharding import (
    ShardingContext,
    arrange_devices,
    device_kind,
    kind_of_device,
    local_device_sharding,
    make_sharding_context,
)
from trainer.planning.step_time import ACCELERATORS
from trainer.recipe import load_recipe

# Devices of several slices in the order of a mesh.

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


# Errors of JAX about its platforms, as one message.

USERS_OF_DEVICES: tuple[Callable[[], object], ...] = (
    all_devices,
    local_devices,
    local_device_sharding,
    lambda: device_kind(ShardingContext()),
    lambda: make_sharding_context(parse_mesh("1,1,1")),
)


@pytest.mark.parametrize("number", range(len(USERS_OF_DEVICES)))
@pytest.mark.parametrize(
    ("error", "why"),
    [
        (
            RuntimeError("Unable to initialize backend 'foo': unknown\nmore"),
            "Unable to initialize backend 'foo': unknown",
        ),
        (AssertionError(), "JAX_PLATFORMS=cuda names a platform that is not installed"),
    ],
)
def test_missing_platform_raises_prep_error(
    monkeypatch: pytest.MonkeyPatch, number: int, error: Exception, why: str
) -> None:
    def fail(*_: Any) -> list[Any]:
        raise error

    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    monkeypatch.setattr(jax, "devices", fail)
    monkeypatch.setattr(jax, "local_devices", fail)
    with pytest.raises(PrepError) as caught:
        USERS_OF_DEVICES[number]()
    assert (caught.value.what, caught.value.why, caught.value.hint) == (
        "JAX found no devices",
        why,
        PLATFORM_HINT,
    )


def test_devices_match_jax() -> None:
    assert all_devices() == jax.devices()
    assert local_devices() == jax.local_devices()


# The kind of the devices of a run, from the attributes of JAX devices.


def device(platform: str, version: str = "", **attributes: Any) -> Any:
    """Return an object with the attributes of a JAX device."""
    return SimpleNamespace(
        platform=platform, client=SimpleNamespace(platform_version=version), **attributes
    )


@pytest.mark.parametrize(
    ("jax_device", "kind"),
    [
        (device("cpu"), DeviceKind("cpu")),
        (device("tpu"), DeviceKind("tpu")),
        (
            device("gpu", "PJRT C API\ncuda 12090", compute_capability="9.0"),
            DeviceKind("cuda", (9, 0)),
        ),
        (
            device("gpu", "PJRT C API\ncuda 12090", compute_capability="12.1"),
            DeviceKind("cuda", (12, 1)),
        ),
        (device("gpu", "PJRT C API\ncuda 12090"), DeviceKind("cuda")),
        (device("gpu", "PJRT C API\nrocm 60300", compute_capability="gfx90a"), DeviceKind("rocm")),
    ],
)
def test_kind_follows_platform_and_capability(jax_device: Any, kind: DeviceKind):
    assert kind_of_device(jax_device) == kind


def test_device_kind_returns_the_kind_of_the_mesh_devices():
    assert device_kind(ShardingContext()) == DeviceKind("cpu")
    assert device_kind(make_sharding_context(parse_mesh("1,8,1"))) == DeviceKind("cpu")


# Devices that JAX only describes.


def test_version_of_libtpu_without_a_package_is_unknown(monkeypatch: pytest.MonkeyPatch):
    def find_version(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(devices, "version", find_version)
    assert devices.libtpu_version() == "unknown"


@pytest.mark.skipif(find_spec("libtpu") is not None, reason="libtpu is installed")
def test_topology_without_libtpu_is_reported():
    with pytest.raises(
        PrepError, match=r"no compiler for the TPU topology 'v5e:2x2' - libtpu .*prepcli\[tpu\]"
    ) as caught:
        tpu_devices("v5e:2x2")
    assert caught.value.code == FAILED


# Tests of the private parts of JAX that prep uses: a release that moves one fails here by name.

ROOT = Path(__file__).parents[3]

BOUND = ">=0.10,<0.13"

BACKENDS = """
import jax
from trainer.distributed.devices import backends_are_initialized

print(backends_are_initialized())
jax.devices()
print(backends_are_initialized())
"""


def test_backends_are_initialized_by_the_first_use_of_devices():
    command = [sys.executable, "-c", BACKENDS]
    output = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    assert output.split() == ["False", "True"]


def test_distributed_state_has_the_client_of_jax():
    state = devices.distributed_state()
    assert (state.client, state.process_id, state.num_processes) == (None, 0, 1)


def test_this_machine_is_not_a_tpu_vm():
    assert devices.runs_on_tpu_vm() is False


def test_client_factory_of_jaxlib_has_the_error_callback():
    """Without it `RuntimeErrors` installs no hook, and a lost process 0 aborts all others."""
    assert CALLBACK in getattr(_jax, CLIENT_FACTORY).__doc__


def test_requirements_bound_jax_to_the_tested_releases():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert f"jax{BOUND}" in project["dependencies"]
    assert extras["cuda"] == [f"jax[cuda13]{BOUND}"]
    assert extras["tpu"] == [f"jax[tpu]{BOUND}"]
    assert version("jax") in SpecifierSet(BOUND)


# The process that compiles: its phases, its time limit, and its end.

ENDLESS = """
import os, time
from trainer.distributed.compilation import read_request, report_phase
path = read_request()
report_phase("compile")
open(path, "w").write(str(os.getpid()))
time.sleep(3600)
"""


@pytest.fixture
def endless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return a module that never answers and writes its process id to the file of the request."""
    (tmp_path / "endless_module.py").write_text(ENDLESS)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{Path(__file__).parents[3]}")
    return "endless_module"


def is_running(pid: int) -> bool:
    """Return whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_failed_process_is_reported_with_its_last_line():
    with pytest.raises(
        PrepError, match=r"the compilation failed - exit code 1: .*No module named 'nowhere'"
    ):
        run_compile_process("nowhere.at_all", "{}", 1)


def test_process_without_an_answer_is_reported():
    with pytest.raises(PrepError, match="the compilation failed - exit code 0: no message"):
        run_compile_process("keyword", "{}", 1)


def test_phases_are_reported_again_while_they_last(endless: str, tmp_path: Path):
    phases = list[tuple[str, float]]()

    def on_phase(phase: str, elapsed_s: float) -> None:
        phases.append((phase, elapsed_s))
        if [name for name, _ in phases].count("compile") == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_compile_process(endless, f'"{tmp_path / "pid"}"', 1, CompileWatch(on_phase, note_s=0.1))
    assert [name for name, _ in phases][-3:] == ["compile"] * 3
    times = [elapsed_s for _, elapsed_s in phases]
    assert times == sorted(times)
    assert not is_running(int((tmp_path / "pid").read_text()))


def test_limit_ends_the_process_and_names_its_phase(endless: str, tmp_path: Path):
    with pytest.raises(
        PrepError, match=r"the step was not compiled within 0\.01 s - its last phase was `"
    ) as caught:
        run_compile_process(endless, f'"{tmp_path / "pid"}"', 1, CompileWatch(limit_s=0.01))
    assert "--compile-timeout" in caught.value.hint


def test_process_ends_with_its_killed_parent(endless: str, tmp_path: Path):
    script = f"""
from trainer.distributed.compilation import CompileWatch, run_compile_process
run_compile_process({endless!r}, {f'"{tmp_path / "pid"}"'!r}, 1, CompileWatch(lambda *phase: print(*phase, flush=True)))
"""
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        assert parent.poll() is None
    parent.send_signal(signal.SIGKILL)
    parent.communicate()
    pid = int((tmp_path / "pid").read_text())
    while is_running(pid):
        pass
