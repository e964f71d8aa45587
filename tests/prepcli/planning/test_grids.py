"""Chunk grids: every element of a leaf's dim in its chunk, whichever way the chunks cut the atoms."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prepcli.planning.boxes import strides
from prepcli.planning.grids import (
    ChunkGrid,
    DimPiece,
    ExplicitPlacement,
    StridedPlacement,
    find_split_atom,
    free_atom_ranges,
    split_dim,
)
from trainer.models.axis_map import Factor

EXTENTS = st.lists(st.integers(1, 7), max_size=4)


def factors_of(extents: Sequence[int]) -> list[Factor]:
    return [Factor(f"a{i}", extent) for i, extent in enumerate(extents)]


def elements(cut: DimPiece) -> Iterator[tuple[dict[str, int], int, int]]:
    """Index of each atom, number of the chunk and element within the chunk, of everything that a cut covers."""
    for index in itertools.product(*(range(digit.count) for digit in cut.steps)):
        at, cell, inner = dict(cut.atom_starts), cut.chunk_index, cut.element_offset
        for i, digit in zip(index, cut.steps):
            at[digit.atom] += i * digit.atom_step
            cell, inner = cell + i * digit.chunk_step, inner + i * digit.element_step
        yield at, cell, inner


@given(EXTENTS, st.data())
def test_cuts_cover_a_box_of_atoms_once_each_element_in_its_chunk(extents: list[int], data):
    factors, total = factors_of(extents), math.prod(extents)
    chunk = data.draw(st.integers(1, total + 2))
    spans = [tuple(sorted((data.draw(st.integers(0, n)), data.draw(st.integers(0, n))))) for n in extents]
    ranges = {f.atom: (low, high) for f, (low, high) in zip(factors, spans)}
    expected = {
        index: divmod(sum(i * step for i, step in zip(index, strides(extents))), chunk)
        for index in itertools.product(*(range(*span) for span in spans))
    }
    cuts = list(split_dim(factors, chunk, ranges))
    found = [(tuple(at[f.atom] for f in factors), (cell, inner)) for cut in cuts for at, cell, inner in elements(cut)]
    assert dict(found) == expected
    assert len(found) == len(expected)
    if find_split_atom(extents, chunk) is not None:
        assert len(cuts) <= 3  # before the first edge of a chunk, whole chunks, behind the last


@pytest.mark.parametrize(
    ("extents", "chunk", "at"),
    [
        ([12], 5, 0),  # of a lone atom the last chunk may be cut short
        ([1, 12], 5, 1),
        ([3, 4], 2, 1),
        ([3, 4], 4, 1),
        ([4, 3], 6, 0),
        ([3, 4], 12, 0),
        ([3, 4], 99, 0),
        ([3, 4], 3, None),  # the second chunk begins within one step of the outer atom
        ([3, 4], 6, None),
        ([3, 4], 8, 0),  # the outermost atom again
        ([2, 3, 4], 8, None),
        ([], 1, None),
    ],
)
def test_the_atom_that_chunk_edges_cut(extents: list[int], chunk: int, at: int | None):
    assert find_split_atom(extents, chunk) == at


def test_a_dim_without_atoms_is_one_cut_of_nothing():
    assert list(split_dim([], 1, {})) == [DimPiece((), 0, 0, ())]


@given(EXTENTS, st.data())
def test_a_range_of_a_merged_dim_as_boxes_of_its_free_atoms(extents: list[int], data):
    held = [data.draw(st.none() | st.integers(0, n - 1)) for n in extents]
    factors = [Factor(f.atom, f.extent, index) for f, index in zip(factors_of(extents), held)]
    total = math.prod(extents)
    low, high = sorted((data.draw(st.integers(0, total)), data.draw(st.integers(0, total))))
    expected = []
    for at, index in enumerate(itertools.product(*(range(n) for n in extents))):
        if low <= at < high and all(h is None or h == i for h, i in zip(held, index)):
            expected.append(tuple(i for h, i in zip(held, index) if h is None))
    free = [f.atom for f in factors if f.fixed is None]
    found = []
    for box in free_atom_ranges(factors, (low, high)):
        assert list(box) == free
        found += itertools.product(*(range(*span) for span in box.values()))
    assert found == expected


def test_a_grid_counts_chunks_that_reach_over_the_edge():
    assert ChunkGrid((10, 4, 1), (3, 4, 1)).chunk_counts == (4, 1, 1)
    assert ChunkGrid((), ()).chunk_counts == ()


def test_places_of_chunks():
    lattice = StridedPlacement(file=2, offset=100, first_index=(3, 0), strides=(50, 7))
    assert lattice.find((3, 0)) == (2, 100)
    assert lattice.find((4, 2)) == (2, 164)
    assert ExplicitPlacement({(0, 1): (1, 8)}).find([0, 1]) == (1, 8)
