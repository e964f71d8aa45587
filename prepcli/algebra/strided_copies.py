"""Index algebra: which bytes of a leaf's chunks are which bytes of a source tensor, for any box of either.

A tensor is bytes in C order, a leaf is bytes in chunks. A `StridedCopy` relates strided bytes of one to strided bytes
of the other. The same copies save a tensor to chunks and export chunks to a tensor.

An example: the float32 tensor w [2, 3] becomes the leaf [3, 2], in chunks [1, 2]. The axis map of the leaf names its
dims on the left and the dims of the tensor on the right:

>>> from prepcli.algebra.grids import StridedPlacement
>>> from prepcli.algebra.axis_map import bind_row
>>> from prepcli.algebra.row_text import parse_row
>>> axis_map = bind_row(parse_row("b a <- w: a b"), {"a": 2, "b": 3})
>>> axis_map.source_shape, axis_map.leaf_shape
((2, 3), (3, 2))

    element    tensor byte    leaf index    chunk    byte in file
    w[0, 0]         0           [0, 0]        0           0
    w[0, 1]         4           [1, 0]        1           8
    w[0, 2]         8           [2, 0]        2          16
    w[1, 0]        12           [0, 1]        0           4
    w[1, 1]        16           [1, 1]        1          12
    w[1, 2]        20           [2, 1]        2          20

The 3 chunks of 8 bytes are stored one after another, so that `strides` of their placement is (8, 8). A step of b moves
4 bytes in the tensor and 8 in the file, a step of a moves 12 bytes and 4. One copy describes all six elements: its
`width` is one element, and each dim is (count, tensor stride, file stride).

>>> location = ChunkedLocation(
...     axis_map, (), ChunkGrid((3, 2), (1, 2)), StridedPlacement(0, 0, (0, 0), (8, 8)), itemsize=4
... )
>>> list(region_copies(location, full_box((2, 3))))
[StridedCopy(tensor_offset=0, file=0, file_offset=0, width=4, dims=((3, 4, 8), (2, 12, 4)))]

For row 1 of the tensor alone, a is fixed at 1: 12 bytes further in the tensor, 4 bytes further in the file.

>>> list(region_copies(location, ((1, 2), (0, 3))))
[StridedCopy(tensor_offset=12, file=0, file_offset=4, width=4, dims=((3, 4, 8),))]
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from prepcli.algebra.axis_map import AxisMap
from prepcli.algebra.boxes import Box, Range, full_box, intersect, split_merged_range, strides
from prepcli.algebra.grids import (
    ChunkGrid,
    DimPiece,
    Placement,
    StridedPlacement,
    free_atom_ranges,
    split_dim,
    split_dim_part,
)

NO_INDICES: Mapping[str, int] = {}


@dataclass(frozen=True, slots=True)
class StridedCopy:
    """A strided copy between a tensor and a file, in either direction.

    Attributes:
        tensor_offset: Offset of the first byte in the tensor.
        file: Number of the file.
        file_offset: Offset of the first byte in the file.
        width: Number of bytes contiguous in both.
        dims: (count, tensor stride, file stride) of each repetition, by descending file stride.
    """

    tensor_offset: int
    file: int
    file_offset: int
    width: int
    dims: tuple[tuple[int, int, int], ...] = ()

    @property
    def nbytes(self) -> int:
        """Number of bytes to copy."""
        return self.width * math.prod(count for count, _, _ in self.dims)

    @property
    def run_nbytes(self) -> int:
        """Length of a run: a contiguous byte range in the file."""
        # A loop whose steps are as long as the run lengthens the run. In the example of the module,
        # 4 bytes become 2 * 4 and then 3 * 8: the file has one run of 24 bytes, the tensor has six of 4.
        length = self.width
        for count, _, file_stride in reversed(self.dims):
            if file_stride != length:
                break
            length *= count
        return length

    @property
    def repeats(self) -> tuple[tuple[int, int], ...]:
        """(count, file stride) of the repetitions of a run, outermost first."""
        length = self.width
        outer_dims = len(self.dims)
        while outer_dims and self.dims[outer_dims - 1][2] == length:
            length *= self.dims[outer_dims - 1][0]
            outer_dims -= 1
        return tuple((count, file_stride) for count, _, file_stride in self.dims[:outer_dims])

    def run_offsets(self) -> Iterator[int]:
        """Yield the file offset of each run, in packing order."""
        ranges = [range(0, count * stride, stride) for count, stride in self.repeats]
        for displacements in itertools.product(*ranges):
            yield self.file_offset + sum(displacements)


@dataclass(frozen=True, slots=True)
class ChunkedLocation:
    """The part of a tensor that one leaf takes, and where the leaf's chunks are stored.

    Attributes:
        axis_map: Maps the tensor's elements to the leaf's.
        stacked_indices: Name and index of each stacked axis in the tensor's name, e.g. (("layers", 3),).
        grid: Chunk grid of the leaf.
        placement: Where the chunks are stored.
        itemsize: Bytes per element.
        starts: First index of the tensor's part along each leaf dim. None if the axis map covers every dim from 0.
    """

    axis_map: AxisMap
    stacked_indices: tuple[tuple[str, int], ...]
    grid: ChunkGrid
    placement: Placement
    itemsize: int
    starts: tuple[int, ...] | None = None


def region_copies(
    region: ChunkedLocation, box: Box, window: Box | None = None
) -> Iterator[StridedCopy]:
    """Yield the copies between a box of a tensor and a leaf's chunks.

    Args:
        region: The region.
        box: Box of the tensor. Elements of other leaves are excluded.
        window: Tensor offsets count the bytes of this box of the tensor in C order. None for the whole tensor.

    Yields:
        Copies with tensor offsets from the first byte of the tensor or window.
    """
    stacked = _index_ranges(dict(region.stacked_indices))
    for atom_ranges in _atom_ranges_of_tensor_box(region.axis_map, box):
        yield from _copies_to_chunks(region, stacked | atom_ranges, window)


def _index_ranges(indices: Mapping[str, int]) -> dict[str, Range]:
    """Return the range of each axis with one index, e.g. {"layers": 3} -> {"layers": (3, 4)}."""
    return {atom: (index, index + 1) for atom, index in indices.items()}


def _atom_ranges_of_tensor_box(axis_map: AxisMap, box: Box) -> Iterator[dict[str, Range]]:
    """Split a box of a tensor into boxes over its axes without a fixed index. Yield the index range of each axis."""
    # In the example, row 1 is {a: (1, 2), b: (0, 3)}. A range of a merged dim may need several boxes:
    # indices 1 to 6 of (heads=2 head_dim=3) are head 0 with head_dim 1 to 3, and the whole of head 1.
    ranges_per_dim: list[list[dict[str, Range]]] = []
    for dim_range, dim in zip(box, axis_map.source_dims):
        start, stop = intersect(dim_range, (dim.start, dim.start + dim.selected_extent))
        selected_range = (start - dim.start, stop - dim.start)
        ranges_per_dim.append(list(free_atom_ranges(dim.factors, selected_range)))
    for dim_ranges in itertools.product(*ranges_per_dim):
        atom_ranges: dict[str, Range] = {}
        for free_ranges in dim_ranges:
            atom_ranges |= free_ranges
        yield atom_ranges


@dataclass(frozen=True, slots=True)
class LeafBoxPart:
    """The part of a leaf's box that one tensor fills.

    Attributes:
        box: Box of the leaf.
        tensor_name: Name of the tensor.
        atom_ranges: Index range of each axis of the axis map, e.g. {"heads": (0, 4), "embed": (0, 768)}.
    """

    box: Box
    tensor_name: str
    atom_ranges: Mapping[str, Range]


def leaf_box_parts(
    axis_map: AxisMap, box: Box, unscanned_indices: Mapping[str, int] = NO_INDICES
) -> Iterator[LeafBoxPart]:
    """Yield the parts of a box of a leaf, one or more per source tensor.

    Args:
        axis_map: Maps the tensors' elements to the leaf's.
        box: Box of the leaf.
        unscanned_indices: Index of each axis with one leaf per index, e.g. {"layers": 3} for the leaf of layer 3.

    Yields:
        The parts. Elements in no part are padding.
    """
    # An axis map has the padded extents in the leaf's dims, and the true ones in the tensor's. What
    # is beyond the true extents is padding, which no tensor fills.
    true_extents: dict[str, int] = {}
    for factors in (axis_map.stacked_factors, *(dim.factors for dim in axis_map.source_dims)):
        for factor in factors:
            if factor.fixed is None:
                true_extents[factor.atom] = factor.extent
    for atom_ranges in _atom_ranges_of_box(axis_map, box):
        true_ranges = _index_ranges(unscanned_indices)
        for atom, atom_range in atom_ranges.items():
            true_ranges[atom] = intersect(atom_range, (0, true_extents[atom]))
        for stacked in _iter_stacked_indices(axis_map, true_ranges):
            ranges = true_ranges | _index_ranges(stacked)
            if all(start < stop for start, stop in ranges.values()):
                yield LeafBoxPart(box, axis_map.tensor_name(stacked), ranges)


def part_copies(
    axis_map: AxisMap, part: LeafBoxPart, *, itemsize: int = 1, window: Box | None = None
) -> Iterator[StridedCopy]:
    """Yield the copies that fill a part of a leaf's box from its tensor.

    Args:
        axis_map: Maps the tensor's elements to the leaf's.
        part: The part.
        itemsize: Bytes per element.
        window: Box of the tensor to copy from, or None for the whole tensor.

    Yields:
        Copies with tensor offsets from the first byte of the tensor, or of the window in C order. File offsets
        count from the start of the leaf's box in C order, file numbers are 0.
    """
    # Pieces count from the start of the leaf, file offsets from the start of the box. In the example,
    # the leaf box ((1, 3), (0, 2)) has the strides (8, 4) and the origin -8: leaf index [1, 0] is at
    # 1 * 8 - 8 = 0.
    box_strides = strides([stop - start for start, stop in part.box], itemsize)
    origin = -sum(start * stride for (start, _), stride in zip(part.box, box_strides))
    for atom_ranges in _atom_ranges_in_window(axis_map, part.atom_ranges, window):
        # The box is one chunk as long as each dim, so that each dim is one piece.
        pieces_per_dim: list[list[DimPiece]] = []
        for dim, length in zip(axis_map.leaf_dims, axis_map.leaf_shape):
            pieces_per_dim.append(list(split_dim(dim, length, atom_ranges=atom_ranges)))
        for dim_pieces in itertools.product(*pieces_per_dim):
            yield _make_copy(
                axis_map,
                atom_ranges,
                dim_pieces=dim_pieces,
                element_strides=box_strides,
                file=0,
                file_offset=origin,
                itemsize=itemsize,
                window=window,
            )


def tensor_box(axis_map: AxisMap, atom_ranges: Mapping[str, Range]) -> Box:
    """Return the smallest box of a tensor with all elements in `atom_ranges`."""
    box: list[Range] = []
    for dim in axis_map.source_dims:
        first = dim.start
        last = dim.start
        factor_strides = strides([factor.extent for factor in dim.factors])
        for factor, stride in zip(dim.factors, factor_strides):
            if factor.fixed is None:
                start, stop = atom_ranges[factor.atom]
            else:
                start = factor.fixed
                stop = factor.fixed + 1
            first += start * stride
            last += (stop - 1) * stride
        box.append((first, last + 1))
    return tuple(box)


def _atom_ranges_in_window(
    axis_map: AxisMap, atom_ranges: Mapping[str, Range], window: Box | None
) -> Iterator[Mapping[str, Range]]:
    """Yield the ranges of axes (atoms) inside a window of the tensor, as one or several boxes."""
    if window is None:
        yield atom_ranges
        return
    for window_ranges in _atom_ranges_of_tensor_box(axis_map, window):
        common: dict[str, Range] = {}
        for atom, atom_range in window_ranges.items():
            common[atom] = intersect(atom_ranges[atom], atom_range)
        if all(start < stop for start, stop in common.values()):
            yield {**atom_ranges, **common}


def _atom_ranges_of_box(axis_map: AxisMap, box: Box) -> Iterator[dict[str, Range]]:
    """Split a box of a leaf into boxes over its axes. Yield the index range of each axis."""
    boxes_per_dim: list[list[Box]] = []
    for dim_range, dim in zip(box, axis_map.leaf_dims):
        extents = [factor.extent for factor in dim]
        boxes_per_dim.append(list(split_merged_range(dim_range, extents)))
    for atom_boxes in itertools.product(*boxes_per_dim):
        atom_ranges: dict[str, Range] = {}
        for dim, atom_box in zip(axis_map.leaf_dims, atom_boxes):
            for factor, atom_range in zip(dim, atom_box):
                atom_ranges[factor.atom] = atom_range
        yield atom_ranges


def _iter_stacked_indices(
    axis_map: AxisMap, atom_ranges: Mapping[str, Range]
) -> Iterator[dict[str, int]]:
    """Yield the index of each stacked axis, for every tensor in the ranges, e.g. {"layers": 0}, {"layers": 1}."""
    atoms = [factor.atom for factor in axis_map.stacked_factors]
    index_ranges = [range(*atom_ranges[atom]) for atom in atoms]
    for index in itertools.product(*index_ranges):
        yield dict(zip(atoms, index))


def _copies_to_chunks(
    region: ChunkedLocation, atom_ranges: Mapping[str, Range], window: Box | None = None
) -> Iterator[StridedCopy]:
    """Yield the copies of the elements in `atom_ranges` to the leaf's chunks."""
    axis_map = region.axis_map
    chunk_shape = region.grid.chunk_shape
    element_strides = strides(chunk_shape, region.itemsize)
    starts = region.starts or (0,) * len(chunk_shape)
    pieces_per_dim: list[list[DimPiece]] = []
    for dim, length, start in zip(axis_map.leaf_dims, chunk_shape, starts):
        pieces = split_dim_part(dim, length, atom_ranges=atom_ranges, start=start)
        pieces_per_dim.append(list(pieces))
    for dim_pieces in itertools.product(*pieces_per_dim):
        if isinstance(region.placement, StridedPlacement):
            file, file_offset = region.placement.find([piece.chunk_index for piece in dim_pieces])
            yield _make_copy(
                axis_map,
                atom_ranges,
                dim_pieces=dim_pieces,
                element_strides=element_strides,
                file=file,
                file_offset=file_offset,
                itemsize=region.itemsize,
                chunk_strides=region.placement.strides,
                window=window,
            )
        else:
            yield from _copies_by_chunk(
                region, atom_ranges, dim_pieces, element_strides, window=window
            )


