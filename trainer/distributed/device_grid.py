"""The devices of a mesh in the order of its axes: neighbours along an axis are near each other in the network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.experimental import mesh_utils

from prepcli.core.errors import Key, text, usage_error
from prepcli.models.mesh import DCN_KEY, ONE_SLICE, Mesh, SliceCounts, num_slices


def arrange_devices(
    mesh: Mesh, devices: Sequence[Any], slices: SliceCounts = ONE_SLICE
) -> np.ndarray:
    """Arrange devices in the shape of a mesh.

    The devices of a slice are placed by its topology, or in plain order if the mesh asks for it. Along an axis of n
    devices over s slices, each run of n / s devices is in one slice.

    Args:
        mesh: The mesh, without an axis of size -1.
        devices: The devices, slice by slice.
        slices: Number of slices along each axis.

    Returns:
        Array of devices with the shape of the mesh.

    Raises:
        UsageError: The devices are not in that number of slices.
    """
    if not slices and (mesh.plain_order or devices[0].platform != "tpu"):
        # The runtime of GPUs counts each host as a slice. Only TPUs of several slices have no common topology.
        return _arrange_slice(mesh.sizes, devices, plain_order=mesh.plain_order)
    groups = _devices_by_slice(devices, num_slices(slices))
    outer = [slices.get(axis, 1) for axis in mesh.names]
    inner = [size // count for size, count in zip(mesh.sizes, outer)]
    grids = np.empty((len(groups), *inner), object)
    for number, group in enumerate(groups):
        grids[number] = _arrange_slice(inner, group, plain_order=mesh.plain_order)
    # Put each inner axis after its outer one: along an axis, a slice ends before the next begins.
    # E.g. the mesh dp 4, mp 2 over 2 slices along dp: [2, 1, 2, 2] -> [2, 2, 1, 2] -> [4, 2].
    axes: list[int] = []
    for axis in range(len(outer)):
        axes += [axis, len(outer) + axis]
    return grids.reshape(*outer, *inner).transpose(axes).reshape(mesh.sizes)


def _arrange_slice(
    shape: Sequence[int], devices: Sequence[Any], *, plain_order: bool
) -> np.ndarray:
    """Arrange the devices of one slice in a shape.

    `jax.make_mesh` (jax 0.10.2) splits a physical axis over several mesh axes on v5e alone. On a v6e of 16x16 it
    therefore refuses 64,4. Shapes that need no split get the same order from both functions.
    """
    # The network of a slice is a torus, e.g. [16, 16]. Without a split each mesh axis is a product of
    # whole physical axes. The mesh 64,4 needs 64 = 16 * 4: one physical axis and a part of the other.
    if plain_order:
        return np.array(devices).reshape(shape)
    return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)


def _devices_by_slice(devices: Sequence[Any], count: int) -> list[list[Any]]:
    """Divide devices by their slice.

    The runtime of GPUs reports each host, or each group of hosts with NVLink, as a slice. A slice
    of the recipe may consist of several of these. The devices are then divided in order, by whole
    hosts. Devices of a runtime with a single slice are divided in the same way.
    """
    by_index: dict[int, list[Any]] = {}
    for device in devices:
        by_index.setdefault(getattr(device, "slice_index", None) or 0, []).append(device)
    sizes = {len(group) for group in by_index.values()}
    if len(by_index) == count and len(sizes) == 1:
        return [by_index[index] for index in sorted(by_index)]
    if len(by_index) == 1 or devices[0].platform != "tpu":
        return _devices_by_hosts(devices, count)
    what = f"`{DCN_KEY}` has {count} slice{'s' if count > 1 else ''}"
    hint = text("{}", Key(DCN_KEY, f"dp:{len(by_index)}", is_override=True))
    raise usage_error(what, f"the devices form {len(by_index)} slices", hint)


def _devices_by_hosts(devices: Sequence[Any], count: int) -> list[list[Any]]:
    """Divide devices in order into groups of whole hosts, or the devices of one host into equal groups."""
    size = len(devices) // count
    groups = [list(devices[start : start + size]) for start in range(0, len(devices), size)]
    hosts: list[set[int]] = []
    for group in groups:
        hosts.append({device.process_index for device in group})
    num_hosts = len(set().union(*hosts))
    # The sum counts a host once per group, e.g. 4 for the groups {0, 1} and {1, 2} of 3 hosts. It
    # equals the number of hosts only if no host is in two groups.
    if num_hosts == 1 or sum(map(len, hosts)) == num_hosts:
        return groups
    what = f"`{DCN_KEY}` has {count} slices of {size} devices"
    raise usage_error(
        what, "a host would be in two slices", "use a number of slices that divides the hosts"
    )
