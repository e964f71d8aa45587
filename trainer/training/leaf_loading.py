"""Load leaves of a checkpoint onto devices, slice by slice.

Each process reads the slices of its own shards. If processes would read the same bytes over a network, each device
reads a part of every slice instead, and one program per shape moves the parts to the devices that need them.
"""

from __future__ import annotations

import math
import mmap
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from prepcli.algebra.boxes import Box, intersection, slices, volume
from prepcli.core.errors import PrepError
from prepcli.core.worker_thread import WorkerThread, wait_for_threads
from prepcli.planning.tensors import LeafSpec
from trainer.distributed.leaf_slices import (
    CheckpointReader,
    SlicePlan,
    local_boxes,
    own_read_ratio,
    plan_exchange,
    plan_own_reads,
)
from trainer.distributed.sharding import dim_axes

# Bytes that all processes read of their own shards, per byte of the leaf. Above it they exchange slices.
MAX_READ_RATIO = 1.01
# Bytes of a remote checkpoint that a process reads ahead of a slice. Requests of the next slices and leaves are under
# way while the last ones of a slice end. 32 requests of 4 MiB need 128 MiB.
READ_AHEAD_NBYTES = 128 << 20
# The same if slices are exchanged. Parts to exchange need memory beyond the shards, and so does the exchange.
EXCHANGE_READ_AHEAD_NBYTES = 16 << 20
# Reads that are pending at once. Each has threads, and small leaves have few bytes. A leaf has one or more reads and
# an empty one at its end, so that 16 small leaves are read at once.
MAX_PENDING_READS = 32
# Bytes of the shards of a process that are copied to accelerators at once. Larger leaves are copied slice by slice.
MAX_COPY_NBYTES = 64 << 20
# Alignment of host buffers: direct I/O reads into them, and a CPU device takes them over without a copy.
ALIGNMENT_NBYTES = 4096
CHECKPOINT_HINT = "use a checkpoint of the model and the optimizer of this run"


@dataclass(frozen=True, slots=True)
class LeafLoader:
    """Loads leaves of a checkpoint. All processes load the same leaves in the same order."""

    reader: CheckpointReader  # The open checkpoint
    # Read each byte once in the whole job. Otherwise each process reads all that its devices need.
    exchanges: bool

    def load(self, name: str, target: jax.ShapeDtypeStruct) -> jax.Array:
        """Load one leaf with the shape, dtype and sharding of `target`.

        Raises:
            PrepError: The leaf is missing in the checkpoint, or it has another shape.
        """
        (array,) = self.load_all([(name, target)])
        return array

    def load_all(self, targets: Iterable[tuple[str, jax.ShapeDtypeStruct]]) -> Iterator[jax.Array]:
        """Load leaves in order. The next slices of a remote checkpoint are read while one is placed.

        Args:
            targets: Names of the leaves, with their shapes, dtypes and shardings.

        Raises:
            PrepError: A leaf is missing in the checkpoint, or it has another shape, or a read failed.
        """
        max_nbytes = 0
        if self.reader.is_remote:
            max_nbytes = EXCHANGE_READ_AHEAD_NBYTES if self.exchanges else READ_AHEAD_NBYTES
        pending = deque[_Read]()
        try:
            for read in self._reads(targets):
                pending.append(read)
                if max_nbytes:
                    read.begin()
                while _is_full(pending, max_nbytes):
                    yield from self._finish_first(pending)
            while pending:
                yield from self._finish_first(pending)
        finally:
            # After an error or a signal, arrays and files must outlive the running reads. Otherwise a slow store would
            # send all that is pending first.
            threads = [read.thread for read in pending if read.thread is not None]
            if threads:
                self.reader.stop_reads()
            wait_for_threads(threads, on_interruption=lambda error: None)
            for thread in threads:
                thread.stop()

    def _reads(self, targets: Iterable[tuple[str, jax.ShapeDtypeStruct]]) -> Iterator[_Read]:
        """Yield the reads of all leaves, and an empty read at the end of each leaf."""
        for name, target in targets:
            load = _LeafLoad(self.reader, name, target, exchanges=self.exchanges)
            for start, arrays in load.reads():
                yield _Read(load, arrays, start)
            yield _Read(load, {}, None)

    def _finish_first(self, pending: deque[_Read]) -> Iterator[jax.Array]:
        """Wait for the first pending read and place its slice. At the end of a leaf, yield the leaf."""
        # It stays pending during the wait: a signal may interrupt the wait, and the read continues.
        read = pending[0]
        read.wait()
        pending.popleft()
        # No thread of a pending read may have ended: the wait for it after a signal would never end.
        read.end()
        if read.start is None:
            yield read.load.finish()
        else:
            read.load.place(read.start, read.arrays)


