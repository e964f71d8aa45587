"""Slices of a sharded leaf: the boxes that each device reads, and the boxes that it has after an exchange.

A slice is a range of rows of a leaf. Rows are the indices of one dim. Either each device reads the rows of its own
shard, or all devices that need the same rows divide them, read a part each and exchange the parts.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from prepcli.algebra.boxes import Box, Range, volume
from prepcli.core.errors import PrepError
from prepcli.models.mesh import MeshAxes
from prepcli.planning.manifest_fields import Manifest
from prepcli.planning.tensors import LeafSpec
from trainer.distributed.agreement import kernel_id
from trainer.distributed.sharding import dim_axes

# Bytes of a slice: on one device after an exchange, or on all devices of a process without an exchange.
SLICE_NBYTES = 16 << 20
# A dim with larger slices of one unit per device is the row dim only if no other dim has smaller ones.
MAX_SLICE_NBYTES = 2 * SLICE_NBYTES
# Bytes that a device could read in the time that a slice takes beyond its bytes, for the choice of the row dim.
SLICE_COST_NBYTES = 1 << 20
# One device reads a whole leaf if the parts would be smaller. A request takes longer than these bytes.
MIN_PART_NBYTES = 32 << 10


class CheckpointReader(Protocol):
    """An open checkpoint, of any format."""

    @property
    def manifest(self) -> Manifest:
        """Its manifest."""
        ...

    @property
    def leaves(self) -> Mapping[str, LeafSpec]:
        """Its leaves by dotted name."""
        ...

    @property
    def is_remote(self) -> bool:
        """Whether its bytes come over the network, so that no page cache shares the reads of several processes."""
        ...

    def read(self, name: str, parts: Mapping[Box, np.ndarray]) -> None:
        """Fill each array with its box of the leaf, cast to the array's dtype. No stored byte is read twice."""
        ...

    def stop_reads(self) -> None:
        """End all reads early, from another thread. They raise an error, and so do later reads."""
        ...


