"""The devices, shards and hosts of the processes of a job."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, Sharding

from prepcli.algebra.boxes import Box
from prepcli.core.errors import PrepError
from trainer.distributed.hosts import kernel_id


def has_several_processes() -> bool:
    """Return whether the job has more than one process."""
    return jax.process_count() > 1


def should_exchange_reads(is_remote: bool, layout_digest: int) -> bool:
    """Return whether the processes should read each byte once and exchange it. All processes call this together.

    It is true if a process reads from a server, or if the processes run on several kernels. Containers of one host
    have one kernel, and share its page cache.

    Args:
        is_remote: Whether the checkpoint of this process is on a server.
        layout_digest: Digest of the leaves of this process's checkpoint.

    Raises:
        PrepError: The processes have checkpoints of different layouts, and would run different programs.
    """
    own = np.array([zlib.crc32(kernel_id().encode()), is_remote, layout_digest], np.uint32)
    kernels, remote, layouts = multihost_utils.process_allgather(own).T
    if np.unique(layouts).size > 1:
        why = "leaves, dtypes or digests of their checkpoints differ"
        raise PrepError(
            "the processes cannot load together",
            why,
            "use the same `model.path` and files on all hosts",
        )
    return bool(remote.any()) or np.unique(kernels).size > 1


def local_coordinates(sharding: NamedSharding) -> dict[Any, dict[str, int]]:
    """Return the mesh coordinates of each device of this process."""
    mesh = sharding.mesh
    process = jax.process_index()
    return {
        device: dict(zip(mesh.axis_names, position, strict=True))
        for position, device in np.ndenumerate(mesh.devices)
        if device.process_index == process
    }


def local_boxes(sharding: Sharding, shape: tuple[int, ...]) -> dict[Any, Box]:
    """Return the box of an array's shard on each device of this process."""
    indices = sharding.addressable_devices_indices_map(shape)
    return {device: index_box(index or (), shape) for device, index in indices.items()}


def boxes_by_process(sharding: Sharding, shape: tuple[int, ...]) -> dict[int, set[Box]]:
    """Return the boxes of an array's shards on the devices of each process."""
    boxes: dict[int, set[Box]] = {}
    for device, index in sharding.devices_indices_map(shape).items():
        boxes.setdefault(device.process_index, set()).add(index_box(index or (), shape))
    return boxes


def index_box(index: Sequence[slice], shape: Sequence[int]) -> Box:
    """Convert the index of a shard, as JAX gives it, to the box of its elements."""
    return tuple(
        axis_slice.indices(extent)[:2] for axis_slice, extent in zip(index, shape, strict=True)
    )