def _copies_by_chunk(
    region: ChunkedLocation,
    atom_ranges: Mapping[str, Range],
    dim_pieces: Sequence[DimPiece],
    element_strides: Sequence[int],
    *,
    window: Box | None,
) -> Iterator[StridedCopy]:
    """Yield the copies of the elements in `atom_ranges` to chunks with individual offsets: at least one per chunk."""
    pieces_by_chunk = [list(_split_by_chunk(piece)) for piece in dim_pieces]
    for chunk_pieces in itertools.product(*pieces_by_chunk):
        file, file_offset = region.placement.find([piece.chunk_index for piece in chunk_pieces])
        yield _make_copy(
            region.axis_map,
            atom_ranges,
            dim_pieces=chunk_pieces,
            element_strides=element_strides,
            file=file,
            file_offset=file_offset,
            itemsize=region.itemsize,
            window=window,
        )


def _split_by_chunk(piece: DimPiece) -> Iterator[DimPiece]:
    """Split a piece of a dim into pieces that touch one chunk each."""
    # In the example of the module, the piece of dim b has one loop over 3 chunks. It becomes three
    # pieces in the chunks 0, 1 and 2, which start at b = 0, 1 and 2.
    chunk_loops = [step for step in piece.steps if step.chunk_step]
    element_loops = tuple(step for step in piece.steps if not step.chunk_step)
    for index in itertools.product(*[range(step.count) for step in chunk_loops]):
        atom_starts = dict(piece.atom_starts)
        chunk_index = piece.chunk_index
        for iteration, step in zip(index, chunk_loops):
            atom_starts[step.atom] += iteration * step.atom_step
            chunk_index += iteration * step.chunk_step
        yield DimPiece(tuple(atom_starts.items()), chunk_index, piece.element_offset, element_loops)


