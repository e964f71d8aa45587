"""Fill shards on accelerators in row blocks (ranges of rows). Host memory holds two of them instead of whole shards."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import SingleDeviceSharding

from trainer.distributed.exchange import compile_allocation
from trainer.models.boxes import Box, intersection, volume
from trainer.models.checkpoint_store import CheckpointReader
from trainer.models.read_plan import aligned_row_blocks

# Bytes of the row blocks of all devices of a process together
BLOCK_NBYTES = 32 << 20
MIN_FILLED_NBYTES = 2 * BLOCK_NBYTES  # smaller leaves are read as a whole

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
    """Read shards of a leaf in row blocks of whole read units, and copy each block to the devices.

    A block has at least one unit. A unit may be a whole tensor, for the comparison with its digest.

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
    shards: dict[Any, jax.Array] = {}
    for device, box in boxes.items():
        allocation = compile_allocation(_box_extents(box), dtype, SingleDeviceSharding(device))
        shards[device] = allocation()
    for block in aligned_row_blocks(
        _bounding_box(boxes.values()), unit, BLOCK_NBYTES // dtype.itemsize
    ):
        parts: dict[Box, Box] = {}
        buffers: dict[Box, np.ndarray] = {}
        for box in boxes.values():
            part = intersection(box, block)
            parts[box] = part
            if volume(part) and part not in buffers:
                buffers[part] = allocate(_box_extents(part), dtype)
        # The bounds also cover the gaps between boxes, where no device needs anything.
        if not buffers:
            continue
        reader.read(name, buffers)
        # The copy of the last block ran during this read. The wait bounds the blocks in memory to
        # two.
        jax.block_until_ready(list(shards.values()))
        for device, box in boxes.items():
            part = parts[box]
            if part in buffers:
                # E.g. the part ((6, 8), (0, 4)) of the box ((4, 8), (0, 4)) starts at [2, 0] of it.
                offsets = [low - origin for (low, _), (origin, _) in zip(part, box)]
                start = np.array(offsets, np.int32)
                shards[device] = _update_program()(
                    shards[device], jax.device_put(buffers[part], device), start
                )
    return list(shards.values())


def _bounding_box(boxes: Collection[Box]) -> Box:
    """Return the smallest box that contains all boxes, e.g. ((0, 2),) and ((4, 6),) -> ((0, 6),)."""
    bounds: list[tuple[int, int]] = []
    for ranges in zip(*boxes):
        starts, stops = zip(*ranges)
        bounds.append((min(starts), max(stops)))
    return tuple(bounds)


@lru_cache(maxsize=1)
def _update_program() -> Callable[[jax.Array, jax.Array, np.ndarray], jax.Array]:
    """Return the program that copies a part into a shard, and donates the shard.

    It is compiled for each pair of shapes.
    """

    def update(shard: jax.Array, part: jax.Array, start: jax.Array) -> jax.Array:
        return lax.dynamic_update_slice(shard, part, [start[dim] for dim in range(shard.ndim)])

    return jax.jit(update, donate_argnums=0)


def _box_extents(box: Box) -> tuple[int, ...]:
    return tuple(high - low for low, high in box)
