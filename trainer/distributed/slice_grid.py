"""The devices of several slices in the order of a mesh: neighbours along an axis share a slice where they can."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.experimental import mesh_utils

from trainer.models.errors import usage_error
from trainer.models.mesh import Mesh
from trainer.models.slices import DCN_KEY, SliceCounts, num_slices


def slice_grid(mesh: Mesh, devices: Sequence[Any], slices: SliceCounts) -> np.ndarray:
    """Arrange devices of several slices in the shape of a mesh.

    Along an axis of n devices over s slices, each run of n / s devices is in one slice. The devices of a slice are
    placed by its topology, or in plain order if the mesh asks for it.

    Args:
        mesh: The mesh, without an open axis.
        devices: The devices, those of one slice one after another.
        slices: Number of slices along each axis.

    Returns:
        Array of devices with the shape of the mesh.

    Raises:
        UsageError: The devices are not in that number of slices.
    """
    groups = _devices_by_slice(devices, num_slices(slices))
    outer = [slices.get(axis, 1) for axis in mesh.names]
    inner = [size // count for size, count in zip(mesh.sizes, outer)]
    grids = np.empty((len(groups), *inner), object)
    for number, group in enumerate(groups):
        grids[number] = np.array(group).reshape(inner) if mesh.plain_order else _place(inner, group)
    axes = [axis for pair in zip(range(len(outer)), range(len(outer), 2 * len(outer))) for axis in pair]
    return grids.reshape(*outer, *inner).transpose(axes).reshape(mesh.sizes)


def _place(shape: Sequence[int], devices: Sequence[Any]) -> np.ndarray:
    return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)


def _devices_by_slice(devices: Sequence[Any], count: int) -> list[list[Any]]:
    """Divide devices by their slice; devices whose runtime reports one slice are divided in order, by whole hosts."""
    by_index: dict[int, list[Any]] = {}
    for device in devices:
        by_index.setdefault(getattr(device, "slice_index", None) or 0, []).append(device)
    if len(by_index) == 1:
        size = len(devices) // count
        groups = [list(devices[start : start + size]) for start in range(0, len(devices), size)]
        hosts = [{device.process_index for device in group} for group in groups]
        if len(set().union(*hosts)) == 1 or sum(map(len, hosts)) == len(set().union(*hosts)):
            return groups
        what = f"`{DCN_KEY}` has {count} slices of {size} devices"
        raise usage_error(what, "a host would be in two slices", "a number of slices that divides the hosts")
    sizes = {len(group) for group in by_index.values()}
    if len(by_index) != count or len(sizes) != 1:
        what, why = f"`{DCN_KEY}` has {count} slices", f"the devices are in {len(by_index)}"
        raise usage_error(what, why, f"`--set {DCN_KEY}=dp:{len(by_index)}`")
    return [by_index[index] for index in sorted(by_index)]
