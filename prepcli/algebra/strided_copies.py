"""Index algebra: which bytes of a leaf's chunks are which bytes of a source tensor, for any box of either.

A tensor is bytes in C order, a leaf is bytes in chunks. A `StridedCopy` relates strided bytes of one to strided bytes
of the other. The same copies save a tensor to chunks and export chunks to a tensor.

An example: the float32 tensor w [2, 3] becomes the leaf [3, 2], in chunks [1, 2]. The axis map of the leaf names its
dims on the left and the dims of the tensor on the right:

>>> from prepcli.algebra.axis_map import bind_row
>>> from prepcli.algebra.rows import parse_row
>>> from prepcli.planning.arrays import Array, MappedArray
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

The 3 chunks of 8 bytes are stored one after another, so that `strides` of the chunks is (8, 8). A step of b moves
4 bytes in the tensor and 8 in the file, a step of a moves 12 bytes and 4. One copy describes all six elements: its
`width` is one element, and each dim is (count, tensor stride, file stride).

>>> chunks = StridedChunks(0, 0, (0, 0), (8, 8))
>>> leaf = MappedArray(axis_map, (), Array("w", "float32", (3, 2), (1, 2), chunks))
>>> list(leaf.copies(full_box((2, 3))))
[StridedCopy(tensor_offset=0, file=0, file_offset=0, width=4, dims=((3, 4, 8), (2, 12, 4)))]

For row 1 of the tensor alone, a is fixed at 1: 12 bytes further in the tensor, 4 bytes further in the file.

>>> list(leaf.copies(((1, 2), (0, 3))))
[StridedCopy(tensor_offset=12, file=0, file_offset=4, width=4, dims=((3, 4, 8),))]
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from prepcli.algebra.axis_map import AxisMap
from prepcli.algebra.boxes import Box, Range, full_box, intersect, split_merged_range, strides
from prepcli.algebra.grids import (
    ArrayPart,
    ArrayParts,
    Chunks,
    DimPiece,
    StridedChunks,
    split_dim,
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


def box_copy(box: Box, window: Box, part: ArrayPart, item_nbytes: int) -> StridedCopy:
    """Return the copy between a box of an array and the stored part of the array that contains it.

    Args:
        box: The box.
        window: Tensor offsets count the bytes of this box of the array in C order.
        part: A box of the array, stored with strides of its own.
        item_nbytes: Bytes per element.
    """
    tensor_offset = 0
    file_offset = part.offset
    dims: list[tuple[int, int, int]] = []
    tensor_strides = strides([stop - start for start, stop in window], item_nbytes)
    for axis, (start, stop) in enumerate(box):
        tensor_offset += (start - window[axis][0]) * tensor_strides[axis]
        file_offset += (start - part.box[axis][0]) * part.strides[axis]
        dims.append((stop - start, tensor_strides[axis], part.strides[axis]))
    return merge_dims(StridedCopy(tensor_offset, part.file, file_offset, item_nbytes, tuple(dims)))


def leaf_copies(
    axis_map: AxisMap,
    box: Box,
    window: Box | None = None,
    *,
    stacked_indices: Sequence[tuple[str, int]],
    starts: Sequence[int] | None,
    chunks: Chunks,
    chunk_shape: Sequence[int],
    element_strides: Sequence[int],
    itemsize: int,
) -> Iterator[StridedCopy]:
    """Yield the copies between a box of a tensor and a leaf's chunks.

    Args:
        axis_map: Maps the tensor's elements to the leaf's.
        box: Box of the tensor. Elements of other leaves are excluded.
        window: Tensor offsets count the bytes of this box of the tensor in C order. None for the whole tensor.
        stacked_indices: Name and index of each stacked axis in the tensor's name, e.g. (("layers", 3),).
        starts: First index of the tensor's part along each leaf dim. None if the axis map covers every dim from 0.
        chunks: Where the chunks of the leaf are stored.
        chunk_shape: Shape of a chunk.
        element_strides: Bytes between neighbouring elements of a chunk, per leaf dim. Parts have strides of their own.
        itemsize: Bytes per element.
    """
    starts = starts or (0,) * len(chunk_shape)
    stacked = {atom: (index, index + 1) for atom, index in stacked_indices}
    for box_ranges in _atom_ranges_of_tensor_box(axis_map, box):
        atom_ranges = stacked | box_ranges
        if isinstance(chunks, ArrayParts):
            for part in chunks.parts:
                yield from _copies_to_part(
                    axis_map, part, atom_ranges, starts=starts, itemsize=itemsize, window=window
                )
            continue
        pieces_per_dim: list[list[DimPiece]] = []
        for dim, length, start in zip(axis_map.leaf_dims, chunk_shape, starts):
            pieces = split_dim(dim, length, atom_ranges=atom_ranges, start=start)
            pieces_per_dim.append(list(pieces))
        for dim_pieces in itertools.product(*pieces_per_dim):
            copy, chunk_loops = _make_copy(
                axis_map,
                atom_ranges,
                dim_pieces=dim_pieces,
                element_strides=element_strides,
                itemsize=itemsize,
                window=window,
            )
            index = [piece.chunk_index for piece in dim_pieces]
            if isinstance(chunks, StridedChunks):
                # Chunks at regular distances are loops of one copy.
                file, offset = chunks.find(index)
                outer = [
                    (n, stride, chunks.strides[dim] * step) for n, stride, dim, step in chunk_loops
                ]
                yield merge_dims(
                    replace(
                        copy,
                        file=file,
                        file_offset=offset + copy.file_offset,
                        dims=(*outer, *copy.dims),
                    )
                )
                continue
            merged = merge_dims(copy)
            for file, offset, displacement in chunks.walk(index, chunk_loops):
                start = merged.tensor_offset + displacement
                offset += merged.file_offset
                yield StridedCopy(start, file, offset, merged.width, merged.dims)


def _index_ranges(indices: Mapping[str, int]) -> dict[str, Range]:
    """Return the range of each axis with one index, e.g. {"layers": 3} -> {"layers": (3, 4)}."""
    return {atom: (index, index + 1) for atom, index in indices.items()}


def _atom_ranges_of_tensor_box(axis_map: AxisMap, box: Box) -> Iterator[dict[str, Range]]:
    """Split a box of a tensor into boxes over its axes without a fixed index. Yield the index range of each axis."""
    # In the example, row 1 is {a: (1, 2), b: (0, 3)}. A range of a merged dim may need several boxes:
    # indices 1 to 6 of (heads=2 head_dim=3) are head 0 with head_dim 1 to 3, and the whole of head 1.
    ranges_per_dim: list[list[dict[str, Range]]] = []
    for (low, high), dim in zip(box, axis_map.source_dims):
        extents = [factor.extent for factor in dim.factors]
        # The part of the dim may begin after its first element. See `TensorDim`.
        part_range = (max(0, low - dim.start), min(math.prod(extents), high - dim.start))
        boxes: list[dict[str, Range]] = []
        for atom_box in split_merged_range(part_range, extents):
            free_ranges: dict[str, Range] = {}
            has_fixed = True
            for factor, (start, stop) in zip(dim.factors, atom_box):
                if factor.fixed is None:
                    free_ranges[factor.atom] = (start, stop)
                elif not start <= factor.fixed < stop:
                    # A fixed atom selects one index of its axis, e.g. (qkv=3 at 1, embed=8) is the middle third of
                    # a fused weight. A box without that index has no element of the leaf.
                    has_fixed = False
            if has_fixed:
                boxes.append(free_ranges)
        ranges_per_dim.append(boxes)
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
        for dim_pieces in itertools.product(*_whole_dim_pieces(axis_map, atom_ranges)):
            copy, _ = _make_copy(
                axis_map,
                atom_ranges,
                dim_pieces=dim_pieces,
                element_strides=box_strides,
                itemsize=itemsize,
                window=window,
            )
            yield merge_dims(replace(copy, file_offset=copy.file_offset + origin))


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


def _copies_to_part(
    axis_map: AxisMap,
    part: ArrayPart,
    atom_ranges: Mapping[str, Range],
    *,
    starts: Sequence[int],
    itemsize: int,
    window: Box | None,
) -> Iterator[StridedCopy]:
    """Yield the copies of the elements in `atom_ranges` to one part of a leaf. See `leaf_copies`."""
    dims_box: list[Range] = []
    origin = part.offset
    for (low, high), start, dim, stride in zip(part.box, starts, axis_map.leaf_dims, part.strides):
        extent = math.prod(factor.extent for factor in dim)
        dims_box.append(intersect((low - start, high - start), (0, extent)))
        # Pieces count from the start of the axis map's dims, the offset from the start of the part.
        origin += (start - low) * stride
    for part_ranges in _atom_ranges_of_box(axis_map, tuple(dims_box)):
        common = dict(atom_ranges)
        for atom, part_range in part_ranges.items():
            common[atom] = intersect(atom_ranges[atom], part_range)
        if any(start >= stop for start, stop in common.values()):
            continue
        for dim_pieces in itertools.product(*_whole_dim_pieces(axis_map, common)):
            copy, _ = _make_copy(
                axis_map,
                common,
                dim_pieces=dim_pieces,
                element_strides=part.strides,
                itemsize=itemsize,
                window=window,
            )
            yield merge_dims(replace(copy, file=part.file, file_offset=copy.file_offset + origin))


def _whole_dim_pieces(axis_map: AxisMap, atom_ranges: Mapping[str, Range]) -> list[list[DimPiece]]:
    """Return the pieces of each leaf dim in a single chunk as long as the dim."""
    pieces: list[list[DimPiece]] = []
    for dim, length in zip(axis_map.leaf_dims, axis_map.leaf_shape):
        pieces.append(list(split_dim(dim, length, atom_ranges=atom_ranges)))
    return pieces


def _make_copy(
    axis_map: AxisMap,
    atom_ranges: Mapping[str, Range],
    *,
    dim_pieces: Sequence[DimPiece],
    element_strides: Sequence[int],
    itemsize: int,
    window: Box | None = None,
) -> tuple[StridedCopy, list[tuple[int, int, int, int]]]:
    """Return the copy of one regular piece per leaf dim, as far as it touches the first chunk.

    Args:
        axis_map: Maps the tensor's elements to the leaf's.
        atom_ranges: Index range of each axis without a dim piece.
        dim_pieces: One piece per leaf dim.
        element_strides: Bytes between elements of a chunk, per leaf dim.
        itemsize: Bytes per element.
        window: Tensor offsets count the bytes of this box of the tensor in C order. None for the whole tensor.

    Returns:
        The copy. Its file offset counts from the first byte of the chunk, and its dims are not merged.
        The loops over chunks. See `ChunkTable.walk`.
    """
    # E.g. the float32 tensor [a=2, b=3] becomes the leaf [b=3, a=2] in 3 chunks [1, 2] of 8 bytes.
    # The piece of dim b has 3 chunks of one index: the loops (count 3, chunk_step 1) and
    # (count 1, element_step 1). The piece of dim a has 2 indices: the loop (count 2, element_step 1).
    # With `element_strides` (8, 4), the loops in a chunk have the file strides 1 * 8 and 1 * 4. The
    # tensor strides are 3 * 4 = 12 bytes for a and 4 bytes for b.
    atom_starts = {atom: start for atom, (start, _) in atom_ranges.items()}
    for piece in dim_pieces:
        atom_starts.update(piece.atom_starts)
    if window is None:
        window = full_box(axis_map.source_shape)
    # With row 1 as the window ((1, 2), (0, 3)), the window has the strides (12, 4), and w[1, 0] the offset
    # (0 - 1) * 12 for the start of the window, plus 1 * 12 for a = 1. That is byte 0.
    tensor_offset = 0
    tensor_strides: dict[str, int] = {}
    dim_strides = strides([stop - start for start, stop in window], itemsize)
    for dim, (window_start, _), dim_stride in zip(axis_map.source_dims, window, dim_strides):
        tensor_offset += (dim.start - window_start) * dim_stride
        factor_strides = strides([factor.extent for factor in dim.factors], dim_stride)
        for factor, atom_stride in zip(dim.factors, factor_strides):
            if factor.fixed is None:
                tensor_offset += atom_starts[factor.atom] * atom_stride
                tensor_strides[factor.atom] = atom_stride
            else:
                tensor_offset += factor.fixed * atom_stride
    file_offset = 0
    dims: list[tuple[int, int, int]] = []
    chunk_loops: list[tuple[int, int, int, int]] = []
    for number, (piece, element_stride) in enumerate(zip(dim_pieces, element_strides)):
        file_offset += piece.element_offset * element_stride
        for step in piece.steps:
            # An atom of the leaf without a counterpart in the tensor has the extent 1.
            tensor_stride = tensor_strides.get(step.atom, 0) * step.atom_step
            if step.chunk_step:
                chunk_loops.append((step.count, tensor_stride, number, step.chunk_step))
            else:
                dims.append((step.count, tensor_stride, step.element_step * element_stride))
    return StridedCopy(tensor_offset, 0, file_offset, itemsize, tuple(dims)), chunk_loops


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
