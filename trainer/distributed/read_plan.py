"""Plans of loading a sharded leaf in several processes such that each byte is read once in the whole job. Pure.

A leaf is loaded in row blocks. A row block is a range of rows: of indices along one dim. The devices that
need rows of the same block read disjoint rows of it, and exchange them. A mesh axis that splits
another dim of the leaf exchanges by all-to-all, an axis that replicates the leaf by all-gather.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from prepcli.algebra.boxes import Box
from prepcli.models.mesh import MeshAxes

# Largest row block on a device after the exchange. One unit per device may be larger.
BLOCK_NBYTES = 16 << 20
# Row blocks are whole units that all devices divide evenly, up to this many bytes.
MAX_BLOCK_NBYTES = 2 * BLOCK_NBYTES


@dataclass(frozen=True, slots=True)
class ShardedLeaf:
    """A leaf on a device mesh.

    Attributes:
        shape: Its shape.
        split_axes: Mesh axes that split each dim, major first.
        mesh_sizes: Name and size of each mesh axis.
    """

    shape: tuple[int, ...]
    split_axes: tuple[MeshAxes, ...]
    mesh_sizes: tuple[tuple[str, int], ...]

    @property
    def num_devices(self) -> int:
        """Number of devices of the mesh."""
        return math.prod(size for _, size in self.mesh_sizes)

    def num_shards(self, dim: int) -> int:
        """Return the number of shards along a dim."""
        sizes = dict(self.mesh_sizes)
        return math.prod(sizes[axis] for axis in self.split_axes[dim])

    def shard_extent(self, dim: int) -> int:
        """Return the extent of a shard along a dim."""
        return self.shape[dim] // self.num_shards(dim)

    def shard_index(self, dim: int, coordinates: Mapping[str, int]) -> int:
        """Return the index along a dim of the shard of the device at some mesh coordinates."""
        return self.rank(self.split_axes[dim], coordinates)

    def rank(self, axes: Iterable[str], coordinates: Mapping[str, int]) -> int:
        """Return the rank of a device among those that differ in `axes` only. The first axis is the major one."""
        sizes = dict(self.mesh_sizes)
        # Row-major: the coordinates 1 and 3 on axes of sizes 2 and 4 have rank 1 * 4 + 3 = 7.
        rank = 0
        for axis in axes:
            rank = rank * sizes[axis] + coordinates[axis]
        return rank


@dataclass(frozen=True, slots=True)
class LeafBlock:
    """A range of rows of a leaf. The devices read and exchange these rows together.

    Attributes:
        start: Index of its first element in the leaf. In `kept_dims` it is relative to the device's
            shard.
        rows: Number of rows.
        rows_per_device: Number of rows that a device reads. The last devices may read fewer.
    """

    start: tuple[int, ...]
    rows: int
    rows_per_device: int


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """The division of a leaf into row blocks, and of each block between devices.

    Attributes:
        leaf: The leaf.
        row_dim: Dim along which devices divide a block. Its indices are called rows.
        outer_dims: Dims with one index per block.
        unit_rows: Rows that are read together.
        keeps_rows: Whether a device reads only rows of its own shard. Otherwise the whole block is
            gathered, because shards begin within a unit.
    """

    leaf: ShardedLeaf
    row_dim: int
    outer_dims: tuple[int, ...]
    unit_rows: int
    keeps_rows: bool

    @property
    def kept_dims(self) -> tuple[int, ...]:
        """Dims with the same split before and after the exchange."""
        if self.keeps_rows:
            return (*self.outer_dims, self.row_dim)
        return self.outer_dims

    @property
    def collectives(self) -> tuple[tuple[str, int | None], ...]:
        """Mesh axes of the collectives in their order, each with the dim that it splits, or None for an all-gather."""
        kept: set[str] = set()
        for dim in self.kept_dims:
            kept.update(self.leaf.split_axes[dim])
        moved: list[tuple[str, int]] = []
        for dim, axes in enumerate(self.leaf.split_axes):
            if dim != self.row_dim:
                moved += [(axis, dim) for axis in axes if axis not in kept]
        moved_axes = {axis for axis, _ in moved}
        gathered = [
            axis
            for axis, size in self.leaf.mesh_sizes
            if size > 1 and axis not in kept | moved_axes
        ]
        return (*moved, *((axis, None) for axis in gathered))

    @property
    def reader_axes(self) -> MeshAxes:
        """Mesh axes that divide a block between its readers, major axis first.

        This is the reverse of the order of the collectives: the last collective joins the largest parts.
        """
        return tuple(axis for axis, _ in reversed(self.collectives))

    @property
    def num_readers(self) -> int:
        """Number of devices that divide a block."""
        sizes = dict(self.leaf.mesh_sizes)
        return math.prod(sizes[axis] for axis in self.reader_axes)

    @property
    def num_rows(self) -> int:
        """Number of rows to divide into blocks."""
        if self.keeps_rows:
            return self.leaf.shard_extent(self.row_dim)
        return self.leaf.shape[self.row_dim]

    @property
    def num_row_units(self) -> int:
        """Number of units of `unit_rows` rows. A block has whole units."""
        return -(-self.num_rows // self.unit_rows)

    def min_block_nbytes(self, itemsize: int) -> int:
        """Return the size of the smallest block on a device after the exchange: one unit of each device."""
        sizes = dict(self.leaf.mesh_sizes)
        num_shards = math.prod(sizes[axis] for axis, dim in self.collectives if dim is not None)
        inner = (
            n
            for dim, n in enumerate(self.leaf.shape)
            if dim not in (*self.outer_dims, self.row_dim)
        )
        return self.num_readers * self.unit_rows * math.prod(inner) * itemsize // num_shards

    def row_blocks(self, itemsize: int) -> Iterator[LeafBlock]:
        """Yield the row blocks in the order of their elements."""
        # Units of each reader per block. The number of blocks is rounded up first, then the units are
        # spread evenly over them, so that the last block is not a small rest.
        max_nbytes = BLOCK_NBYTES
        if any(dim is not None for _, dim in self.collectives):
            # The parts of an all-to-all have the size of the block, so a device has more copies of it.
            max_nbytes = BLOCK_NBYTES // 2
        max_units = max(1, max_nbytes // self.min_block_nbytes(itemsize))
        num_blocks = -(-self.num_row_units // (self.num_readers * max_units))
        units = -(-self.num_row_units // (self.num_readers * num_blocks))
        step = units * self.num_readers * self.unit_rows
        outer = [
            range(self.leaf.shard_extent(dim)) if dim in self.outer_dims else range(1)
            for dim in range(len(self.leaf.shape))
        ]
        for index in itertools.product(*outer):
            for first in range(0, self.num_rows, step):
                rows = min(step, self.num_rows - first)
                start = (*index[: self.row_dim], first, *index[self.row_dim + 1 :])
                yield LeafBlock(start, rows, self._rows_per_device(rows))

    def _rows_per_device(self, rows: int) -> int:
        num_units = -(-rows // self.unit_rows)
        return -(-num_units // self.num_readers) * self.unit_rows

    def part_shape(self, block: LeafBlock) -> tuple[int, ...]:
        """Return the shape of a device's part of a block."""
        shape = [
            1 if dim in self.outer_dims else extent for dim, extent in enumerate(self.leaf.shape)
        ]
        shape[self.row_dim] = block.rows_per_device
        return tuple(shape)

    def all_parts_shape(self, block: LeafBlock) -> tuple[int, ...]:
        """Return the global shape of the sharded array in which each device has its part of a block."""
        shape = list(self.part_shape(block))
        for dim in self.kept_dims:
            shape[dim] *= self.leaf.num_shards(dim)
        shape[self.row_dim] *= self.num_readers
        return tuple(shape)

    def box(self, block: LeafBlock, coordinates: Mapping[str, int]) -> Box:
        """Return the part of a block of rows that a device reads, as a box of the leaf. It may be empty.

        Args:
            block: The block.
            coordinates: Mesh coordinates of the device.
        """
        box = [(0, extent) for extent in self.leaf.shape]
        for dim in self.outer_dims:
            index = (
                self.leaf.shard_index(dim, coordinates) * self.leaf.shard_extent(dim)
                + block.start[dim]
            )
            box[dim] = (index, index + 1)
        first = block.start[self.row_dim]
        if self.keeps_rows:
            shard_start = self.leaf.shard_index(self.row_dim, coordinates) * self.num_rows
        else:
            shard_start = 0
        # Example: 10 rows in parts of 3 are [0, 3), [3, 6), [6, 9) and [9, 10). A fifth reader would begin
        # at row 12, beyond the block: `min` makes its box [10, 10), which is empty.
        low = min(block.rows, self.leaf.rank(self.reader_axes, coordinates) * block.rows_per_device)
        high = min(block.rows, low + block.rows_per_device)
        box[self.row_dim] = (shard_start + first + low, shard_start + first + high)
        return tuple(box)


