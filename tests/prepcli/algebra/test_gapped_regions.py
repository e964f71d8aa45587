"""Gapped regions: each byte is found at its gapless offset plus the gaps before it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from prepcli.algebra.axis_map import AxisMap
from prepcli.algebra.boxes import Box, full_box
from prepcli.algebra.gapped_regions import GappedRegion, gaps_between, split_copy
from prepcli.algebra.grids import ChunkGrid, StridedPlacement
from prepcli.algebra.strided_copies import ChunkedLocation, StridedCopy, region_copies
from tests.helpers.strategies import axis_maps

START = 100


def region_of(row: AxisMap, itemsize: int) -> ChunkedLocation:
    zeros, tensor_byte = (0,) * len(row.leaf_shape), tuple((f.atom, 0) for f in row.stacked_factors)
    return ChunkedLocation(
        row,
        tensor_byte,
        ChunkGrid(row.leaf_shape, row.leaf_shape),
        StridedPlacement(0, START, zeros, zeros),
        itemsize,
    )


def bytes_of(copies: list[StridedCopy]) -> dict[int, int]:
    """Return a dict from each byte of the file to its byte of the tensor."""
    byte_map: dict[int, int] = {}
    for copy in copies:
        starts = [(copy.tensor_offset, copy.file_offset)]
        for count, tensor_stride, file_stride in copy.dims:
            starts = [
                (tensor_byte + i * tensor_stride, offset + i * file_stride)
                for tensor_byte, offset in starts
                for i in range(count)
            ]
        for tensor_byte, offset in starts:
            for byte in range(copy.width):
                assert offset + byte not in byte_map
                byte_map[offset + byte] = tensor_byte + byte
    return byte_map


@st.composite
def boxes(draw, shape: tuple[int, ...]) -> Box:
    return tuple(
        tuple(sorted(draw(st.tuples(st.integers(0, n), st.integers(0, n))))) for n in shape
    )


@given(row=axis_maps(padding=False), data=st.data())
def test_copies_shift_bytes_by_the_gaps_before_them(row: AxisMap, data: st.DataObject):
    itemsize = data.draw(st.sampled_from([1, 4]))
    region, box = region_of(row, itemsize), data.draw(boxes(row.source_shape))
    edges = sorted(data.draw(st.sets(st.integers(1, 60), max_size=4)))
    gaps = tuple((START + boundary * itemsize, 7 + i) for i, boundary in enumerate(edges))
    without_gaps = bytes_of(list(region_copies(region, box)))
    expected = {
        offset + sum(n for boundary, n in gaps if boundary <= offset): tensor_byte
        for offset, tensor_byte in without_gaps.items()
    }
    assert bytes_of(list(GappedRegion(region, gaps).copies(box))) == expected


@given(row=axis_maps(padding=False), data=st.data())
def test_split_copy_keeps_every_byte(row: AxisMap, data: st.DataObject):
    boundary = START + data.draw(st.integers(-3, 80))
    for copy in region_copies(region_of(row, 1), full_box(row.source_shape)):
        before, after = split_copy(copy, boundary)
        assert all(offset < boundary for offset in bytes_of(before))
        assert all(offset >= boundary for offset in bytes_of(after))
        assert bytes_of([*before, *after]) == bytes_of([copy])


def test_gaps_between_returns_gaps_between_runs():
    assert gaps_between([(10, 4), (20, 4), (24, 1), (30, 2)]) == ((14, 6), (18, 0), (19, 5))
    assert gaps_between([(10, 4)]) == ()
