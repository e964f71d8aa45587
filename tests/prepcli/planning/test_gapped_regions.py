"""Leaves in several runs of a file: each byte goes where it would without gaps, and as much further back."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from prepcli.planning.boxes import Box, full_box
from prepcli.planning.gapped_regions import GappedRegion, gaps_between, split_copy
from prepcli.planning.grids import ChunkGrid, StridedPlacement
from prepcli.planning.strided_copies import Region, StridedCopy, region_copies
from tests.helpers.strategies import axis_maps
from trainer.models.axis_map import AxisMap

START = 100


def region_of(row: AxisMap, itemsize: int) -> Region:
    zeros, at = (0,) * len(row.leaf_shape), tuple((f.atom, 0) for f in row.stacked_factors)
    return Region(
        row, at, ChunkGrid(row.leaf_shape, row.leaf_shape), StridedPlacement(0, START, zeros, zeros), itemsize
    )


def bytes_of(found: list[StridedCopy]) -> dict[int, int]:
    """Byte of the file -> byte of the tensor."""
    pairs: dict[int, int] = {}
    for copy in found:
        places = [(copy.tensor_offset, copy.file_offset)]
        for count, here, there in copy.dims:
            places = [(at + i * here, offset + i * there) for at, offset in places for i in range(count)]
        for at, offset in places:
            for byte in range(copy.width):
                assert offset + byte not in pairs
                pairs[offset + byte] = at + byte
    return pairs


@st.composite
def boxes(draw, shape: tuple[int, ...]) -> Box:
    return tuple(tuple(sorted(draw(st.tuples(st.integers(0, n), st.integers(0, n))))) for n in shape)


@given(row=axis_maps(padding=False), data=st.data())
def test_bytes_lie_as_much_further_back_as_there_are_gaps_before_them(row: AxisMap, data: st.DataObject):
    itemsize = data.draw(st.sampled_from([1, 4]))
    region, box = region_of(row, itemsize), data.draw(boxes(row.source_shape))
    edges = sorted(data.draw(st.sets(st.integers(1, 60), max_size=4)))
    gaps = tuple((START + edge * itemsize, 7 + i) for i, edge in enumerate(edges))
    plain = bytes_of(list(region_copies(region, box)))
    wanted = {offset + sum(n for edge, n in gaps if edge <= offset): at for offset, at in plain.items()}
    assert bytes_of(list(GappedRegion(region, gaps).copies(box))) == wanted


@given(row=axis_maps(padding=False), data=st.data())
def test_a_cut_loses_nothing(row: AxisMap, data: st.DataObject):
    edge = START + data.draw(st.integers(-3, 80))
    for copy in region_copies(region_of(row, 1), full_box(row.source_shape)):
        before, after = split_copy(copy, edge)
        assert all(offset < edge for offset in bytes_of(before))
        assert all(offset >= edge for offset in bytes_of(after))
        assert bytes_of([*before, *after]) == bytes_of([copy])


def test_gaps_are_what_lies_between_runs():
    assert gaps_between([(10, 4), (20, 4), (24, 1), (30, 2)]) == ((14, 6), (18, 0), (19, 5))
    assert gaps_between([(10, 4)]) == ()