def choose_read_plan(leaf: ShardedLeaf, unit: Sequence[int], itemsize: int) -> ReadPlan | None:
    """Choose how devices divide a leaf.

    The best dim has small blocks that all devices divide evenly. Among them, dims with shards
    that begin with a unit need the least communication. The first dim has the longest contiguous
    byte ranges.

    Args:
        leaf: The leaf.
        unit: Shape of the boxes of the leaf that are read together.
        itemsize: Bytes of an exchanged element.

    Returns:
        The plan, or None if one device should read the whole leaf, which is smaller than one block.
    """
    plans = list(_candidate_plans(leaf, unit))
    if not plans:
        return None

    def cost(plan: ReadPlan) -> tuple[bool, bool, bool, int]:
        nbytes = plan.min_block_nbytes(itemsize)
        # With 4 or more units per reader the largest share is less than a quarter above the mean.
        is_even = (
            plan.num_row_units % plan.num_readers == 0 or plan.num_row_units >= 4 * plan.num_readers
        )
        is_small = nbytes <= MAX_BLOCK_NBYTES
        # False sorts before True: small blocks first, then even ones, then plans that keep rows.
        return (not is_small, not is_even, not plan.keeps_rows, 0 if is_small else nbytes)

    best = min(plans, key=cost)
    if best.min_block_nbytes(itemsize) > math.prod(leaf.shape) * itemsize:
        return None
    return best


