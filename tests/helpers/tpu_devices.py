"""Fake devices of a TPU slice, with the attributes that JAX places devices by.

`test_fake_devices_match_libtpu` compares them with the devices that libtpu describes.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from prepcli.launch.hardware import TPU_GENERATIONS

# Chips of a host along x, and along y.
HOST_BOUND = 2


@dataclass(frozen=True)
class FakeTpu:
    """A device of a TPU slice."""

    id: int
    process_index: int
    coords: tuple[int, int, int]
    core_on_chip: int
    device_kind: str
    platform: str = "tpu"


def make_tpu_devices(topology: str) -> list[FakeTpu]:
    """Return the devices of a slice, host by host.

    Args:
        topology: A generation and its chips per dimension, such as `v5p:4x4x8`.
    """
    name, _, shape = topology.partition(":")
    generation = TPU_GENERATIONS[name]
    bounds = [int(size) for size in shape.split("x")]
    x_chips, y_chips, z_chips = [*bounds, 1][:3]
    cores, host_x, host_y = (
        generation.devices_per_chip,
        min(HOST_BOUND, x_chips),
        min(HOST_BOUND, y_chips),
    )
    devices = list[FakeTpu]()
    hosts = product(range(z_chips), range(0, y_chips, host_y), range(0, x_chips, host_x))
    for process_index, (z, first_y, first_x) in enumerate(hosts):
        for dy, dx, core in product(range(host_y), range(host_x), range(cores)):
            x, y = first_x + dx, first_y + dy
            number = ((z * y_chips + y) * x_chips + x) * cores + core
            devices.append(FakeTpu(number, process_index, (x, y, z), core, generation.jax_kind))
    return devices
