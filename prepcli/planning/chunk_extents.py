"""Extents of an output's data files: consecutive chunks with their checksum blocks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import sub

from prepcli.algebra.boxes import strides
from prepcli.planning.checksum_blocks import LeafBlocks, assign_block_numbers
from prepcli.planning.plan import OutputLeaf, PlacedChunks


@dataclass(frozen=True, slots=True)
class ChunkExtent:
    """Consecutive chunks of a leaf in a file.

    Attributes:
        file: Number of the file.
        offset: Offset of the first chunk.
        stride_nbytes: Bytes from one chunk to the next.
        placed_chunks: Indices of the chunks, in C order.
        blocks: Checksum blocks of the leaf.
    """

    file: int
    offset: int
    stride_nbytes: int
    placed_chunks: PlacedChunks
    blocks: LeafBlocks

    @property
    def chunk_count(self) -> int:
        """Number of chunks."""
        return math.prod(self._chunk_counts)

    @property
    def _chunk_counts(self) -> list[int]:
        return list(map(sub, self.placed_chunks.stop, self.placed_chunks.first))

    def first_block(self, position: int) -> int:
        """Return the number of the first checksum block of the extent's chunk `position`."""
        # E.g. chunks [2, 0] to [4, 3] have the strides (3, 1): position 4 is chunk [2 + 1, 0 + 1].
        index = []
        for first, stride in zip(self.placed_chunks.first, strides(self._chunk_counts)):
            index.append(first + position // stride)
            position %= stride
        return self.blocks.first_in_chunk(index)


def chunk_extents(leaves: Sequence[OutputLeaf]) -> list[ChunkExtent]:
    """Return the extents of output leaves, one per box of placed chunks, sorted by file and offset."""
    blocks = assign_block_numbers(
        (leaf.name, leaf.grid.shape, leaf.grid.chunk_shape, leaf.dtype) for leaf in leaves
    )
    extents: list[ChunkExtent] = []
    for leaf in leaves:
        for box in leaf.placed_chunks:
            chunks = box.chunks
            stride_nbytes = chunks.strides[-1] if chunks.strides else leaf.chunk_nbytes
            extents.append(
                ChunkExtent(chunks.file, chunks.offset, stride_nbytes, box, blocks[leaf.name])
            )
    return sorted(extents, key=lambda extent: (extent.file, extent.offset))


def count_blocks(extents: Sequence[ChunkExtent]) -> int:
    """Return the number of checksum blocks in all extents of an output."""
    return max((extent.blocks.stop_number for extent in extents), default=0)
