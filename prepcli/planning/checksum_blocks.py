"""Checksum blocks: contiguous parts of a leaf's chunks, numbered by shape, chunk and dtype alone. Pure.

A block is the unit of checking where a reader takes parts of a checkpoint. Its number does not depend on where chunks
lie in files, nor on compression: leaves in their order, chunks in C order of the grid, blocks in order of their bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from prepcli.planning.boxes import strides
from prepcli.planning.tensors import itemsize

BLOCK_NBYTES = 1 << 20  # most bytes of a block


@dataclass(frozen=True, slots=True)
class ChecksumBlock:
    """Bytes `low` to `high` of a chunk; `number` counts from the chunk's first block."""

    number: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class ChunkBlocks:
    """How a chunk is cut: runs of at most `rows` steps along `axis`, whole along the dims after it."""

    axis: int
    rows: int
    block_nbytes: int  # of a whole block
    group_nbytes: int  # of one step of the dim before `axis`: its last block may be shorter
    chunk_nbytes: int

    @property
    def block_count(self) -> int:
        """Blocks of the chunk."""
        return self.chunk_nbytes // self.group_nbytes * self._blocks_per_group if self.group_nbytes else 0

    @property
    def _blocks_per_group(self) -> int:
        return -(-self.group_nbytes // self.block_nbytes)

    def overlapping(self, start: int, stop: int) -> Iterator[ChecksumBlock]:
        """The blocks that hold bytes `start` to `stop` of the chunk, in order."""
        while start < stop:
            group, within = divmod(start, self.group_nbytes)
            at = within // self.block_nbytes
            low = group * self.group_nbytes + at * self.block_nbytes
            high = min(low + self.block_nbytes, (group + 1) * self.group_nbytes)
            yield ChecksumBlock(group * self._blocks_per_group + at, low, high)
            start = high


def chunk_blocks(chunk_shape: Sequence[int], dtype: str) -> ChunkBlocks:
    """Cut a chunk into blocks."""
    item = itemsize(dtype)
    steps, nbytes = strides(chunk_shape, item), math.prod(chunk_shape) * item
    if not chunk_shape:
        return ChunkBlocks(0, 1, nbytes, nbytes, nbytes)
    axis = next((n for n, step in enumerate(steps) if step <= BLOCK_NBYTES), len(chunk_shape) - 1)
    rows = max(1, BLOCK_NBYTES // steps[axis])
    return ChunkBlocks(axis, rows, rows * steps[axis], chunk_shape[axis] * steps[axis], nbytes)


@dataclass(frozen=True, slots=True)
class LeafBlocks:
    """The blocks of a leaf: each chunk of `grid` has `chunk.count`, from number `first` on."""

    first_number: int
    chunk_counts: tuple[int, ...]
    per_chunk: ChunkBlocks

    @property
    def stop_number(self) -> int:
        """One past the last number."""
        return self.first_number + math.prod(self.chunk_counts) * self.per_chunk.block_count

    def first_in_chunk(self, chunk_index: Sequence[int]) -> int:
        """Number of the first block of a chunk."""
        flat = sum(i * step for i, step in zip(chunk_index, strides(self.chunk_counts)))
        return self.first_number + flat * self.per_chunk.block_count


LeafShape = tuple[str, Sequence[int], Sequence[int], str]  # name, shape, chunk, dtype


def number_blocks(leaves: Iterable[LeafShape]) -> dict[str, LeafBlocks]:
    """Number the blocks of leaves, in their order."""
    found: dict[str, LeafBlocks] = {}
    first = 0
    for name, shape, chunk, dtype in leaves:
        grid = tuple(-(-extent // length) for extent, length in zip(shape, chunk))
        found[name] = LeafBlocks(first, grid, chunk_blocks(chunk, dtype))
        first = found[name].stop_number
    return found
