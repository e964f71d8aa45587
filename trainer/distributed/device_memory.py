"""Memory in use on the devices of this process."""

from __future__ import annotations

from trainer.distributed.sharding import ShardingContext


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
