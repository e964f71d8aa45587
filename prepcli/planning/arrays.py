"""`Array`: one description of stored numbers, tensors as parts of stored arrays, and the checksum blocks of chunks.

Readers of formats yield Arrays. A listing prints them, a plan reads and writes them, and loading reads boxes of them. A
tensor of a model is an Array, or a part of one selected by an axis map (`MappedArray`), e.g. one layer of a stacked
leaf. Both have the same methods: a user of a tensor does not distinguish how it is stored.

A reader of part of a checkpoint verifies only the checksum blocks it touches. A block's number depends only on the
shape, chunk shape and dtype of the leaves: leaves are numbered in order, the chunks of a leaf in C order of its grid,
and the blocks of a chunk in byte order. File offsets and compression do not change it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from prepcli.algebra.axis_map import AxisMap, SizedAxis, TensorDim
from prepcli.algebra.boxes import Box, full_box, intersection, strides, volume
from prepcli.algebra.grids import (
    ArrayPart,
    ArrayParts,
    ChunkGrid,
    ChunkIndex,
    Chunks,
    ChunkTable,
    FilePosition,
    StoredRange,
    StoredValue,
    StridedChunks,
)
from prepcli.algebra.strided_copies import StridedCopy, box_copy, leaf_copies
from prepcli.planning.tensors import array_bits, itemsize

Shape = tuple[int, ...]
BLOCK_NBYTES = 1 << 20  # maximum size of a block


@dataclass(frozen=True, slots=True)
class Array:
    """Stored numbers, little endian.

    Attributes:
        name: Name in the checkpoint.
        dtype: Dtype of the elements, a key of `ITEM_BITS`.
        shape: Shape of the array.
        chunk_shape: Shape of a chunk, at least 1 along each dim. The last chunk along a dim may extend past the array.
            An array in parts is one chunk.
        chunks: Where the chunks or parts are stored.
        strides: Bytes between neighbouring elements of a chunk along each dim. None for C order.
        path: Keys from the root of a tree to the array. Empty for a format without trees.
        codecs: Names of the codecs of each chunk in encoding order, e.g. ("zstd", "crc32c").
    """

    name: str
    dtype: str
    shape: Shape
    chunk_shape: Shape
    chunks: Chunks
    strides: Shape | None = None
    path: tuple[str | int, ...] = ()
    codecs: tuple[str, ...] = ()
    # A tensor that is an array of its own needs no axis map.
    axis_map: ClassVar[None] = None

    @property
    def array(self) -> Array:
        """The array itself. See `MappedArray.array`."""
        return self

    @property
    def nbytes(self) -> int:
        """Size of the elements in bytes."""
        return array_bits(self.dtype, self.shape) // 8

    @property
    def chunk_nbytes(self) -> int:
        """Size of a chunk in bytes, padding included."""
        return math.prod(self.chunk_shape) * itemsize(self.dtype)

    @property
    def grid(self) -> ChunkGrid:
        """The chunk grid."""
        return ChunkGrid(self.shape, self.chunk_shape)

    @property
    def position(self) -> FilePosition:
        """File number and offset of the first chunk in the files."""
        if isinstance(self.chunks, StridedChunks):
            return self.chunks.file, self.chunks.offset
        return min(self.chunks.positions(), default=(0, 0))

    @property
    def file(self) -> int:
        """File number of the first chunk in the files."""
        return self.position[0]

    @property
    def offset(self) -> int:
        """Offset of the first chunk in the files."""
        return self.position[1]

    @property
    def byte_range(self) -> tuple[int, int]:
        """First and stop byte of an array of one chunk in its file."""
        last = 0
        if self.nbytes:
            for extent, step in zip(self.shape, self.element_strides):
                last += (extent - 1) * step
            last += itemsize(self.dtype)
        return self.offset, self.offset + last

    @property
    def is_contiguous(self) -> bool:
        """Whether the array is one run of a file in C order."""
        return self.strides is None and self._is_one_chunk

    @property
    def _is_one_chunk(self) -> bool:
        if not isinstance(self.chunks, StridedChunks):
            return False
        return all(n <= length for n, length in zip(self.shape, self.chunk_shape))

    @property
    def is_direct(self) -> bool:
        """Whether every element is in a byte range of a file, without codecs."""
        return not self.codecs and self.chunks.is_direct

    def stored_chunk(self, index: ChunkIndex) -> StoredValue | None:
        """Return the place of a chunk as stored, or its bytes if an index has them. None for a chunk of zeros."""
        if isinstance(self.chunks, ChunkTable) and self.chunks.nbytes:
            return self.chunks.stored(index)
        assert not isinstance(self.chunks, ArrayParts)
        return StoredRange(*self.chunks.find(index), self.chunk_nbytes)

    def stored_chunks(self) -> Iterator[tuple[ChunkIndex, StoredValue]]:
        """Yield index and value of each stored chunk, in C order."""
        for index in itertools.product(*map(range, self.grid.chunk_counts)):
            value = self.stored_chunk(index)
            if value is not None:
                yield index, value

    @property
    def element_strides(self) -> Shape:
        """Bytes between neighbouring elements of a chunk along each dim."""
        return self.strides or strides(self.chunk_shape, itemsize(self.dtype))

    def with_array(self, array: Array) -> Array:
        """Return another array. See `MappedArray.with_array`."""
        return array

    def in_file(self, file: int) -> Array:
        """Return an array of one chunk at the same offset of another file."""
        return whole_array(self.name, self.dtype, self.shape, (file, self.offset), self.strides)

    def moved(self, first_file: int) -> Array:
        """Return the same array after `first_file` files were put before its files."""
        return replace(self, chunks=self.chunks.moved(first_file))

    def permuted(self, order: Sequence[int]) -> Array:
        """Return a view of an array of one chunk or in parts, with dim `order[i]` as dim i."""
        view = replace(
            self,
            shape=tuple(self.shape[dim] for dim in order),
            chunk_shape=tuple(self.chunk_shape[dim] for dim in order),
            strides=tuple(self.element_strides[dim] for dim in order),
        )
        if not isinstance(self.chunks, ArrayParts):
            return view
        parts = []
        for part in self.chunks.parts:
            box = tuple(part.box[dim] for dim in order)
            parts.append(part._replace(box=box, strides=tuple(part.strides[dim] for dim in order)))
        return replace(view, chunks=ArrayParts(tuple(parts)), strides=None)

    def cut(self, axis: int, length: int) -> Array | None:
        """Return a view of the first indices along an axis. None if the array is not one chunk."""
        if not self._is_one_chunk:
            return None
        shape = (*self.shape[:axis], length, *self.shape[axis + 1 :])
        view = whole_array(self.name, self.dtype, shape, self.position, self.strides)
        if axis and self.strides is None:
            return replace(view, strides=self.element_strides)
        return view

    def copies(self, box: Box, window: Box | None = None) -> Iterator[StridedCopy]:
        """Yield the copies between a box of the array and byte ranges of its files.

        Args:
            box: The box.
            window: Tensor offsets count the bytes of this box of the array in C order. None for the whole array.
        """
        window = window or full_box(self.shape)
        if isinstance(self.chunks, ArrayParts):
            for part in self.chunks.parts:
                common = intersection(part.box, box)
                if volume(common):
                    yield box_copy(common, window, part, itemsize(self.dtype))
        elif self._is_one_chunk:
            whole = ArrayPart(full_box(self.shape), *self.position, self.element_strides)
            yield box_copy(box, window, whole, itemsize(self.dtype))
        else:
            yield from self.mapped().copies(box, window)

    def mapped(self) -> MappedArray:
        """Return the same tensor with the identity as its axis map."""
        return MappedArray(identity_axis_map(self.name, self.shape), (), self)

    def part(
        self, axis_map: AxisMap, stacked_indices: tuple[tuple[str, int], ...] = ()
    ) -> MappedArray:
        """Return the tensor of a part of this array.

        Args:
            axis_map: Maps the elements of the tensor to the array's.
            stacked_indices: Name and index of each stacked axis in the tensor's name, e.g. (("layers", 3),).
        """
        first, stop = chunk_group(axis_map, stacked_indices, self.grid)
        array = replace(self, chunks=self.chunks.within(first, stop))
        return MappedArray(axis_map, stacked_indices, array)


@dataclass(frozen=True, slots=True)
class MappedArray:
    """A tensor as a part of a stored array: e.g. the weight of layer 3 in the stacked leaf of all layers.

    Attributes:
        axis_map: Maps the tensor's elements to the array's.
        stacked_indices: Name and index of each stacked axis in the tensor's name, e.g. (("layers", 3),).
        array: The array. Its chunks may be only the ones of the tensor.
        starts: First index of the tensor's part along each dim of the array. None if the axis map covers every dim
            from 0.
    """

    axis_map: AxisMap
    stacked_indices: tuple[tuple[str, int], ...]
    array: Array
    starts: Shape | None = None
    is_contiguous: ClassVar[bool] = False

    @property
    def position(self) -> FilePosition:
        """File number and offset of the array's first chunk in the files."""
        return self.array.position

    def with_array(self, array: Array) -> MappedArray:
        """Return the same tensor in another array of the same shape."""
        return replace(self, array=array)

    def moved(self, first_file: int) -> MappedArray:
        """Return the same tensor after `first_file` files were put before its files."""
        return replace(self, array=self.array.moved(first_file))

    def permuted(self, order: Sequence[int]) -> MappedArray:
        """Return a view of the tensor with dim `order[i]` as dim i."""
        dims = tuple(self.axis_map.source_dims[dim] for dim in order)
        return replace(self, axis_map=replace(self.axis_map, source_dims=dims))

    def cut(self, axis: int, length: int) -> None:
        """Return None: the first indices of the tensor are not one box of the array in general."""

    def copies(self, box: Box, window: Box | None = None) -> Iterator[StridedCopy]:
        """Yield the copies between a box of the tensor and byte ranges of files. See `Array.copies`."""
        array = self.array
        return leaf_copies(
            self.axis_map,
            box,
            window,
            stacked_indices=self.stacked_indices,
            starts=self.starts,
            chunks=array.chunks,
            chunk_shape=array.chunk_shape,
            element_strides=array.element_strides,
            itemsize=itemsize(array.dtype),
        )

    def mapped(self) -> MappedArray:
        """Return the tensor itself. See `Array.mapped`."""
        return self


