"""Where the chunks of an output lie in its files, and which checksum blocks they have. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from prepcli.planning.boxes import strides
from prepcli.planning.checksum_blocks import LeafBlocks, number_blocks
from prepcli.planning.plan import Leaf, Placed


@dataclass(frozen=True, slots=True)
class Extent:
    """Chunks that lie one after another in a file, `slot_nbytes` from one to the next."""

    file: int
    offset: int
    slot_nbytes: int
    placed: Placed
    blocks: LeafBlocks

    @property
    def count(self) -> int:
        """Chunks."""
        return math.prod(self._counts)

    @property
    def _counts(self) -> list[int]:
        return [stop - first for first, stop in zip(self.placed.first, self.placed.stop)]

    def first_block(self, at: int) -> int:
        """Number of the first block of chunk `at` of the extent."""
        index = []
        for first, step in zip(self.placed.first, strides(self._counts)):
            index.append(first + at // step)
            at %= step
        return self.blocks.first_of(index)


def leaf_blocks(leaves: Iterable[Leaf]) -> dict[str, LeafBlocks]:
    """The numbered blocks of leaves that are written."""
    return number_blocks((leaf.name, leaf.grid.shape, leaf.grid.chunk, leaf.dtype) for leaf in leaves)


def extents(leaves: Sequence[Leaf], blocks: Mapping[str, LeafBlocks]) -> list[Extent]:
    """Where the chunks of leaves lie in files, in the order of files and offsets."""
    found = []
    for leaf in leaves:
        for placed in leaf.placed:
            lattice = placed.places
            slot = lattice.strides[-1] if lattice.strides else leaf.chunk_nbytes
            found.append(Extent(lattice.file, lattice.offset, slot, placed, blocks[leaf.name]))
    return sorted(found, key=lambda extent: (extent.file, extent.offset))
