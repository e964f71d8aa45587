"""Load leaves of a checkpoint onto devices. Each process reads all its parts, or processes exchange parts."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, Sharding

from trainer.distributed.exchange import (
    compile_allocation,
    compile_block_update,
    compile_broadcast,
    exchange_dtype,
    part_sharding,
    sharded_leaf,
)
from trainer.distributed.process_shards import (
    boxes_by_process,
    has_several_processes,
    local_boxes,
    local_coordinates,
    should_exchange_reads,
)
from trainer.models.boxes import Box, volume
from trainer.models.checkpoint_store import CheckpointReader, LeafSpec
from trainer.models.errors import PrepError
from trainer.models.read_plan import LeafBlock, ReadPlan, ShardedLeaf, choose_read_plan, read_ratio
from trainer.training import shard_filling

# Alignment of host buffers: direct I/O reads into them, and a CPU device takes them over without a copy.
ALIGNMENT_NBYTES = 4096
# Bytes that all processes read directly, per byte of the leaf. Above it the leaf is exchanged.
MAX_READ_RATIO = 1.01
CHECKPOINT_HINT = "use a checkpoint of the model and the optimizer of this run"


def exchange_is_faster(reader: CheckpointReader) -> bool:
    """Return whether bytes that several processes need should be read once and exchanged over the devices.

    On one host the page cache already shares the reads of local files, and a copy out of it is faster than an exchange.
    Hosts have no common page cache. A shared file system, a hub or a bucket would send the same bytes to each of them,
    over a slower network than the network between devices. All processes call this together.
    """
    if not has_several_processes():
        return False
    return should_exchange_reads(reader.is_remote, _layout_digest(reader))


def _layout_digest(reader: CheckpointReader) -> int:
    """Return a digest of the shape, dtype and read unit of each leaf, which choose the loading programs."""
    leaves: list[tuple[str, tuple[int, ...], str, tuple[int, ...]]] = []
    for name, spec in sorted(reader.leaves.items()):
        leaves.append((name, spec.shape, spec.dtype, spec.read_unit))
    return zlib.crc32(repr(leaves).encode())


@dataclass(frozen=True, slots=True)
class LeafLoader:
    """Loads leaves of a checkpoint. All processes load the same leaves in the same order.

    Attributes:
        reader: The open checkpoint.
        exchanges: Read each byte once in the whole job. Otherwise each process reads all that its devices need.
    """

    reader: CheckpointReader
    exchanges: bool

    def load(self, name: str, target: jax.ShapeDtypeStruct) -> jax.Array:
        """Load one leaf with the shape, dtype and sharding of `target`.

        Raises:
            PrepError: The leaf is missing in the checkpoint, or it has another shape.
        """
        spec = _checked_spec(name, self.reader.leaves.get(name), target.shape)
        sharding = target.sharding
        assert isinstance(sharding, Sharding)
        if not self.exchanges or not isinstance(sharding, NamedSharding):
            return self._load_directly(name, target, sharding)
        # Processes that need different bytes of a leaf have no common bytes to exchange.
        unit = spec.read_unit or (1,) * len(spec.shape)
        boxes = boxes_by_process(sharding, target.shape)
        if read_ratio(boxes, target.shape, unit) <= MAX_READ_RATIO:
            return self._load_directly(name, target, sharding)
        return self.load_exchanged(name, target, sharding)

    def load_exchanged(
        self, name: str, target: jax.ShapeDtypeStruct, sharding: NamedSharding
    ) -> jax.Array:
        """Load one leaf such that each of its bytes is read by one device only.

        Host memory holds at most two row blocks (ranges of rows of the leaf).

        Args:
            name: Name of the leaf.
            target: Shape and dtype.
            sharding: Sharding on the devices of all processes.
        """
        leaf = sharded_leaf(target.shape, sharding)
        spec = self.reader.leaves[name]
        unit = spec.read_unit or (1,) * len(spec.shape)
        dtype = exchange_dtype(spec.dtype, target.dtype)
        plan = choose_read_plan(leaf, unit, dtype.itemsize)
        if plan is None:
            return self._broadcast(name, leaf, sharding, target.dtype)
        array = compile_allocation(target.shape, target.dtype, sharding)()
        for block in plan.row_blocks(dtype.itemsize):
            parts = self._read_parts(name, plan, block=block, sharding=sharding, dtype=dtype)
            # The exchange of the last block ran during this read. Waiting for it here bounds the blocks
            # in memory to two.
            jax.block_until_ready(array)
            write_block = compile_block_update(plan, sharding, block.rows)
            array = write_block(array, parts, np.array(block.start, np.int32))
        return array

    def _load_directly(
        self, name: str, target: jax.ShapeDtypeStruct, sharding: Sharding
    ) -> jax.Array:
        """Read the shards of this process.

        Replicas share one read.
        """
        boxes = local_boxes(sharding, target.shape)
        nbytes = sum(volume(box) for box in set(boxes.values())) * target.dtype.itemsize
        if nbytes > shard_filling.MIN_FILLED_NBYTES and shard_filling.copies_host_arrays([*boxes]):
            unit = self.reader.leaves[name].read_unit or (1,) * len(target.shape)
            shards = shard_filling.fill_shards(
                self.reader,
                name,
                boxes=boxes,
                dtype=target.dtype,
                unit=unit,
                allocate=_empty_aligned,
            )
            return jax.make_array_from_single_device_arrays(target.shape, sharding, shards)
        # One buffer per distinct box: devices with the same box are replicas, and read once.
        distinct_boxes = dict.fromkeys(boxes.values())
        buffers = {box: _empty_aligned(_box_extents(box), target.dtype) for box in distinct_boxes}
        self.reader.read(name, buffers)
        return _from_shards(
            target.shape, sharding, {device: buffers[box] for device, box in boxes.items()}
        )

    def _read_parts(
        self,
        name: str,
        plan: ReadPlan,
        *,
        block: LeafBlock,
        sharding: NamedSharding,
        dtype: np.dtype,
    ) -> jax.Array:
        """Read the parts of a block for the devices of this process."""
        shape = plan.part_shape(block)
        coordinates = local_coordinates(sharding)
        boxes: dict[Any, Box] = {}
        buffers: dict[Any, np.ndarray] = {}
        arrays: dict[Box, np.ndarray] = {}
        for device, position in coordinates.items():
            box = plan.box(block, position)
            boxes[device] = box
            buffers[device] = _empty_aligned(shape, dtype)
            # A block may have fewer rows than devices that read it.
            if volume(box):
                arrays[box] = _leading_part(buffers[device], _box_extents(box))
        if arrays:
            self.reader.read(name, arrays)
        for device, box in boxes.items():
            # A part that is smaller than its buffer may have been read to another array.
            if volume(box) and arrays[box].shape != shape:
                buffers[device][_start_slices(arrays[box].shape)] = arrays[box]
        source = part_sharding(plan, sharding)
        return _from_shards(plan.all_parts_shape(block), source, buffers)

    def _broadcast(
        self, name: str, leaf: ShardedLeaf, sharding: NamedSharding, dtype: np.dtype
    ) -> jax.Array:
        """Read a whole leaf for one device and copy it to all. The name of the leaf chooses the device."""
        coordinates = local_coordinates(sharding)
        axes = tuple(axis for axis, _ in leaf.mesh_sizes)
        # CRC-32 instead of `hash`, which is seeded per process: all processes must choose the same
        # device. Different names spread the reads over the devices.
        reading_rank = zlib.crc32(name.encode()) % leaf.num_devices
        # Zeros, not empty memory: the broadcast is a sum over devices, and only one of them has the
        # leaf.
        buffers = {device: np.zeros((1, *leaf.shape), dtype) for device in coordinates}
        for device, position in coordinates.items():
            if leaf.rank(axes, position) == reading_rank:
                whole = tuple((0, extent) for extent in leaf.shape)
                self.reader.read(name, {whole: buffers[device][0, ...]})
        source = NamedSharding(sharding.mesh, jax.sharding.PartitionSpec(axes))
        return compile_broadcast(leaf, sharding)(
            _from_shards((leaf.num_devices, *leaf.shape), source, buffers)
        )


def _from_shards(
    shape: tuple[int, ...], sharding: Sharding, buffers: Mapping[Any, np.ndarray]
) -> jax.Array:
    """Copy the host buffer of each device to it, and return them as one array."""
    shards = [jax.device_put(buffer, device) for device, buffer in buffers.items()]
    return jax.make_array_from_single_device_arrays(shape, sharding, shards)


def _checked_spec(name: str, spec: LeafSpec | None, shape: tuple[int, ...]) -> LeafSpec:
    """Return a leaf's spec. Raise PrepError if it is absent or has another shape."""
    if spec is None:
        why = "the model or the optimizer needs it"
        raise PrepError(f"the checkpoint has no {name}", why, CHECKPOINT_HINT)
    if spec.shape != shape:
        why = f"its shape is {list(spec.shape)}, the model has {list(shape)}"
        raise PrepError(f"the checkpoint's {name} has another shape", why, CHECKPOINT_HINT)
    return spec


def _box_extents(box: Box) -> tuple[int, ...]:
    return tuple(high - low for low, high in box)


def _leading_part(buffer: np.ndarray, extents: tuple[int, ...]) -> np.ndarray:
    """Return the start of a buffer as a contiguous array of these extents.

    A new array if it is not contiguous.
    """
    view = buffer[_start_slices(extents)]
    if view.flags.c_contiguous:
        return view
    return np.empty(extents, buffer.dtype)


def _start_slices(extents: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(extent) for extent in extents)


def _empty_aligned(shape: Iterable[int], dtype: np.dtype) -> np.ndarray:
    """Allocate an uninitialised array that begins at a multiple of ALIGNMENT_NBYTES."""
    shape = tuple(shape)
    nbytes = math.prod(shape) * dtype.itemsize
    raw = np.empty(nbytes + ALIGNMENT_NBYTES, np.uint8)
    # Bytes up to the next multiple: an address of 4096 * k + 16 gives 4080, an aligned one gives 0.
    start = -raw.ctypes.data % ALIGNMENT_NBYTES
    return raw[start : start + nbytes].view(dtype).reshape(shape)