@dataclass(slots=True)
class _Read:
    """A read of a slice of a leaf."""

    load: _LeafLoad  # The load of the leaf
    arrays: Mapping[Box, np.ndarray]  # Host arrays to fill, by their boxes of the leaf
    start: tuple[int, ...] | None  # Start of the slice. None after the last slice of the leaf.
    # Thread of the read. None if it runs in the thread that waits for it.
    thread: WorkerThread | None = None

    @property
    def nbytes(self) -> int:
        """Size of the arrays."""
        return sum(array.nbytes for array in self.arrays.values())

    def run(self) -> None:
        """Fill the arrays."""
        self.load.reader.read(self.load.name, self.arrays)

    def begin(self) -> None:
        """Fill the arrays in a thread."""
        if self.arrays:
            self.thread = WorkerThread()
            self.thread.submit(self.run)

    def wait(self) -> None:
        """Wait until the arrays are filled. Raise the error of the read."""
        if self.thread is not None:
            self.thread.drain()
            if self.thread.errors:
                raise self.thread.errors[0]
        elif self.arrays:
            self.run()

    def end(self) -> None:
        """End the thread, if there is one."""
        if self.thread is not None:
            self.thread.stop()


def _is_full(pending: deque[_Read], max_nbytes: int) -> bool:
    """Return whether the reads after the first one are as large as they may be together."""
    nbytes = sum(read.nbytes for read in pending) - sum(read.nbytes for read in [*pending][:1])
    return bool(pending) and (nbytes >= max_nbytes or len(pending) > MAX_PENDING_READS)


