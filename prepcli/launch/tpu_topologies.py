"""Generations of TPUs and their slices, as data from their vendor.

A slice of v5e or v6e is a rectangle of at most one pod. A slice of v4, v5p or tpu7x is a box A x B
x C with A <= B <= C. With more than 64 chips, each side is a multiple of 4. Of several boxes with
the same number of chips, Google Cloud names the one closest to a cube.

Sources: Cloud TPU docs, "TPU v2", "TPU v3", "TPU v4", "TPU v5e", "TPU v5p", "TPU v6e" and "TPU7x":
    supported configurations (https://docs.cloud.google.com/tpu/docs/v5p and its sibling pages).
    GKE docs, "Plan TPUs in GKE": labels of nodes, and chips of a machine type.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from prepcli.core.errors import PrepError, usage_error

_RECTANGLES = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_BOXES = (
    *("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8", "8x8x16"),
    *("8x16x16", "16x16x16"),
)
_V2_SLICES = ("2x2", "4x4", "8x8", "8x16", "16x16")
_V3_SLICES = ("2x2", "4x4", "4x8", "8x8", "8x16", "16x16", "16x32", "32x32")
_UBUNTU = "tpu-ubuntu2204-base"
# Larger boxes consist of cubes of 4 x 4 x 4 chips.
_CUBE_SIDE = 4
# Chips of each machine of a slice with several hosts.
HOST_CHIPS = 4


@dataclass(frozen=True, slots=True)
class TpuGeneration:
    """A generation of TPUs.

    Attributes:
        name: Name in `--devices` and in the topologies of libtpu.
        jax_kind: `device_kind` of its devices in JAX.
        slices: The most common slices, by ascending number of chips.
        devices_per_chip: Devices in JAX of each chip.
        gke_label: Value of the node label `cloud.google.com/gke-tpu-accelerator`. Empty if GKE
            does not have the generation.
        type_prefix: Prefix of accelerator types of TPU VMs, such as `v5litepod`. Empty if only GKE
            has the generation.
        type_units: Units per chip in the number of an accelerator type: 2 if it counts cores, 1 if
            it counts chips.
        runtime_version: Software of TPU VMs.
    """

    name: str
    jax_kind: str
    slices: tuple[str, ...]
    devices_per_chip: int = 1
    gke_label: str = ""
    type_prefix: str = ""
    type_units: int = 1
    runtime_version: str = ""

    @property
    def has_3d_slices(self) -> bool:
        """Whether slices have three dimensions."""
        return self.slices[0].count("x") == 2

    @property
    def max_chips(self) -> int:
        """Number of chips of the largest slice."""
        return num_chips(self.slices[-1])

    def has_slice(self, shape: str) -> bool:
        """Return whether there is a slice of this shape, such as `4x4x8`."""
        if shape in self.slices:
            return True
        if not self.has_3d_slices or not re.fullmatch(
            r"[1-9][0-9]{0,3}(x[1-9][0-9]{0,3}){2}", shape
        ):
            return False
        sides = [int(side) for side in shape.split("x")]
        are_cubes = all(side % _CUBE_SIDE == 0 for side in sides)
        return are_cubes and sides == sorted(sides) and math.prod(sides) <= self.max_chips

    def has_size(self, chips: int) -> bool:
        """Return whether there is a slice with a number of chips."""
        if chips in map(num_chips, self.slices):
            return True
        # E.g. 192 chips are the box 4x4x12, three cubes in a row, which no list contains.
        return self.has_3d_slices and chips % _CUBE_SIDE**3 == 0 and 0 < chips <= self.max_chips

    def node_sizes(self, shape: str) -> tuple[int, ...]:
        """Return how many chips a node of the slice may have, the most common number first."""
        chips = num_chips(shape)
        if chips <= HOST_CHIPS:
            return (chips,)
        if shape == "2x4":
            # v5e and v6e have machines with eight chips, and slices of two machines with four.
            return (HOST_CHIPS, chips)
        return (HOST_CHIPS,)


_GENERATIONS = (
    TpuGeneration(
        "v2", "TPU v2", _V2_SLICES, 2, type_prefix="v2", type_units=2, runtime_version=_UBUNTU
    ),
    TpuGeneration(
        "v3", "TPU v3", _V3_SLICES, 2, type_prefix="v3", type_units=2, runtime_version=_UBUNTU
    ),
    TpuGeneration(
        "v4",
        "TPU v4",
        _BOXES,
        gke_label="tpu-v4-podslice",
        type_prefix="v4",
        type_units=2,
        runtime_version=_UBUNTU,
    ),
    TpuGeneration(
        "v5e",
        "TPU v5 lite",
        _RECTANGLES,
        gke_label="tpu-v5-lite-podslice",
        type_prefix="v5litepod",
        runtime_version="v2-alpha-tpuv5-lite",
    ),
    TpuGeneration(
        "v5p",
        "TPU v5",
        (*_BOXES, "16x16x24"),
        gke_label="tpu-v5p-slice",
        type_prefix="v5p",
        type_units=2,
        runtime_version="v2-alpha-tpuv5",
    ),
    TpuGeneration(
        "v6e",
        "TPU v6 lite",
        _RECTANGLES,
        gke_label="tpu-v6e-slice",
        type_prefix="v6e",
        runtime_version="v2-alpha-tpuv6e",
    ),
    # Each of the two chiplets of a chip is a separate device. Only GKE has this generation.
    TpuGeneration(
        "tpu7x", "TPU7x", (*_BOXES, "16x16x24", "16x24x24"), devices_per_chip=2, gke_label="tpu7x"
    ),
)
TPU_GENERATIONS = {generation.name: generation for generation in _GENERATIONS}
# Software of a TPU VM by the generation in the name of its accelerator type.
RUNTIME_VERSIONS = {
    generation.type_prefix: generation.runtime_version
    for generation in _GENERATIONS
    if generation.type_prefix
}


def num_chips(shape: str) -> int:
    """Return the number of chips of a slice, e.g. 128 for `4x4x8`."""
    return math.prod(int(side) for side in shape.split("x"))


def find_topology(kind: str, num_devices: int) -> str:
    """Return the topology of a generation with a number of devices, e.g. `v5p:4x8x8` for 256 of `v5p`.

    Raises:
        UsageError: No slice has this number of devices.
    """
    generation = TPU_GENERATIONS[kind]
    slices = {num_chips(shape) * generation.devices_per_chip: shape for shape in generation.slices}
    if num_devices not in slices:
        raise _size_error(generation, num_devices, sorted(slices))
    return f"{kind}:{slices[num_devices]}"


def _size_error(generation: TpuGeneration, num_devices: int, sizes: list[int]) -> PrepError:
    """Return the error for a number of devices that no slice has. It names the next smaller and larger slice."""
    if generation.devices_per_chip == 1:
        unit = "chips"
    else:
        unit = f"devices, {generation.devices_per_chip} per chip"
    what = f"no slice of {generation.name} has {num_devices:,} {unit}"
    why = f"slices have {', '.join(f'{size:,}' for size in sizes[:-1])} or {sizes[-1]:,} {unit.partition(',')[0]}"
    nearest = " or ".join(f"{size:,}" for size in nearest_sizes(num_devices, sizes))
    return usage_error(what, why, f"use a mesh of {nearest} devices")


def nearest_sizes(number: int, sizes: list[int]) -> list[int]:
    """Return the next smaller and the next larger of ascending sizes, e.g. [16, 32] for 24."""
    below = [size for size in sizes if size < number][-1:]
    above = [size for size in sizes if size > number][:1]
    return [*below, *above]