# Where a tensor is stored. Most tensors are in one location, e.g. a fused qkv in the leaves of q, k and v is in three.
Location = Array | MappedArray
Locations = tuple[Location, ...]


def whole_array(
    name: str, dtype: str, shape: Shape, position: FilePosition, strides: Shape | None = None
) -> Array:
    """Return an array of one chunk at a position (file number, offset).

    Args:
        name: Name in the checkpoint.
        dtype: Dtype of the elements.
        shape: Shape of the array.
        position: File number and offset of its first element.
        strides: Bytes between neighbouring elements along each dim, for a view. None for C order.
    """
    chunk_shape = shape
    if 0 in shape:
        # A chunk has at least one element in each dim, also in an empty array.
        chunk_shape = tuple(max(1, extent) for extent in shape)
    zeros = (0,) * len(shape)
    return Array(name, dtype, shape, chunk_shape, StridedChunks(*position, zeros, zeros), strides)


def parted_array(name: str, dtype: str, shape: Shape, parts: ArrayParts) -> Array:
    """Return an array in parts, each with a place and strides of its own."""
    chunk_shape = tuple(max(1, extent) for extent in shape)
    return Array(name, dtype, shape, chunk_shape, parts)


def location_copies(
    locations: Sequence[Location], box: Box, window: Box | None = None
) -> Iterator[StridedCopy]:
    """Yield the copies between a box of a tensor and all of its locations. See `Array.copies`."""
    for location in locations:
        yield from location.copies(box, window)