def _candidate_plans(leaf: ShardedLeaf, unit: Sequence[int]) -> Iterator[ReadPlan]:
    """Yield a plan for each dim that can be the row dim.

    A row dim has more than one unit. Each dim before it has a single unit, or units of extent 1.
    """
    outer: list[int] = []
    for dim, extent in enumerate(leaf.shape):
        if extent <= unit[dim]:
            continue
        is_aligned = leaf.num_shards(dim) == 1 or leaf.shard_extent(dim) % unit[dim] == 0
        yield ReadPlan(leaf, dim, tuple(outer), unit[dim], is_aligned)
        # Dims before the row dim have one index per block, so a unit must have extent 1 in each of
        # them.
        if unit[dim] > 1:
            return
        outer.append(dim)


def aligned_row_blocks(box: Box, unit: Sequence[int], max_volume: int) -> Iterator[Box]:
    """Split a box of a leaf into row blocks that begin and end with a unit, except at the edges of the box.

    Args:
        box: The box.
        unit: Shape of the boxes of the leaf that are read together.
        max_volume: Maximum number of elements of a block with several units.

    Yields:
        Boxes that cover the box, each element once, in the order of their elements.
    """
    lengths = list(unit)
    # From the innermost dim outwards: each dim takes as many units as `max_volume` allows and the
    # box needs.
    for dim, (low, high) in reversed(list(enumerate(box))):
        num_units = max_volume // max(1, math.prod(lengths))
        lengths[dim] *= max(1, min(num_units, -(-high // unit[dim]) - low // unit[dim]))
    # Blocks begin at multiples of their length, even if the box does not: [3, 9) by 4 -> 0, 4, 8.
    starts = [range(low // step * step, high, step) for (low, high), step in zip(box, lengths)]
    for corner in itertools.product(*starts):
        yield tuple(
            (max(low, start), min(high, start + step))
            for start, step, (low, high) in zip(corner, lengths, box)
        )


def read_ratio(
    boxes_by_process: Mapping[int, Iterable[Box]], shape: Sequence[int], unit: Sequence[int]
) -> float:
    """Return the elements that all processes read, divided by the elements of the leaf, if each reads its own boxes.

    Boxes of one process that touch the same units share one read.

    Args:
        boxes_by_process: Boxes of the leaf that each process needs.
        shape: Shape of the leaf.
        unit: Shape of the boxes that are read together.
    """
    total = 0
    for boxes in boxes_by_process.values():
        widened = {_widen_box(box, unit, shape) for box in boxes}
        for box in widened:
            total += math.prod(high - low for low, high in box)
    return total / max(1, math.prod(shape))


def _widen_box(box: Box, unit: Sequence[int], shape: Sequence[int]) -> Box:
    """Return the units that a box touches, e.g. [3, 9) with units of 4 -> [0, 12)."""
    ranges: list[tuple[int, int]] = []
    for (low, high), length, extent in zip(box, unit, shape, strict=True):
        # The last unit may reach beyond the end of the leaf.
        ranges.append((low // length * length, min(-(-high // length) * length, extent)))
    return tuple(ranges)