def _make_copy(
    axis_map: AxisMap,
    atom_ranges: Mapping[str, Range],
    *,
    dim_pieces: Sequence[DimPiece],
    element_strides: Sequence[int],
    file: int,
    file_offset: int,
    itemsize: int,
    chunk_strides: Sequence[int] = (),
    window: Box | None = None,
) -> StridedCopy:
    """Return the copy of one regular piece per leaf dim.

    Args:
        axis_map: Maps the tensor's elements to the leaf's.
        atom_ranges: Index range of each axis without a dim piece.
        dim_pieces: One piece per leaf dim.
        element_strides: Bytes between elements of a chunk, per leaf dim.
        file: Number of the file.
        file_offset: Offset of the first chunk.
        itemsize: Bytes per element.
        chunk_strides: Bytes between chunks, per leaf dim, or empty if the pieces touch one chunk.
        window: Tensor offsets count the bytes of this box of the tensor in C order. None for the whole tensor.

    Returns:
        The copy.
    """
    # E.g. the float32 tensor [a=2, b=3] becomes the leaf [b=3, a=2] in 3 chunks [1, 2] of 8 bytes.
    # The piece of dim b has 3 chunks of one index: the loops (count 3, chunk_step 1) and
    # (count 1, element_step 1). The piece of dim a has 2 indices: the loop (count 2, element_step 1).
    # With `element_strides` (8, 4) and `chunk_strides` (8, 8), the file strides of the loops are
    # 1 * 8, 1 * 8 and 1 * 4. The tensor strides are 3 * 4 = 12 bytes for a and 4 bytes for b.
    atom_starts = {atom: start for atom, (start, _) in atom_ranges.items()}
    for piece in dim_pieces:
        atom_starts.update(piece.atom_starts)
    tensor_offset, tensor_strides = _tensor_offset_and_strides(
        axis_map, atom_starts, itemsize, window
    )
    if not chunk_strides:
        chunk_strides = (0,) * len(dim_pieces)
    dims: list[tuple[int, int, int]] = []
    for piece, element_stride, chunk_stride in zip(dim_pieces, element_strides, chunk_strides):
        file_offset += piece.element_offset * element_stride
        for step in piece.steps:
            # An atom of the leaf without a counterpart in the tensor has the extent 1.
            tensor_stride = tensor_strides.get(step.atom, 0) * step.atom_step
            file_stride = step.chunk_step * chunk_stride + step.element_step * element_stride
            dims.append((step.count, tensor_stride, file_stride))
    return merge_dims(StridedCopy(tensor_offset, file, file_offset, itemsize, tuple(dims)))


