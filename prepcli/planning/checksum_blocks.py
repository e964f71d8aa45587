"""Checksum blocks: contiguous byte ranges of a leaf's chunks.

A reader of part of a checkpoint verifies only the blocks it touches. A block's number depends only on the
shape, chunk shape and dtype of the leaves: leaves are numbered in order, the chunks of a leaf in C order of its grid,
and the blocks of a chunk in byte order. File offsets and compression do not change it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from prepcli.algebra.boxes import strides
from prepcli.planning.tensors import itemsize

BLOCK_NBYTES = 1 << 20  # maximum size of a block


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
        return self.chunk_nbytes // self.group_nbytes * self._blocks_per_group

    @property
    def _blocks_per_group(self) -> int:
        return -(-self.group_nbytes // self.block_nbytes)

    def overlapping(self, start: int, stop: int) -> Iterator[ChecksumBlock]:
        """Yield the blocks that overlap bytes `start` to `stop` of the chunk, in order."""
        while start < stop:
            group, offset_in_group = divmod(start, self.group_nbytes)
            block_in_group = offset_in_group // self.block_nbytes
            block_start = group * self.group_nbytes + block_in_group * self.block_nbytes
            block_stop = min(block_start + self.block_nbytes, (group + 1) * self.group_nbytes)
            yield ChecksumBlock(
                group * self._blocks_per_group + block_in_group, block_start, block_stop
            )
            start = block_stop


def chunk_blocks(chunk_shape: Sequence[int], dtype: str) -> ChunkBlocks:
    """Return the division of a chunk into blocks of at most `BLOCK_NBYTES` where its shape allows that.

    Args:
        chunk_shape: Shape of the chunk.
        dtype: Dtype of its elements.

    Returns:
        The division. It depends on the arguments alone.
    """
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

    Args:
        leaves: Name, shape, chunk shape and dtype of each leaf.

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