class _LeafLoad:
    """The load of one leaf: reads of its slices in order, each followed by a copy to the devices.

    Attributes:
        reader: The open checkpoint.
        name: Name of the leaf.
    """

    def __init__(
        self, reader: CheckpointReader, name: str, target: jax.ShapeDtypeStruct, *, exchanges: bool
    ) -> None:
        """Choose the slices. All shards of this process are read at once if they need not be divided."""
        spec = _checked_spec(name, reader.leaves.get(name), target.shape)
        shape, sharding = target.shape, target.sharding
        assert isinstance(sharding, Sharding)
        self.reader = reader
        self.name = name
        self._target = target
        self._sharding = sharding
        self._boxes = local_boxes(sharding, shape)
        self._is_on_host = not copies_host_arrays([*self._boxes])
        self._plan: SlicePlan | None = None
        self._read_dtype = target.dtype

        unit = spec.read_unit or (1,) * len(shape)
        nbytes = sum(volume(box) for box in {*self._boxes.values()}) * target.dtype.itemsize
        # Processes that need different bytes of a leaf have no common bytes to exchange.
        may_exchange = exchanges and own_read_ratio(sharding, shape, unit) > MAX_READ_RATIO
        if may_exchange and shape and isinstance(sharding, NamedSharding):
            if (spec.dtype, target.dtype) == ("bfloat16", jnp.float32):
                # It is widened after the exchange.
                self._read_dtype = jnp.dtype(jnp.bfloat16)
            itemsize = self._read_dtype.itemsize
            self._plan = plan_exchange(name, shape, sharding, unit=unit, itemsize=itemsize)
        elif nbytes > MAX_COPY_NBYTES and not self._is_on_host:
            self._plan = plan_own_reads(shape, sharding, unit, target.dtype.itemsize)

        # Shards of CPU devices are these arrays. Devices with equal shards share one.
        self._host: dict[Box, np.ndarray] = {}
        # The leaf on accelerators, and the last slice with its start. In lists, which give the only reference away.
        self._leaf: list[jax.Array] = []
        self._placed: list[tuple[tuple[int, ...], Sequence[jax.Array]]] = []

    def reads(self) -> Iterator[tuple[tuple[int, ...], dict[Box, np.ndarray]]]:
        """Yield the start of each slice, and the arrays that this process has to fill for it."""
        plan = self._plan
        if plan is None:
            yield (), {box: self._host_array(box) for box in self._boxes.values()}
            return
        for start in plan.starts():
            boxes: set[Box] = set()
            for part in plan.leaf_boxes(start, plan.parts).values():
                boxes.update(self._part_blocks(part))
            yield start, {box: self._empty(box, self._read_dtype) for box in boxes if volume(box)}

    def _part_blocks(self, part: Box) -> list[Box]:
        """Return the boxes of the arrays of a part: one for each device that receives a block, or the whole part."""
        # CPU devices exchange the arrays that the reader fills. Accelerators cut the part themselves: a host of many
        # devices would send them thousands of small arrays.
        if self._plan is None or not self._is_on_host:
            return [part]
        return self._plan.block_boxes(part)

    def _host_array(self, shard_box: Box) -> np.ndarray:
        if shard_box not in self._host:
            self._host[shard_box] = self._empty(shard_box, self._target.dtype)
        return self._host[shard_box]

    def _empty(self, box: Box, dtype: np.dtype) -> np.ndarray:
        shape = tuple(high - low for low, high in box)
        # Beside shards that stay, the buffers of slices would leave holes in the heap, as large as several slices.
        has_slices = self._is_on_host and self._plan is not None
        return _empty_aligned(shape, dtype, small_pages=self.reader.is_remote or has_slices)

    def place(self, start: tuple[int, ...], arrays: Mapping[Box, np.ndarray]) -> None:
        """Send the parts of a slice to the devices that need them, and write the slice before it."""
        plan = self._plan
        if plan is None:
            return
        # The exchange of the slice before ran during this read. Two slices are in memory at most.
        self._write_placed()
        placed = self._block_arrays(start, arrays)
        if plan.moves or plan.reader is not None:
            placed = _exchange_program(plan, self._target.dtype, self._is_on_host)(*placed)
        self._placed.append((start, placed))

    def _block_arrays(
        self, start: tuple[int, ...], arrays: Mapping[Box, np.ndarray]
    ) -> list[jax.Array]:
        """Return the arrays of a slice before its exchange: number i has block i of each device."""
        plan = self._plan
        assert plan is not None
        shape = [*plan.slice_shape]
        if self._is_on_host:
            for dim, count in plan.cuts:
                shape[dim] //= count
        block_shape = plan.parts.shard_shape(tuple(shape))
        blocks: list[list[jax.Array]] = []
        for device, part in plan.leaf_boxes(start, plan.parts).items():
            padded = [
                _padded(arrays.get(box), block_shape, self._read_dtype)
                for box in self._part_blocks(part)
            ]
            blocks.append(jax.device_put(padded, device))
        return [
            jax.make_array_from_single_device_arrays(tuple(shape), plan.parts, [*device_blocks])
            for device_blocks in zip(*blocks, strict=True)
        ]

    def _write_placed(self) -> None:
        """Write the last slice into the shards."""
        plan = self._plan
        if plan is None or not self._placed:
            return
        start, placed = self._placed.pop()
        if plan.makes_leaf:
            self._leaf += placed
        elif self._is_on_host:
            boxes = plan.leaf_boxes(start, plan.placed)
            for number, blocks in enumerate(placed):
                for shard in blocks.addressable_shards:
                    block = np.asarray(shard.data)
                    box = plan.block_rows(boxes[shard.device], number, block)
                    shard_box = self._boxes[shard.device]
                    part = intersection(shard_box, box)
                    values = block[slices(part, box)]
                    self._host_array(shard_box)[slices(part, shard_box)] = values
        else:
            if not self._leaf:
                shape, dtype = self._target.shape, self._target.dtype
                self._leaf.append(_allocation_program(shape, dtype, self._sharding)())
            leaf = jax.block_until_ready(self._leaf.pop())
            rows = min(plan.steps[plan.row_dim], plan.extents[plan.row_dim] - start[plan.row_dim])
            (rows_placed,) = placed
            self._leaf.append(
                _write_program(plan, rows)(leaf, rows_placed, np.array(start, np.int32))
            )

    def finish(self) -> jax.Array:
        """Return the leaf."""
        self._write_placed()
        if self._leaf:
            return self._leaf.pop()
        shards = [jax.device_put(self._host[box], device) for device, box in self._boxes.items()]
        # The load outlives its leaf, which the caller may convert and drop.
        self._host.clear()
        return jax.make_array_from_single_device_arrays(self._target.shape, self._sharding, shards)


