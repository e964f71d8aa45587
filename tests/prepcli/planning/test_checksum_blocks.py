"""Checksum blocks: every byte of every chunk is in exactly one block, and each block has a unique number."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prepcli.planning import checksum_blocks
from prepcli.planning.checksum_blocks import assign_block_numbers, chunk_blocks

CHUNKS = st.lists(st.integers(1, 9), max_size=4).map(tuple)


@given(
    chunk=CHUNKS,
    dtype=st.sampled_from(["int8", "float16", "float64"]),
    block_nbytes=st.integers(8, 200),
)
def test_blocks_tile_a_chunk(chunk: tuple[int, ...], dtype: str, block_nbytes: int):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checksum_blocks, "BLOCK_NBYTES", block_nbytes)
        chunk_split = chunk_blocks(chunk, dtype)
        blocks = list(chunk_split.overlapping(0, chunk_split.chunk_nbytes))
    assert [block.number for block in blocks] == list(range(chunk_split.block_count))
    assert (blocks[0].start, blocks[-1].stop) == (0, chunk_split.chunk_nbytes)
    assert all(a.stop == b.start for a, b in itertools.pairwise(blocks))
    assert all(block.stop - block.start <= max(block_nbytes, 8) for block in blocks)


@given(chunk=CHUNKS, block_nbytes=st.integers(8, 200), data=st.data())
def test_overlapping_returns_overlapping_blocks(
    chunk: tuple[int, ...], block_nbytes: int, data: st.DataObject
):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checksum_blocks, "BLOCK_NBYTES", block_nbytes)
        chunk_split = chunk_blocks(chunk, "float32")
    low = data.draw(st.integers(0, chunk_split.chunk_nbytes - 1))
    high = data.draw(st.integers(low + 1, chunk_split.chunk_nbytes))
    everything = list(chunk_split.overlapping(0, chunk_split.chunk_nbytes))
    assert list(chunk_split.overlapping(low, high)) == [
        b for b in everything if b.start < high and b.stop > low
    ]


def test_block_numbers_continue_from_leaf_to_leaf():
    shapes = [
        ("a", (5, 4), (2, 4), "float32"),
        ("b", (), (), "int32"),
        ("c", (0, 3), (1, 3), "float32"),
    ]
    blocks = assign_block_numbers([*shapes, ("d", (1 << 20,), (1 << 19,), "float32")])
    assert [(leaf.first_number, leaf.stop_number) for leaf in blocks.values()] == [
        (0, 3),
        (3, 4),
        (4, 4),
        (4, 8),
    ]
    d = blocks["d"]
    assert [d.first_in_chunk((index,)) for index in range(math.prod(d.chunk_counts))] == [4, 6]
