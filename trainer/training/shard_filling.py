"""Load the shards of a process without an exchange.

A CPU device takes a host array over. Shards on accelerators are filled in row blocks (ranges of rows): host memory
holds a few of them instead of whole shards.
"""

from __future__ import annotations

import math
import mmap
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import Sharding, SingleDeviceSharding

from prepcli.algebra.boxes import Box, intersection, slices, volume
from trainer.distributed.exchange import compile_allocation
from trainer.distributed.process_shards import local_boxes
from trainer.distributed.read_plan import aligned_row_blocks
from trainer.training.read_ahead import LeafRead

# Alignment of host buffers: direct I/O reads into them, and a CPU device takes them over without a copy.
ALIGNMENT_NBYTES = 4096
# Bytes of the row blocks of all devices of a process together
BLOCK_NBYTES = 32 << 20
MIN_FILLED_NBYTES = 2 * BLOCK_NBYTES  # smaller leaves are read as a whole
# Row blocks of host arrays that are read ahead. Several of them are under way at once.
HOST_BLOCK_NBYTES = 16 << 20


def copies_host_arrays(devices: Sequence[Any]) -> bool:
    """Return whether arrays of these devices are copies of host arrays. A CPU device uses an aligned host array."""
    return any(device.platform != "cpu" for device in devices)