def _tensor_offset_and_strides(
    axis_map: AxisMap, atom_starts: Mapping[str, int], itemsize: int, window: Box | None
) -> tuple[int, dict[str, int]]:
    """Return the tensor offset of the axes' first indices, and the tensor stride of each axis without a fixed index."""
    if window is None:
        window = full_box(axis_map.source_shape)
    # In the example, with row 1 as the window ((1, 2), (0, 3)): the window has the strides (12, 4), and
    # w[1, 0] the offset (0 - 1) * 12 for the start of the window, plus 1 * 12 for a = 1. That is byte 0.
    tensor_offset = 0
    atom_strides: dict[str, int] = {}
    dim_strides = strides([stop - start for start, stop in window], itemsize)
    for dim, (window_start, _), dim_stride in zip(axis_map.source_dims, window, dim_strides):
        tensor_offset += (dim.start - window_start) * dim_stride
        factor_strides = strides([factor.extent for factor in dim.factors], dim_stride)
        for factor, atom_stride in zip(dim.factors, factor_strides):
            if factor.fixed is None:
                tensor_offset += atom_starts[factor.atom] * atom_stride
                atom_strides[factor.atom] = atom_stride
            else:
                tensor_offset += factor.fixed * atom_stride
    return tensor_offset, atom_strides