def copies_host_arrays(devices: Sequence[Any]) -> bool:
    """Return whether arrays of these devices are copies of host arrays. A CPU device uses an aligned host array."""
    return any(device.platform != "cpu" for device in devices)


@lru_cache(maxsize=1024)
def _allocation_program(
    shape: tuple[int, ...], dtype: jnp.dtype, sharding: Sharding
) -> Callable[[], jax.Array]:
    return jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=sharding)


@lru_cache(maxsize=1024)
def _exchange_program(
    plan: SlicePlan, dtype: jnp.dtype, is_on_host: bool
) -> Callable[..., tuple[jax.Array, ...]]:
    """Compile the exchange of a slice: a function of the blocks of each device, with results of a dtype.

    Accelerators have one block, the whole part, and one result, the slice. CPU devices have a block for each device
    that needs one. After an all-to-all they have a result from each device, in the order of the rows. XLA for CPUs
    sends and receives these arrays in place. It would copy the slice to cut the part, and again to join the results.
    """
    # The rows of a later move are the major ones.
    cut_axes = tuple(axis for axis, dim in reversed(plan.moves) if dim is not None)
    whole_axes = tuple(axis for axis, dim in reversed(plan.moves) if dim is None)

    def exchange(*blocks: jax.Array) -> tuple[jax.Array, ...]:
        # x: [block, *shape of a block]
        x = jnp.stack(blocks)
        if not is_on_host:
            for dim, count in plan.cuts:
                x = _cut_blocks(x, dim + 1, count)
        if cut_axes:
            x = lax.all_to_all(x, cut_axes, 0, 0, tiled=True)
        if whole_axes:
            x = lax.all_gather(x, whole_axes, axis=0, tiled=True)
        x = _widen(x, dtype)
        if is_on_host and not whole_axes and not plan.makes_leaf:
            return tuple(x[number] for number in range(x.shape[0]))
        dim = plan.row_dim
        slice_shape = (*x.shape[1 : dim + 1], -1, *x.shape[dim + 2 :])
        return (jnp.moveaxis(x, 0, dim).reshape(slice_shape),)

    def broadcast(parts: jax.Array) -> tuple[jax.Array]:
        # Bits are summed as integers: as floats, 0.0 + -0.0 is 0.0, which loses the sign. All parts but one are zeros.
        bits = lax.bitcast_convert_type(parts, f"uint{8 * parts.dtype.itemsize}")
        # Networks of devices add no integers of 16 bits.
        wide = bits.astype(jnp.promote_types(bits.dtype, jnp.uint32))
        bits = wide.reshape(-1, *plan.shape).sum(0).astype(bits.dtype)
        return (_widen(lax.bitcast_convert_type(bits, parts.dtype), dtype),)

    if plan.reader is not None:
        return jax.jit(broadcast, out_shardings=plan.placed)
    assert isinstance(plan.parts, NamedSharding)
    assert isinstance(plan.placed, NamedSharding)
    specs = plan.parts.spec, plan.placed.spec
    return jax.jit(
        jax.shard_map(
            exchange, mesh=plan.parts.mesh, in_specs=specs[0], out_specs=specs[1], check_vma=False
        )
    )