class DirectLoad:
    """A load of the shards of this process. Replicas share one read.

    A block has at least one read unit. A unit may be a whole tensor, for the comparison with its digest.
    """

    def __init__(
        self,
        name: str,
        target: jax.ShapeDtypeStruct,
        sharding: Sharding,
        *,
        unit: Sequence[int],
        is_remote: bool,
    ) -> None:
        """Choose between host arrays and row blocks.

        Args:
            name: Name of the leaf.
            target: Shape and dtype.
            sharding: Sharding on the devices of all processes.
            unit: Shape of a read unit of the leaf.
            is_remote: Whether requests of several row blocks should be under way at once.
        """
        self._name = name
        self._shape = target.shape
        self._dtype = target.dtype
        self._sharding = sharding
        self._unit = unit
        self._boxes = local_boxes(sharding, target.shape)
        self._is_remote = is_remote
        nbytes = sum(volume(box) for box in set(self._boxes.values())) * self._dtype.itemsize
        self._is_filled = nbytes > MIN_FILLED_NBYTES and copies_host_arrays([*self._boxes])
        # Host array of each distinct box. Empty if the shards are filled in blocks.
        self._arrays: dict[Box, np.ndarray] = {}
        # Shard of each device, and the boxes of the blocks in the order of their reads.
        self._shards: dict[Any, jax.Array] = {}
        self._blocks = deque[Box]()

    def reads(self) -> Iterator[LeafRead]:
        """Yield the reads of this process."""
        if self._is_filled:
            yield from self._filled_blocks()
            return
        for box in self._boxes.values():
            if box not in self._arrays:
                self._arrays[box] = self._empty(box)
        whole = LeafRead(self._name, self._arrays)
        if self._is_remote and whole.nbytes > HOST_BLOCK_NBYTES:
            yield from self._host_blocks(whole)
        else:
            yield whole

    def _host_blocks(self, whole: LeafRead) -> Iterator[LeafRead]:
        """Divide the read of all host arrays into row blocks, if each is contiguous in its array."""
        reads: list[LeafRead] = []
        for block in self._row_blocks(HOST_BLOCK_NBYTES):
            parts: dict[Box, np.ndarray] = {}
            for box, array in self._arrays.items():
                part = intersection(box, block)
                if volume(part):
                    parts[part] = array[slices(part, box)]
            # If the read unit ends within a row of the array, blocks are no byte ranges of it.
            if not all(array.flags.c_contiguous for array in parts.values()):
                yield whole
                return
            reads.append(LeafRead(self._name, parts))
        yield from reads

    def _filled_blocks(self) -> Iterator[LeafRead]:
        """Allocate the shards, and yield the reads of all blocks."""
        for device, box in self._boxes.items():
            allocation = compile_allocation(
                box_extents(box), self._dtype, SingleDeviceSharding(device)
            )
            self._shards[device] = allocation()
        for block in self._row_blocks(BLOCK_NBYTES):
            arrays: dict[Box, np.ndarray] = {}
            for box in self._boxes.values():
                part = intersection(box, block)
                if volume(part) and part not in arrays:
                    arrays[part] = self._empty(part)
            # The bounds also cover the gaps between boxes, where no device needs anything.
            if arrays:
                self._blocks.append(block)
                yield LeafRead(self._name, arrays)

    def _empty(self, box: Box) -> np.ndarray:
        return empty_aligned(box_extents(box), self._dtype, is_remote=self._is_remote)

    def _row_blocks(self, nbytes: int) -> Iterator[Box]:
        bounds = _bounding_box(self._boxes.values())
        return aligned_row_blocks(bounds, self._unit, nbytes // self._dtype.itemsize)

    def add(self, read: LeafRead) -> None:
        """Copy the arrays of a block to the shards."""
        if not self._is_filled:
            return
        block = self._blocks.popleft()
        # The copy of the last block ran during this read. The wait bounds the copied blocks in memory to
        # two.
        jax.block_until_ready(list(self._shards.values()))
        for device, box in self._boxes.items():
            part = intersection(box, block)
            if part in read.arrays:
                # E.g. the part ((6, 8), (0, 4)) of the box ((4, 8), (0, 4)) starts at [2, 0] of it.
                offsets = [low - origin for (low, _), (origin, _) in zip(part, box)]
                self._shards[device] = _update_program()(
                    self._shards[device],
                    jax.device_put(read.arrays[part], device),
                    np.array(offsets, np.int32),
                )

    def finish(self) -> jax.Array:
        """Return the leaf."""
        if not self._is_filled:
            for device, box in self._boxes.items():
                self._shards[device] = jax.device_put(self._arrays[box], device)
        shards = [*self._shards.values()]
        # The load outlives its leaf, which the caller may convert and drop.
        self._shards.clear()
        self._arrays.clear()
        return jax.make_array_from_single_device_arrays(self._shape, self._sharding, shards)


def _bounding_box(boxes: Collection[Box]) -> Box:
    """Return the smallest box around all boxes, e.g. ((0, 2),) and ((4, 6),) -> ((0, 6),)."""
    bounds: list[tuple[int, int]] = []
    for ranges in zip(*boxes):
        starts, stops = zip(*ranges)
        bounds.append((min(starts), max(stops)))
    return tuple(bounds)


@lru_cache(maxsize=1)
def _update_program() -> Callable[[jax.Array, jax.Array, np.ndarray], jax.Array]:
    """Return a program to copy a part into a shard. The shard is donated.

    It is compiled for each pair of shapes.
    """

    def update(shard: jax.Array, part: jax.Array, start: jax.Array) -> jax.Array:
        return lax.dynamic_update_slice(shard, part, [start[dim] for dim in range(shard.ndim)])

    return jax.jit(update, donate_argnums=0)


def box_extents(box: Box) -> tuple[int, ...]:
    """Return the shape of a box."""
    return tuple(high - low for low, high in box)


def empty_aligned(shape: Iterable[int], dtype: np.dtype, *, is_remote: bool) -> np.ndarray:
    """Allocate an uninitialised array at a multiple of ALIGNMENT_NBYTES.

    Args:
        shape: Its shape.
        dtype: Its dtype.
        is_remote: Whether its bytes come from a server.
    """
    shape = tuple(shape)
    nbytes = math.prod(shape) * dtype.itemsize
    if is_remote:
        # Small pages. NumPy asks for huge ones, which help direct I/O. On a virtual machine that returns
        # free huge pages to its host, their faults took 2 of 3 CPU seconds of a load of 1.3 GB.
        pages = mmap.mmap(-1, max(1, nbytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return np.frombuffer(pages, np.uint8, nbytes).view(dtype).reshape(shape)
    raw = np.empty(nbytes + ALIGNMENT_NBYTES, np.uint8)
    # Bytes up to the next multiple: an address of 4096 * k + 16 gives 4080, an aligned one gives 0.
    start = -raw.ctypes.data % ALIGNMENT_NBYTES
    return raw[start : start + nbytes].view(dtype).reshape(shape)
