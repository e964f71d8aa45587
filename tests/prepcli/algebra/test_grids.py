"""Chunk grids: every element of a leaf's dim is in its chunk, wherever chunk boundaries split the axes of the dim."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prepcli.algebra.axis_map import SizedAxis
from prepcli.algebra.boxes import strides
from prepcli.algebra.grids import (
    ChunkGrid,
    ChunkTable,
    DimPiece,
    StridedChunks,
    find_split_atom,
    split_dim,
)

EXTENTS = st.lists(st.integers(1, 7), max_size=4)


def factors_of(extents: Sequence[int]) -> list[SizedAxis]:
    return [SizedAxis(f"a{i}", extent) for i, extent in enumerate(extents)]


def elements(piece: DimPiece) -> Iterator[tuple[dict[str, int], int, int]]:
    """Yield the index along each axis, the chunk and the offset in the chunk, for each element of a piece."""
    for index in itertools.product(*(range(step.count) for step in piece.steps)):
        atom_indices, chunk, offset = (
            dict(piece.atom_starts),
            piece.chunk_index,
            piece.element_offset,
        )
        for iteration, step in zip(index, piece.steps):
            atom_indices[step.atom] += iteration * step.atom_step
            chunk, offset = (
                chunk + iteration * step.chunk_step,
                offset + iteration * step.element_step,
            )
        yield atom_indices, chunk, offset


@given(EXTENTS, st.integers(0, 9), st.data())
def test_split_dim_puts_elements_after_its_start(extents: list[int], start: int, data):
    factors = factors_of(extents)
    chunk_length = data.draw(st.integers(1, start + math.prod(extents) + 2))
    ranges = {factor.atom: (0, factor.extent) for factor in factors}
    expected = {
        index: divmod(start + number, chunk_length)
        for number, index in enumerate(itertools.product(*map(range, extents)))
    }
    found = [
        (tuple(index.values()), (chunk, offset))
        for piece in split_dim(factors, chunk_length, atom_ranges=ranges, start=start)
        for index, chunk, offset in elements(piece)
    ]
    assert dict(found) == expected
    assert len(found) == len(expected)


@given(EXTENTS, st.data())
def test_split_dim_puts_each_element_in_its_chunk(extents: list[int], data):
    factors, total = factors_of(extents), math.prod(extents)
    chunk = data.draw(st.integers(1, total + 2))
    spans = [
        tuple(sorted((data.draw(st.integers(0, n)), data.draw(st.integers(0, n))))) for n in extents
    ]
    ranges = {f.atom: (start, stop) for f, (start, stop) in zip(factors, spans)}
    expected = {
        index: divmod(sum(i * step for i, step in zip(index, strides(extents))), chunk)
        for index in itertools.product(*(range(*span) for span in spans))
    }
    pieces = list(split_dim(factors, chunk, atom_ranges=ranges))
    elements_found = [
        (tuple(index[f.atom] for f in factors), (chunk, offset))
        for piece in pieces
        for index, chunk, offset in elements(piece)
    ]
    assert dict(elements_found) == expected
    assert len(elements_found) == len(expected)
    if find_split_atom(extents, chunk) is not None:
        assert (
            len(pieces) <= 3
        )  # before the first chunk boundary, whole chunks, after the last boundary


@pytest.mark.parametrize(
    ("extents", "chunk", "at"),
    [
        ([12], 5, 0),  # the last chunk of a single atom may be partial
        ([1, 12], 5, 1),
        ([3, 4], 2, 1),
        ([3, 4], 4, 1),
        ([4, 3], 6, 0),
        ([3, 4], 12, 0),
        ([3, 4], 99, 0),
        ([3, 4], 3, None),  # the second chunk starts inside one index of the outer atom
        ([3, 4], 6, None),
        ([3, 4], 8, 0),  # the outermost atom may be split unevenly
        ([2, 3, 4], 8, None),
        ([], 1, None),
    ],
)
def test_find_split_atom_returns_index_or_none(extents: list[int], chunk: int, at: int | None):
    assert find_split_atom(extents, chunk) == at


def test_split_dim_without_atoms_is_one_empty_piece():
    assert list(split_dim([], 1, atom_ranges={})) == [DimPiece((), 0, 0, ())]


def test_chunk_grid_counts_partial_chunks():
    assert ChunkGrid((10, 4, 1), (3, 4, 1)).chunk_counts == (4, 1, 1)
    assert ChunkGrid((), ()).chunk_counts == ()


def test_placement_find_returns_file_and_offset():
    placement = StridedChunks(file=2, offset=100, first=(3, 0), strides=(50, 7))
    assert placement.find((3, 0)) == (2, 100)
    assert placement.find((4, 2)) == (2, 164)
    table = ChunkTable.from_positions((0, 1), (1, 2), {(0, 1): (1, 8)})
    assert table.find([0, 1]) == (1, 8)
