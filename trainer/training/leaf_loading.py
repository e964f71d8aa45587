"""Load leaves of a checkpoint onto devices. Each process reads all its parts, or processes exchange parts."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import NamedSharding, Sharding

from prepcli.algebra.boxes import Box, volume
from prepcli.core.errors import PrepError
from prepcli.engine.checkpoint_store import CheckpointReader, LeafSpec
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
    local_coordinates,
    should_exchange_reads,
)
from trainer.distributed.read_plan import (
    LeafBlock,
    ReadPlan,
    ShardedLeaf,
    choose_read_plan,
    read_ratio,
)
from trainer.training import shard_filling
from trainer.training.read_ahead import LeafRead, read_ahead
from trainer.training.shard_filling import box_extents, empty_aligned

# Bytes that all processes read directly, per byte of the leaf. Above it the leaf is exchanged.
MAX_READ_RATIO = 1.01
# Bytes of a remote checkpoint that a process reads ahead. Requests of the next blocks and leaves are under way while
# the last ones of a block end.
READ_AHEAD_NBYTES = 64 << 20
# The same for leaves that are exchanged. An exchange needs memory for several blocks too.
EXCHANGE_READ_AHEAD_NBYTES = 16 << 20
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


class LeafLoad(Protocol):
    """The load of one leaf: reads of host arrays, each followed by their copy to devices."""

    def reads(self) -> Iterator[LeafRead]:
        """Yield the reads of this process in order. The arrays of a read are allocated when it is yielded."""
        ...

    def add(self, read: LeafRead) -> None:
        """Take over the filled arrays of a read. The reads come in order."""
        ...

    def finish(self) -> jax.Array:
        """Return the leaf after its last read."""
        ...


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
        (array,) = self.load_all([(name, target)])
        return array

    def load_all(self, targets: Iterable[tuple[str, jax.ShapeDtypeStruct]]) -> Iterator[jax.Array]:
        """Load leaves in order. The next leaves of a remote checkpoint are read during the load of one.

        Args:
            targets: Names of the leaves, with their shapes, dtypes and shardings.

        Raises:
            PrepError: A leaf is missing in the checkpoint, or it has another shape.
        """
        return self._run(self._choose_load(name, target) for name, target in targets)

    def load_exchanged(
        self, name: str, target: jax.ShapeDtypeStruct, sharding: NamedSharding
    ) -> jax.Array:
        """Load one leaf such that each of its bytes is read by one device only.

        Args:
            name: Name of the leaf.
            target: Shape and dtype.
            sharding: Sharding on the devices of all processes.
        """
        (array,) = self._run([self._exchanged_load(name, target, sharding)])
        return array

    def _run(self, loads: Iterable[LeafLoad]) -> Iterator[jax.Array]:
        """Run loads in order, and yield their leaves."""
        max_nbytes = 0
        if self.reader.is_remote:
            max_nbytes = EXCHANGE_READ_AHEAD_NBYTES if self.exchanges else READ_AHEAD_NBYTES
        for load, read in read_ahead(self.reader, _load_steps(loads), max_nbytes):
            if read is None:
                yield load.finish()
            else:
                load.add(read)

    def _choose_load(self, name: str, target: jax.ShapeDtypeStruct) -> LeafLoad:
        spec = _checked_spec(name, self.reader.leaves.get(name), target.shape)
        sharding = target.sharding
        assert isinstance(sharding, Sharding)
        unit = spec.read_unit or (1,) * len(spec.shape)
        if self.exchanges and isinstance(sharding, NamedSharding):
            # Processes that need different bytes of a leaf have no common bytes to exchange.
            boxes = boxes_by_process(sharding, target.shape)
            if read_ratio(boxes, target.shape, unit) > MAX_READ_RATIO:
                return self._exchanged_load(name, target, sharding)
        return shard_filling.DirectLoad(
            name, target, sharding, unit=unit, is_remote=self.reader.is_remote
        )

    def _exchanged_load(
        self, name: str, target: jax.ShapeDtypeStruct, sharding: NamedSharding
    ) -> LeafLoad:
        leaf = sharded_leaf(target.shape, sharding)
        spec = self.reader.leaves[name]
        unit = spec.read_unit or (1,) * len(spec.shape)
        dtype = exchange_dtype(spec.dtype, target.dtype)
        plan = choose_read_plan(leaf, unit, dtype.itemsize)
        if plan is None:
            return _BroadcastLoad(name, leaf, sharding, target.dtype)
        return _ExchangedLoad(
            name,
            plan,
            target=target,
            sharding=sharding,
            dtype=dtype,
            is_remote=self.reader.is_remote,
        )


def _load_steps(
    loads: Iterable[LeafLoad],
) -> Iterator[tuple[tuple[LeafLoad, LeafRead | None], LeafRead]]:
    """Yield the reads of all loads, and a step without a read at the end of each load."""
    for load in loads:
        for read in load.reads():
            yield (load, read), read
        yield (load, None), LeafRead("", {})


class _ExchangedLoad:
    """A load in row blocks. Each device reads a part of a block, and all exchange their parts."""

    def __init__(
        self,
        name: str,
        plan: ReadPlan,
        *,
        target: jax.ShapeDtypeStruct,
        sharding: NamedSharding,
        dtype: np.dtype,
        is_remote: bool,
    ) -> None:
        self._name = name
        self._plan = plan
        self._target = target
        self._sharding = sharding
        self._dtype = dtype
        self._is_remote = is_remote
        # The leaf in a list, so that `finish` can hand over the only reference to it. `add` allocates the leaf: all
        # processes run their programs in the order of `add` and `finish`, but each reads other bytes ahead.
        self._leaf: list[jax.Array] = []
        # Blocks with the buffer of each device, in the order of their reads.
        self._blocks = deque[tuple[LeafBlock, dict[Any, np.ndarray]]]()

    def reads(self) -> Iterator[LeafRead]:
        """Yield the reads of this process, one for each block."""
        for block in self._plan.row_blocks(self._dtype.itemsize):
            shape = self._plan.part_shape(block)
            buffers: dict[Any, np.ndarray] = {}
            arrays: dict[Box, np.ndarray] = {}
            for device, position in local_coordinates(self._sharding).items():
                box = self._plan.box(block, position)
                buffers[device] = empty_aligned(shape, self._dtype, is_remote=self._is_remote)
                # A block may have fewer rows than devices that read it.
                if volume(box):
                    arrays[box] = _leading_part(buffers[device], box_extents(box))
            self._blocks.append((block, buffers))
            yield LeafRead(self._name, arrays)

    def add(self, read: LeafRead) -> None:
        """Exchange the parts of the next block, and write it into the leaf."""
        block, buffers = self._blocks.popleft()
        shape = self._plan.part_shape(block)
        for device, position in local_coordinates(self._sharding).items():
            box = self._plan.box(block, position)
            # A part that is smaller than its buffer may have been read to another array.
            if volume(box) and read.arrays[box].shape != shape:
                part = read.arrays[box]
                buffers[device][_start_slices(part.shape)] = part
        source = part_sharding(self._plan, self._sharding)
        parts = _from_shards(self._plan.all_parts_shape(block), source, buffers)
        if not self._leaf:
            allocate = compile_allocation(self._target.shape, self._target.dtype, self._sharding)
            self._leaf.append(allocate())
        # The exchange of the last block ran during this read. The wait bounds the exchanged blocks in
        # memory to two.
        leaf = jax.block_until_ready(self._leaf.pop())
        write_block = compile_block_update(self._plan, self._sharding, block.rows)
        self._leaf.append(write_block(leaf, parts, np.array(block.start, np.int32)))

    def finish(self) -> jax.Array:
        """Return the leaf."""
        return self._leaf.pop()


class _BroadcastLoad:
    """A load of a small leaf. The name of the leaf chooses the device that reads it."""

    def __init__(
        self, name: str, leaf: ShardedLeaf, sharding: NamedSharding, dtype: np.dtype
    ) -> None:
        self._name = name
        self._leaf = leaf
        self._sharding = sharding
        # Zeros, not empty memory: the broadcast is a sum over devices, and only one of them has the
        # leaf.
        self._buffers = {
            device: np.zeros((1, *leaf.shape), dtype) for device in local_coordinates(sharding)
        }

    def reads(self) -> Iterator[LeafRead]:
        """Yield the read of the whole leaf in the process of the chosen device."""
        axes = tuple(axis for axis, _ in self._leaf.mesh_sizes)
        # CRC-32 instead of `hash`, which is seeded per process: all processes must choose the same
        # device. Different names spread the reads over the devices.
        reading_rank = zlib.crc32(self._name.encode()) % self._leaf.num_devices
        whole = tuple((0, extent) for extent in self._leaf.shape)
        for device, position in local_coordinates(self._sharding).items():
            if self._leaf.rank(axes, position) == reading_rank:
                yield LeafRead(self._name, {whole: self._buffers[device][0, ...]})

    def add(self, read: LeafRead) -> None:
        """Do nothing: `finish` sends the leaf to all devices."""

    def finish(self) -> jax.Array:
        """Send the leaf to all devices, and return it."""
        axes = tuple(axis for axis, _ in self._leaf.mesh_sizes)
        source = NamedSharding(self._sharding.mesh, jax.sharding.PartitionSpec(axes))
        shape = (self._leaf.num_devices, *self._leaf.shape)
        parts = _from_shards(shape, source, self._buffers)
        return compile_broadcast(self._leaf, self._sharding)(parts)


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