def merge_dims(copy: StridedCopy) -> StridedCopy:
    """Return an equal copy with as few dims as possible, sorted by descending file stride."""
    # A loop of one step changes no offset. Sorting by file stride makes the loops visit the file in
    # ascending order, whatever the order of the tensor's dims.
    loops = [dim for dim in copy.dims if dim[0] > 1]
    dims = sorted(loops, key=operator.itemgetter(2), reverse=True)
    width = copy.width
    merged: list[tuple[int, int, int]] = []  # innermost first
    for count, tensor_stride, file_stride in reversed(dims):
        if not merged and tensor_stride == file_stride == width:
            # Neighbours in both, e.g. width 4 and (3, 4, 4) -> width 12.
            width *= count
            continue
        if merged:
            inner_count, inner_tensor_stride, inner_file_stride = merged[-1]
            is_next_tensor_byte = tensor_stride == inner_count * inner_tensor_stride
            if is_next_tensor_byte and file_stride == inner_count * inner_file_stride:
                # One loop continues the other, e.g. (2, 24, 48), (3, 8, 16) -> (6, 8, 16).
                merged[-1] = (inner_count * count, inner_tensor_stride, inner_file_stride)
                continue
        merged.append((count, tensor_stride, file_stride))
    merged.reverse()
    return StridedCopy(copy.tensor_offset, copy.file, copy.file_offset, width, tuple(merged))