@dataclass(frozen=True, slots=True)
class SlicePlan:
    """The division of a leaf into slices, and of each slice between devices.

    All slices are sharded arrays of one shape. Devices that keep different indices of a dim have theirs one after
    another along it. Rows of a slice beyond the end of a shard or of the leaf have no values.
    """

    shape: tuple[int, ...]  # Shape of the leaf
    sharding: Sharding  # Sharding of the leaf
    row_dim: int  # Dim of the rows
    # Number of indices of each dim that the slices cover: the extent of a shard if devices keep the split of the
    # dim, or the extent of the leaf
    extents: tuple[int, ...]
    steps: tuple[int, ...]  # Number of these indices in one slice
    parts: Sharding  # Sharding of a slice after the read
    placed: Sharding  # Sharding of a slice after the exchange
    # Mesh axes along which devices exchange parts, in this order. Each has the dim that it splits instead of the
    # rows, or None if all devices along it receive the same rows.
    moves: tuple[tuple[str, int | None], ...] = ()
    # Number of the device that reads the whole leaf. None if devices divide the rows. Plans of equal leaves are equal,
    # so that they share programs.
    reader: int | None = field(default=None, compare=False)

    @property
    def slice_shape(self) -> tuple[int, ...]:
        """Shape of a slice of all devices."""
        shape: list[int] = []
        for leaf_extent, extent, step in zip(self.shape, self.extents, self.steps):
            shape.append(leaf_extent // extent * step)
        return tuple(shape)

    @property
    def cuts(self) -> tuple[tuple[int, int], ...]:
        """The dims along which a part is cut into blocks, in order, each with its number of pieces."""
        cuts: list[tuple[int, int]] = []
        for axis, dim in self.moves:
            if dim is not None:
                assert isinstance(self.parts, NamedSharding)
                cuts.append((dim, self.parts.mesh.shape[axis]))
        return tuple(cuts)

    @property
    def num_slices(self) -> int:
        """Number of slices."""
        return math.prod(
            -(-extent // step) for extent, step in zip(self.extents, self.steps, strict=True)
        )

    @property
    def makes_leaf(self) -> bool:
        """Whether the exchange of the only slice gives the leaf."""
        is_whole = self.placed == self.sharding and self.slice_shape == self.shape
        return self.reader is not None or (is_whole and self.num_slices == 1)

    def starts(self) -> Iterator[tuple[int, ...]]:
        """Yield the start of each slice in `extents`, in the order of their elements."""
        ranges = [range(0, extent, step) for extent, step in zip(self.extents, self.steps)]
        return itertools.product(*ranges)

    def leaf_boxes(self, start: Sequence[int], sharding: Sharding) -> dict[Any, Box]:
        """Return the box of the leaf that each device of this process has of a slice. It may be empty.

        Args:
            start: Start of the slice.
            sharding: `parts` or `placed`.
        """
        boxes: dict[Any, Box] = {}
        for device, box in local_boxes(sharding, self.slice_shape).items():
            ranges: list[Range] = []
            for dim, indices in enumerate(box):
                ranges.append(self._leaf_range(dim, indices, start[dim]))
            boxes[device] = tuple(ranges)
        return boxes

    def block_boxes(self, part: Box) -> list[Box]:
        """Cut the box of a part into a block for each device that needs one. The last cut is the major one."""
        # E.g. a part [0:2, 0:8], and cuts of dim 1 for 2 devices and then 2 more. The columns are 0:2, 4:6, 2:4, 6:8.
        boxes = [part]
        for dim, count in self.cuts:
            cut_boxes: list[Box] = []
            for index, box in itertools.product(range(count), boxes):
                low, high = box[dim]
                width = (high - low) // count
                piece = (low + index * width, low + (index + 1) * width)
                cut_boxes.append((*box[:dim], piece, *box[dim + 1 :]))
            boxes = cut_boxes
        return boxes

    def block_rows(self, placed: Box, number: int, block: np.ndarray) -> Box:
        """Return the box of block `number` of the blocks that a device receives, within its box of the slice."""
        low, high = placed[self.row_dim]
        num_rows = block.shape[self.row_dim]
        first = min(low + number * num_rows, high)
        stop = min(first + num_rows, high)
        return (*placed[: self.row_dim], (first, stop), *placed[self.row_dim + 1 :])

    def _leaf_range(self, dim: int, indices: Range, start: int) -> Range:
        """Convert a range of indices of a slice, which is within one shard, to indices of the leaf."""
        # Example: shards of 10 rows, and a slice of 4 rows from row 8 on, of which two have values. Indices 5 to 7 of
        # the slice are rows 1 and 2 of its part of shard 1. Row 1 is row 19 of the leaf, and row 2 has no values.
        extent, step = self.extents[dim], self.steps[dim]
        shard = indices[0] // step
        origin = shard * step
        if self.reader is not None and dim == self.row_dim:
            origin = self.reader * extent
        first = shard * extent + start
        num_values = min(step, extent - start)
        low, high = (min(max(0, index - origin), num_values) for index in indices)
        return first + low, first + high


def plan_own_reads(
    shape: tuple[int, ...], sharding: Sharding, unit: Sequence[int], itemsize: int
) -> SlicePlan | None:
    """Plan the load of a leaf when each device reads its own shard.

    Args:
        shape: Shape of the leaf.
        sharding: Its sharding.
        unit: Shape of the boxes of the leaf that are read together.
        itemsize: Bytes of an element.

    Returns:
        The plan. None if the leaf has one unit.
    """
    num_devices = max(Counter(device.process_index for device in sharding.device_set).values())
    plans: list[SlicePlan] = []
    for row_dim, steps in _unit_slices(shape, unit):
        extents = _covered_extents(shape, sharding, steps, row_dim + 1)
        # A unit may span several shards. Each device reads the part in its own.
        steps = tuple(map(min, steps, extents))
        plans.append(SlicePlan(shape, sharding, row_dim, extents, steps, sharding, sharding))
    return _best_plan(plans, num_devices * itemsize)


def plan_exchange(
    name: str,
    shape: tuple[int, ...],
    sharding: NamedSharding,
    *,
    unit: Sequence[int],
    itemsize: int,
) -> SlicePlan:
    """Plan the load of a leaf when one device reads each unit.

    Args:
        name: Name of the leaf. It chooses the device that reads a leaf of one unit.
        shape: Shape of the leaf. It has at least one dim.
        sharding: Its sharding.
        unit: Shape of the boxes of the leaf that are read together.
        itemsize: Bytes of an exchanged element.
    """
    plans = [
        _exchange_plan(shape, sharding, row_dim, steps)
        for row_dim, steps in _unit_slices(shape, unit)
    ]
    best = _best_plan(plans, itemsize)
    if best is None or (
        best.num_slices == 1
        and math.prod(best.parts.shard_shape(best.slice_shape)) * itemsize < MIN_PART_NBYTES
    ):
        return _broadcast_plan(name, shape, sharding)
    return best


def _unit_slices(
    shape: Sequence[int], unit: Sequence[int]
) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yield each dim that can be the row dim, with the shape of a slice of one unit of rows."""
    # A row dim has more than one unit. Each dim before it has a single unit, or units of one index.
    for dim, extent in enumerate(shape):
        if extent <= unit[dim]:
            continue
        yield dim, (*unit[: dim + 1], *shape[dim + 1 :])
        if unit[dim] > 1:
            return


def _covered_extents(
    shape: Sequence[int], sharding: Sharding, steps: Sequence[int], stop: int
) -> tuple[int, ...]:
    """Return `SlicePlan.extents`. Devices keep the split of divided dims before `stop`."""
    extents = [*shape]
    for dim, extent in enumerate(sharding.shard_shape(tuple(shape))[:stop]):
        if steps[dim] < shape[dim]:
            extents[dim] = extent
    return tuple(extents)


def _exchange_plan(
    shape: tuple[int, ...], sharding: NamedSharding, row_dim: int, steps: tuple[int, ...]
) -> SlicePlan:
    """Return the plan with parts of one unit."""
    sizes = sharding.mesh.shape
    split_axes = dim_axes(sharding.spec, len(shape))
    shard_rows = sharding.shard_shape(shape)[row_dim]
    # If shards begin within a unit, devices divide the rows of all shards.
    keeps_rows = shard_rows == shape[row_dim] or shard_rows % steps[row_dim] == 0
    placed = sharding
    if not keeps_rows:
        axes = [() if dim == row_dim else axes for dim, axes in enumerate(split_axes)]
        placed = NamedSharding(sharding.mesh, PartitionSpec(*axes))

    part_axes: list[MeshAxes] = [()] * len(shape)
    moves: list[tuple[str, int | None]] = []
    for dim, axes in enumerate(split_axes):
        if dim < row_dim + keeps_rows and steps[dim] < shape[dim]:
            part_axes[dim] = axes
        elif dim != row_dim:
            moves += [(axis, dim) for axis in axes]
    used = {axis for axes in part_axes for axis in axes} | {axis for axis, _ in moves}
    moves += [(axis, None) for axis in sizes if axis not in used]
    # The last move joins the largest parts, so its axis is the major one.
    part_axes[row_dim] += tuple(axis for axis, _ in reversed(moves))
    num_readers = math.prod(sizes[axis] for axis, _ in moves)
    return SlicePlan(
        shape,
        sharding,
        row_dim,
        _covered_extents(shape, sharding, steps, row_dim + keeps_rows),
        (*steps[:row_dim], num_readers * steps[row_dim], *steps[row_dim + 1 :]),
        parts=NamedSharding(sharding.mesh, PartitionSpec(*part_axes)),
        placed=placed,
        moves=tuple((axis, dim) for axis, dim in moves if sizes[axis] > 1),
    )


def _broadcast_plan(name: str, shape: tuple[int, ...], sharding: NamedSharding) -> SlicePlan:
    """Return the plan by which one device reads the leaf."""
    mesh = sharding.mesh
    # CRC-32 instead of `hash`, which is seeded per process: all processes must choose the same device. Different names
    # spread the reads over the devices.
    reader = zlib.crc32(name.encode()) % mesh.size
    parts = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    steps = (mesh.size * shape[0], *shape[1:])
    return SlicePlan(shape, sharding, 0, shape, steps, parts, placed=sharding, reader=reader)


def _best_plan(plans: Sequence[SlicePlan], itemsize: int) -> SlicePlan | None:
    """Return the fastest of some plans with one unit per part, after an increase of its parts."""
    best: tuple[tuple[int, int], SlicePlan] | None = None
    for plan in plans:
        part_shape = plan.parts.shard_shape(plan.slice_shape)
        part = math.prod(part_shape)
        placed = math.prod(plan.placed.shard_shape(plan.slice_shape))
        num_readers = plan.steps[plan.row_dim] // part_shape[plan.row_dim]
        # An all-to-all holds more copies of a slice than an all-gather.
        max_nbytes = SLICE_NBYTES // (1 if placed == part * num_readers else 2)
        max_parts = max(1, max_nbytes // (placed * itemsize))
        # All slices have about the same size.
        num_parts = -(-plan.extents[plan.row_dim] // plan.steps[plan.row_dim])
        num_slices = -(-num_parts // max_parts)
        factor = -(-num_parts // num_slices)
        steps = [*plan.steps]
        steps[plan.row_dim] *= factor
        enlarged = replace(plan, steps=tuple(steps))
        # The bytes that each device reads, and the overhead of the slices.
        nbytes = enlarged.num_slices * (factor * part * itemsize + SLICE_COST_NBYTES)
        cost = (max(placed * itemsize, MAX_SLICE_NBYTES), nbytes)
        if best is None or cost < best[0]:
            best = (cost, enlarged)
    return best and best[1]


def exchange_is_faster(reader: CheckpointReader) -> bool:
    """Return whether bytes that several processes need should be read once and exchanged over the devices.

    On one host the page cache already shares the reads of local files, and a copy out of it is faster than an exchange.
    Containers of one host have one kernel, and share its page cache. Hosts have no common page cache. A shared file
    system, a hub or a bucket would send the same bytes to each of them, over a slower network than the network between
    devices. All processes call this together.

    Raises:
        PrepError: The processes have checkpoints of different layouts, and would run different programs.
    """
    if jax.process_count() == 1:
        return False
    # The shape, dtype and read unit of each leaf choose the programs.
    layout = zlib.crc32(repr(sorted(reader.leaves.items())).encode())
    facts = np.array([zlib.crc32(kernel_id().encode()), reader.is_remote, layout], np.uint32)
    kernels, remote, layouts = multihost_utils.process_allgather(facts).T
    if np.unique(layouts).size > 1:
        why = "leaves, dtypes or digests of their checkpoints differ"
        hint = "use the same `model.path` and files on all hosts"
        raise PrepError("the processes cannot load together", why, hint)
    return bool(remote.any()) or np.unique(kernels).size > 1


def own_read_ratio(sharding: Sharding, shape: tuple[int, ...], unit: Sequence[int]) -> float:
    """Return the elements that all processes read per element of the leaf if each device reads its own shard.

    Shards of one process that touch the same units share one read.

    Args:
        sharding: Sharding of the leaf.
        shape: Its shape.
        unit: Shape of the boxes that are read together.
    """
    reads: set[tuple[int, Box]] = set()
    for device, index in sharding.devices_indices_map(shape).items():
        ranges: list[Range] = []
        for (low, high), length, extent in zip(index_box(index or (), shape), unit, shape):
            # E.g. [3, 9) touches the units [0, 12) of length 4. The last unit may end beyond the leaf.
            ranges.append((low // length * length, min(-(-high // length) * length, extent)))
        reads.add((device.process_index, tuple(ranges)))
    return sum(volume(box) for _, box in reads) / max(1, math.prod(shape))


def local_boxes(sharding: Sharding, shape: tuple[int, ...]) -> dict[Any, Box]:
    """Return the box of an array's shard on each device of this process."""
    indices = sharding.addressable_devices_indices_map(shape)
    return {device: index_box(index or (), shape) for device, index in indices.items()}


def index_box(index: Sequence[slice], shape: Sequence[int]) -> Box:
    """Convert the index of a shard, as JAX gives it, to the box of its elements."""
    return tuple(
        axis_slice.indices(extent)[:2] for axis_slice, extent in zip(index, shape, strict=True)
    )
