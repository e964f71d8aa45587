"""Commands and the nodes of their jobs. The commands of `prep launch` show the checks of meshes."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from prepcli.core.errors import USAGE, PrepError, UsageError
from prepcli.launch.hardware import (
    TPU_GENERATIONS,
    TpuGeneration,
    check_hardware,
    find_topology,
    num_chips,
    plain_hardware,
)
from prepcli.launch.job import LaunchedCommand
from tests.helpers.tpu_devices import FakeTpu, make_tpu_devices
from trainer.planning.step_time import ACCELERATORS


@pytest.mark.parametrize(
    ("name", "has_shares"), [("train", False), ("eval", False), ("reshard", True)]
)
def test_processes_divide_trainings_and_conversions(name: str, has_shares: bool):
    command = LaunchedCommand(name=name, has_shares=has_shares)
    check_hardware(command, None, plain_hardware(4, None))


def test_processes_of_other_commands_are_refused():
    command = LaunchedCommand(name="inspect", arguments=("model",))
    check_hardware(command, None, plain_hardware(1, None))
    with pytest.raises(UsageError, match="`prep inspect` runs in one process") as caught:
        check_hardware(command, None, plain_hardware(2, None, option="workers"))
    assert caught.value.hint == "`--workers 1`"


@pytest.mark.parametrize(
    ("kind", "num_chips", "topology"),
    [
        ("v5p", 256, "v5p:4x8x8"),
        ("v4", 4, "v4:2x2x1"),
        ("v5e", 1, "v5e:1x1"),
        ("v6e", 256, "v6e:16x16"),
    ],
)
def test_slices_are_found_by_number_of_chips(kind: str, num_chips: int, topology: str):
    assert find_topology(kind, num_chips) == topology


@pytest.mark.parametrize(
    "generation", TPU_GENERATIONS.values(), ids=lambda generation: generation.name
)
def test_slices_of_a_kind_differ_in_size_and_fit_a_pod(generation: TpuGeneration):
    sizes = [num_chips(shape) for shape in generation.slices]
    assert sizes == sorted(set(sizes))
    assert all(generation.has_slice(shape) for shape in generation.slices)
    if kind := ACCELERATORS.get(generation.name):
        assert sizes[-1] * generation.devices_per_chip <= kind.domain_size


@pytest.mark.parametrize(
    ("kind", "shape", "exists"),
    [
        ("v5p", "4x4x12", True),
        ("v5p", "4x4x4x4", False),
        ("v5p", "8x4x4", False),
        ("v5p", "2x4x8", False),
        ("v5p", "16x16x28", False),
        ("v4", "16x16x24", False),
        ("v6e", "4x4", True),
        ("v6e", "4x16", False),
        ("v6e", "four", False),
    ],
)
def test_boxes_of_whole_cubes_are_slices(kind: str, shape: str, exists: bool):
    assert TPU_GENERATIONS[kind].has_slice(shape) == exists


def test_a_chip_of_tpu7x_is_two_devices():
    assert find_topology("tpu7x", 256) == "tpu7x:4x4x8"
    with pytest.raises(PrepError, match="no slice of tpu7x has 24 devices, 2 per chip") as caught:
        find_topology("tpu7x", 24)
    assert caught.value.hint == "use a mesh of 16 or 32 devices"


@pytest.mark.parametrize(
    ("kind", "num_chips", "nearest"),
    [("v5p", 2, "4"), ("v5e", 24, "16 or 32"), ("v6e", 512, "256"), ("v5p", 7000, "6,144")],
)
def test_errors_name_the_nearest_slices(kind: str, num_chips: int, nearest: str):
    with pytest.raises(
        PrepError, match=rf"^no slice of {kind} has {num_chips:,} chips - slices have "
    ) as caught:
        find_topology(kind, num_chips)
    assert caught.value.hint == f"use a mesh of {nearest} devices"
    assert caught.value.code == USAGE


@pytest.mark.skipif(find_spec("libtpu") is None, reason="needs the extra `tpu`")
@pytest.mark.slow
@pytest.mark.parametrize(
    "generation", TPU_GENERATIONS.values(), ids=lambda generation: generation.name
)
def test_fake_devices_match_libtpu(generation: TpuGeneration):
    from trainer.distributed.devices import tpu_devices

    for shape in generation.slices:
        topology = f"{generation.name}:{shape}"
        described = [
            FakeTpu(
                device.id,
                device.process_index,
                tuple(device.coords),
                device.core_on_chip,
                device.device_kind,
            )
            for device in tpu_devices(topology)
        ]
        assert described == make_tpu_devices(topology)