def identity_axis_map(name: str, shape: Shape) -> AxisMap:
    """Return the axis map of a leaf equal to one tensor, dim by dim."""
    factors = tuple(SizedAxis(f"d{axis}", extent) for axis, extent in enumerate(shape))
    source_dims = tuple(TensorDim(factor.extent, 0, (factor,)) for factor in factors)
    return AxisMap(name, tuple((factor,) for factor in factors), (name,), source_dims)


def chunk_group(
    axis_map: AxisMap, stacked_indices: Sequence[tuple[str, int]], grid: ChunkGrid
) -> tuple[ChunkIndex, ChunkIndex]:
    """Return the box of chunks stored next to each other for a tensor, as (first, stop) chunk indices.

    The box spans the whole chunk grid, except along dims that stack source tensors, such as `layers`. Along these dims
    it holds only the chunk of the tensor.
    """
    # E.g. the leaf [layers=4, 3, 2] in chunks [1, 1, 2] has the grid [4, 3, 1]. Layer 2 takes the chunks
    # [2, 0, 0] to [3, 3, 1]: a tensor is read once, and its chunks are written next to each other.
    stacked = dict(stacked_indices)
    first: list[int] = []
    stop: list[int] = []
    for dim, length, count in zip(axis_map.leaf_dims, grid.chunk_shape, grid.chunk_counts):
        is_stacked = dim and all(factor.atom in stacked for factor in dim)
        if not is_stacked:
            first.append(0)
            stop.append(count)
            continue
        # A dim of several stacked atoms counts like digits: (groups=2 layers=3) at 1, 2 is 1 * 3 + 2.
        index = 0
        for factor in dim:
            index = index * factor.extent + stacked[factor.atom]
        first.append(index // length)
        stop.append(index // length + 1)
    return tuple(first), tuple(stop)


@dataclass(frozen=True, slots=True)
class ChecksumBlock:
    """Bytes `start` to `stop` of a chunk. `number` counts from the chunk's first block."""

    number: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class ChunkBlocks:
    """The division of a chunk into blocks.

    Attributes:
        axis: Axis of the split. A block covers the dims after it completely.
        rows: Maximum number of indices of `axis` in a block.
        block_nbytes: Size of a full block.
        group_nbytes: Size of one index of the dim before `axis`. The last block of each group may be shorter.
        chunk_nbytes: Size of the chunk.
    """

    axis: int
    rows: int
    block_nbytes: int
    group_nbytes: int
    chunk_nbytes: int

    @property
    def block_count(self) -> int:
        """Number of blocks in the chunk."""
        if not self.group_nbytes:
            return 0
        blocks_per_group = -(-self.group_nbytes // self.block_nbytes)
        return self.chunk_nbytes // self.group_nbytes * blocks_per_group

    def overlapping(self, start: int, stop: int) -> Iterator[ChecksumBlock]:
        """Yield the blocks that overlap bytes `start` to `stop` of the chunk, in order."""
        if start >= stop:
            return
        blocks_per_group = -(-self.group_nbytes // self.block_nbytes)
        while start < stop:
            group, offset_in_group = divmod(start, self.group_nbytes)
            block_in_group = offset_in_group // self.block_nbytes
            block_start = group * self.group_nbytes + block_in_group * self.block_nbytes
            block_stop = min(block_start + self.block_nbytes, (group + 1) * self.group_nbytes)
            yield ChecksumBlock(group * blocks_per_group + block_in_group, block_start, block_stop)
            start = block_stop


def chunk_blocks(chunk_shape: Sequence[int], dtype: str) -> ChunkBlocks:
    """Return the division of a chunk into blocks of at most `BLOCK_NBYTES` where its shape allows that."""
    item_nbytes = itemsize(dtype)
    byte_strides = strides(chunk_shape, item_nbytes)
    nbytes = math.prod(chunk_shape) * item_nbytes
    if not chunk_shape:
        return ChunkBlocks(0, 1, nbytes, nbytes, nbytes)
    # A float32 chunk [8, 600, 1024] has the byte strides 2,457,600, 4,096 and 4. Blocks are split on
    # axis 1, with 256 rows of 4,096 bytes each: 3 blocks per index of axis 0, of 256, 256 and 88 rows.
    axis = 0
    while axis < len(chunk_shape) - 1 and byte_strides[axis] > BLOCK_NBYTES:
        axis += 1
    rows = max(1, BLOCK_NBYTES // byte_strides[axis])
    return ChunkBlocks(
        axis, rows, rows * byte_strides[axis], chunk_shape[axis] * byte_strides[axis], nbytes
    )


@dataclass(frozen=True, slots=True)
class LeafBlocks:
    """The numbered blocks of a leaf.

    Attributes:
        first_number: Number of the leaf's first block.
        chunk_counts: Number of chunks along each dim.
        per_chunk: The division of a chunk into blocks. It is the same for all chunks.
    """

    first_number: int
    chunk_counts: tuple[int, ...]
    per_chunk: ChunkBlocks

    @property
    def stop_number(self) -> int:
        """Number of the last block, plus one."""
        return self.first_number + math.prod(self.chunk_counts) * self.per_chunk.block_count

    def first_in_chunk(self, chunk_index: Sequence[int]) -> int:
        """Return the number of a chunk's first block."""
        flat_index = sum(i * stride for i, stride in zip(chunk_index, strides(self.chunk_counts)))
        return self.first_number + flat_index * self.per_chunk.block_count


# name, shape, chunk shape, dtype
LeafShape = tuple[str, Sequence[int], Sequence[int], str]


def assign_block_numbers(leaves: Iterable[LeafShape]) -> dict[str, LeafBlocks]:
    """Assign numbers to the blocks of leaves, in the order of the leaves.

    Returns:
        The numbered blocks, by leaf name.
    """
    blocks: dict[str, LeafBlocks] = {}
    first = 0
    for name, shape, chunk_shape, dtype in leaves:
        chunk_counts = tuple(-(-extent // length) for extent, length in zip(shape, chunk_shape))
        blocks[name] = LeafBlocks(first, chunk_counts, chunk_blocks(chunk_shape, dtype))
        first = blocks[name].stop_number
    return blocks