def _cut_blocks(x: jax.Array, dim: int, count: int) -> jax.Array:
    """Cut blocks [block, ...] along a dim, into `count` times as many. The number of the piece is the major index."""
    pieces = x.reshape(*x.shape[:dim], count, -1, *x.shape[dim + 1 :])
    pieces = jnp.moveaxis(pieces, dim, 0)
    return pieces.reshape(-1, *pieces.shape[2:])


def _widen(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Widen bfloat16 to float32 unless `x` has `dtype`."""
    # The bits are shifted as integers, because a float conversion on a device may flush subnormal values to zero.
    if x.dtype == dtype:
        return x
    bits = lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32)
    return lax.bitcast_convert_type(bits << 16, dtype)


@lru_cache(maxsize=1024)
def _write_program(
    plan: SlicePlan, rows: int
) -> Callable[[jax.Array, jax.Array, np.ndarray], jax.Array]:
    """Compile the copy of a slice with some number of rows into the leaf, which is donated."""
    row_dim = plan.row_dim
    sharding = plan.sharding
    shard_rows = sharding.shard_shape(plan.shape)[row_dim]

    def write(shard: jax.Array, placed: jax.Array, start: jax.Array) -> jax.Array:
        placed = lax.slice_in_dim(placed, 0, rows, axis=row_dim)
        if plan.extents[row_dim] == shard_rows:
            return lax.dynamic_update_slice(shard, placed, [*start])
        # Each device has all rows of the slice, and takes the rows of its shard.
        assert isinstance(sharding, NamedSharding)
        shard_index = lax.axis_index(dim_axes(sharding.spec, shard.ndim)[row_dim])
        starts = jnp.tile(start.at[row_dim].add(-shard_index * shard_rows), (rows, 1))
        starts = starts.at[:, row_dim].add(jnp.arange(rows))
        window_dims = tuple(dim for dim in range(shard.ndim) if dim != row_dim)
        dims = lax.ScatterDimensionNumbers(window_dims, (row_dim,), tuple(range(shard.ndim)))
        return lax.scatter(shard, starts, placed, dims, unique_indices=True, mode="drop")

    if isinstance(sharding, NamedSharding):
        assert isinstance(plan.placed, NamedSharding)
        specs = (sharding.spec, plan.placed.spec, PartitionSpec())
        write = jax.shard_map(
            write, mesh=sharding.mesh, in_specs=specs, out_specs=sharding.spec, check_vma=False
        )
    return jax.jit(write, donate_argnums=0)


def _checked_spec(name: str, spec: LeafSpec | None, shape: tuple[int, ...]) -> LeafSpec:
    """Return a leaf's spec. Raise PrepError if it is absent or has another shape."""
    if spec is None:
        why = "the model or the optimizer needs it"
        raise PrepError(f"the checkpoint has no {name}", why, CHECKPOINT_HINT)
    if spec.shape != shape:
        why = f"its shape is {list(spec.shape)}, the model has {list(shape)}"
        raise PrepError(f"the checkpoint's {name} has another shape", why, CHECKPOINT_HINT)
    return spec


def _padded(array: np.ndarray | None, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return an array of a shape that begins with `array`, followed by zeros."""
    if array is not None and array.shape == shape:
        return array
    # New pages have zeros, and take no memory until they are written.
    padded = _empty_aligned(shape, dtype, small_pages=True)
    if array is not None:
        padded[tuple(slice(extent) for extent in array.shape)] = array
    return padded


def _empty_aligned(shape: tuple[int, ...], dtype: np.dtype, *, small_pages: bool) -> np.ndarray:
    """Allocate an array at a multiple of ALIGNMENT_NBYTES."""
    nbytes = math.prod(shape) * dtype.itemsize
    if small_pages:
        pages = mmap.mmap(-1, max(1, nbytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return np.frombuffer(pages, np.uint8, nbytes).view(dtype).reshape(shape)
    raw = np.empty(nbytes + ALIGNMENT_NBYTES, np.uint8)
    # Bytes up to the next multiple: an address of 4096 * k + 16 gives 4080, an aligned one gives 0.
    start = -raw.ctypes.data % ALIGNMENT_NBYTES
    return raw[start : start + nbytes].view(dtype).reshape(shape)
