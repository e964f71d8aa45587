"""The kind of the devices of a run, and the memory in use on them."""

from __future__ import annotations

from typing import Any

from prepcli.models.attention_kernels import DeviceKind
from trainer.distributed.devices import local_devices
from trainer.distributed.sharding import ShardingContext


def device_kind(sharding: ShardingContext) -> DeviceKind:
    """Return the kind of devices in a mesh. Without a mesh it is the kind of JAX's default device."""
    mesh = sharding.device_mesh
    return kind_of_device(local_devices()[0] if mesh is None else mesh.devices.flat[0])


def kind_of_device(device: Any) -> DeviceKind:
    """Return the kind of a JAX device. JAX calls all GPUs `gpu`."""
    if device.platform != "gpu":
        return DeviceKind(device.platform)
    if "cuda" not in device.client.platform_version:
        return DeviceKind("rocm")
    major, _, minor = str(getattr(device, "compute_capability", "")).partition(".")
    is_known = major.isdecimal() and minor.isdecimal()
    return DeviceKind("cuda", (int(major), int(minor)) if is_known else None)


def peak_memory_nbytes(sharding: ShardingContext) -> int | None:
    """Return the highest memory in use on a device of this process since its start.

    None if the devices do not count it, as CPUs do not.
    """
    if sharding.device_mesh is None:
        return None
    stats = [device.memory_stats() or {} for device in sharding.device_mesh.local_devices]
    peaks = [
        int(device_stats["peak_bytes_in_use"])
        for device_stats in stats
        if "peak_bytes_in_use" in device_stats
    ]
    return max(peaks, default=None)
