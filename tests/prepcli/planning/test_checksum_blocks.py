"""Checksum blocks: every byte of every chunk is in exactly one block, and each block has its own number."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prepcli.planning import checksum_blocks
from prepcli.planning.checksum_blocks import chunk_blocks, number_blocks

CHUNKS = st.lists(st.integers(1, 9), max_size=4).map(tuple)


@given(chunk=CHUNKS, dtype=st.sampled_from(["int8", "float16", "float64"]), most=st.integers(8, 200))
def test_blocks_tile_a_chunk(chunk: tuple[int, ...], dtype: str, most: int):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checksum_blocks, "BLOCK_NBYTES", most)
        cut = chunk_blocks(chunk, dtype)
        found = list(cut.overlapping(0, cut.chunk_nbytes))
    assert [block.number for block in found] == list(range(cut.block_count))
    assert (found[0].start, found[-1].stop) == (0, cut.chunk_nbytes)
    assert all(a.stop == b.start for a, b in itertools.pairwise(found))
    assert all(block.stop - block.start <= max(most, 8) for block in found)


@given(chunk=CHUNKS, most=st.integers(8, 200), data=st.data())
def test_blocks_touched_are_those_that_overlap(chunk: tuple[int, ...], most: int, data: st.DataObject):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checksum_blocks, "BLOCK_NBYTES", most)
        cut = chunk_blocks(chunk, "float32")
    low = data.draw(st.integers(0, cut.chunk_nbytes - 1))
    high = data.draw(st.integers(low + 1, cut.chunk_nbytes))
    everything = list(cut.overlapping(0, cut.chunk_nbytes))
    assert list(cut.overlapping(low, high)) == [b for b in everything if b.start < high and b.stop > low]


def test_numbers_of_leaves_follow_each_other():
    shapes = [("a", (5, 4), (2, 4), "float32"), ("b", (), (), "int32"), ("c", (0, 3), (1, 3), "float32")]
    found = number_blocks([*shapes, ("d", (1 << 20,), (1 << 19,), "float32")])
    assert [(leaf.first_number, leaf.stop_number) for leaf in found.values()] == [(0, 3), (3, 4), (4, 4), (4, 8)]
    d = found["d"]
    assert [d.first_in_chunk((index,)) for index in range(math.prod(d.chunk_counts))] == [4, 6]
