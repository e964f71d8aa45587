"""Fills shards on accelerators slab by slab, so that host memory holds two slabs instead of whole shards."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import SingleDeviceSharding

from trainer.distributed.exchange import allocation_program
from trainer.models.boxes import Box, intersection
from trainer.models.checkpoint_store import CheckpointReader
from trainer.models.read_plan import aligned_slabs

# Bytes of the slabs of all devices of a process together
SLAB_NBYTES = 32 << 20
MIN_FILLED_NBYTES = 2 * SLAB_NBYTES  # smaller leaves are read as a whole

Allocate = Callable[[Sequence[int], np.dtype], np.ndarray]


def copies_host_arrays(devices: Sequence[Any]) -> bool:
    """Return whether arrays of these devices are copies of host arrays. A CPU device uses an aligned host array."""
    return any(device.platform != "cpu" for device in devices)


def fill_shards(
    reader: CheckpointReader,
    name: str,
    *,
    boxes: Mapping[Any, Box],
    dtype: np.dtype,
    unit: Sequence[int],
    allocate: Allocate,
) -> list[jax.Array]:
    """Read shards of a leaf in slabs of whole read units, and copy each slab to the devices.

    A slab has at least one unit. A unit may be a whole tensor, for the comparison with its digest.

    Args:
        reader: The open checkpoint.
        name: Name of the leaf.
        boxes: Box of the leaf of each device. Replicas share one read.
        dtype: Dtype of the shards.
        unit: Shape of the boxes of the leaf that are read together.
        allocate: Allocates a host buffer of a shape and dtype.

    Returns:
        The shard of each device.
    """
    shards = {
        device: allocation_program(_extents(box), dtype, SingleDeviceSharding(device))()
        for device, box in boxes.items()
    }
    bounds = tuple(
        (min(low for low, _ in spans), max(high for _, high in spans))
        for spans in zip(*boxes.values())
    )
    for slab in aligned_slabs(bounds, unit, SLAB_NBYTES // dtype.itemsize):
        parts = {box: intersection(box, slab) for box in dict.fromkeys(boxes.values())}
        buffers = {
            part: allocate(_extents(part), dtype)
            for part in parts.values()
            if math.prod(_extents(part))
        }
        if not buffers:
            continue
        reader.read(name, buffers)
        # The copy of the last slab ran during this read. The wait bounds the slabs in memory to
        # two.
        jax.block_until_ready(list(shards.values()))
        for device, box in boxes.items():
            if (part := parts[box]) in buffers:
                start = np.array(
                    [low - origin for (low, _), (origin, _) in zip(part, box)], np.int32
                )
                shards[device] = _update_program()(
                    shards[device], jax.device_put(buffers[part], device), start
                )
    return list(shards.values())


@lru_cache(maxsize=1)
def _update_program() -> Callable[[jax.Array, jax.Array, np.ndarray], jax.Array]:
    """Return the program that copies a part into a shard, and donates the shard.

    It is compiled for each pair of shapes.
    """

    def update(shard: jax.Array, part: jax.Array, start: jax.Array) -> jax.Array:
        return lax.dynamic_update_slice(shard, part, [start[dim] for dim in range(shard.ndim)])

    return jax.jit(update, donate_argnums=0)


def _extents(box: Box) -> tuple[int, ...]:
    return tuple(high - low for low, high in box)
