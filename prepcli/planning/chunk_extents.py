"""Where the chunks of an output lie in its files, and which checksum blocks they have. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from prepcli.planning.boxes import strides
from prepcli.planning.checksum_blocks import LeafBlocks, number_blocks
from prepcli.planning.plan import OutputLeaf, PlacedChunks


@dataclass(frozen=True, slots=True)
class ChunkExtent:
    """Chunks that lie one after another in a file, `slot_nbytes` from one to the next."""

    file: int
    offset: int
    stride_nbytes: int
    placed_chunks: PlacedChunks
    blocks: LeafBlocks

    @property
    def chunk_count(self) -> int:
        """Chunks."""
        return math.prod(self._chunk_counts)

    @property
    def _chunk_counts(self) -> list[int]:
        return [stop - first for first, stop in zip(self.placed_chunks.first, self.placed_chunks.stop)]

    def first_block(self, position: int) -> int:
        """Number of the first block of chunk `at` of the extent."""
        index = []
        for first, step in zip(self.placed_chunks.first, strides(self._chunk_counts)):
            index.append(first + position // step)
            position %= step
        return self.blocks.first_in_chunk(index)


def leaf_blocks(leaves: Iterable[OutputLeaf]) -> dict[str, LeafBlocks]:
    """The numbered blocks of leaves that are written."""
    return number_blocks((leaf.name, leaf.grid.shape, leaf.grid.chunk_shape, leaf.dtype) for leaf in leaves)


def chunk_extents(leaves: Sequence[OutputLeaf], blocks: Mapping[str, LeafBlocks]) -> list[ChunkExtent]:
    """Where the chunks of leaves lie in files, in the order of files and offsets."""
    found = []
    for leaf in leaves:
        for placed in leaf.placed_chunks:
            lattice = placed.placement
            slot = lattice.strides[-1] if lattice.strides else leaf.chunk_nbytes
            found.append(ChunkExtent(lattice.file, lattice.offset, slot, placed, blocks[leaf.name]))
    return sorted(found, key=lambda extent: (extent.file, extent.offset))
