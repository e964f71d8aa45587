"""Shards of a leaf are copied to its chunks: every byte once, wherever the shards and the chunks end."""

from __future__ import annotations

import itertools
import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from prepcli.algebra.boxes import Box, strides
from prepcli.algebra.chunks import StridedChunks
from prepcli.algebra.grids import ChunkGrid
from prepcli.planning.plan import OutputLeaf, PlacedChunks
from prepcli.planning.shard_copies import shard_copies

ITEM_NBYTES = 4
GAP_NBYTES = 12  # bytes between two chunks


def divisors(n: int) -> list[int]:
    return [i for i in range(1, n + 1) if n % i == 0]


@st.composite
def leaves_and_shards(draw: st.DrawFn) -> tuple[OutputLeaf, list[list[Box]]]:
    """Return a leaf, and the shards that each process owns."""
    shape = tuple(draw(st.lists(st.sampled_from([1, 2, 3, 4, 6, 8]), max_size=3)))
    chunk_shape = tuple(draw(st.sampled_from(divisors(n))) for n in shape)
    shard_shape = tuple(draw(st.sampled_from(divisors(n))) for n in shape)
    count = draw(st.integers(1, 3))
    shards: list[list[Box]] = [[] for _ in range(count)]
    axes = [range(0, n, length) for n, length in zip(shape, shard_shape)]
    for starts in itertools.product(*axes):
        box = tuple((start, start + length) for start, length in zip(starts, shard_shape))
        shards[draw(st.integers(0, count - 1))].append(box)
    return _leaf(ChunkGrid(shape, chunk_shape), by_row=draw(st.booleans())), shards


def _leaf(grid: ChunkGrid, *, by_row: bool) -> OutputLeaf:
    """Return a leaf whose chunks are one group, or one group per index of the first dim in a file of its own."""
    counts = grid.chunk_counts
    rows = counts[0] if by_row and counts else 1
    chunk_nbytes = math.prod(grid.chunk_shape) * ITEM_NBYTES + GAP_NBYTES
    groups = []
    for row in range(rows):
        first = (row, *[0] * (len(counts) - 1)) if counts else ()
        stop = (row + 1 if rows > 1 else counts[0], *counts[1:]) if counts else ()
        extents = [high - low for low, high in zip(first, stop)]
        groups.append(
            PlacedChunks(first, stop, StridedChunks(row, 16, first, strides(extents, chunk_nbytes)))
        )
    return OutputLeaf(("x",), "int32", grid, tuple(groups))


def write(leaf: OutputLeaf, box: Box, *, values: np.ndarray, files: list[np.ndarray]) -> None:
    """Write a shard's bytes. A byte that is written twice is an error."""
    for part, copy in shard_copies(leaf, box):
        data = (
            np.ascontiguousarray(values[tuple(slice(*ends) for ends in part)])
            .reshape(-1)
            .view(np.uint8)
        )
        assert data.size == copy.nbytes
        for number, offset in enumerate(copy.run_offsets()):
            run = data[number * copy.run_nbytes : (number + 1) * copy.run_nbytes]
            target = files[copy.file][offset : offset + run.size]
            assert not target.any()
            target[...] = run


@given(leaves_and_shards())
def test_shards_write_every_byte_of_a_leaf_once(case: tuple[OutputLeaf, list[list[Box]]]):
    leaf, shards_by_process = case
    nonzero_bytes = np.arange(math.prod(leaf.grid.shape) * ITEM_NBYTES) % 251 + 1
    values = nonzero_bytes.astype(np.uint8).view(np.int32).reshape(leaf.grid.shape)
    nbytes = 16 + (leaf.chunk_nbytes + GAP_NBYTES) * math.prod(leaf.grid.chunk_counts)
    files = [np.zeros(nbytes, np.uint8) for _ in leaf.placed_chunks]
    for box in itertools.chain(*shards_by_process):
        write(leaf, box, values=values, files=files)
    for group in leaf.placed_chunks:
        for index in group.indices():
            file, offset = group.chunks.find(index)
            chunk = tuple(slice(i * n, (i + 1) * n) for i, n in zip(index, leaf.grid.chunk_shape))
            assert (
                files[file][offset : offset + leaf.chunk_nbytes].tobytes()
                == values[chunk].tobytes()
            )
    assert sum(np.count_nonzero(file) for file in files) == values.nbytes
