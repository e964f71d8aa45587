"""Index algebra: which bytes of a leaf's chunks are which bytes of a source tensor, for any box of either. Pure.

A tensor is bytes in C order, a leaf is bytes in chunks. A `StridedCopy` relates strided bytes of one to strided bytes
of the other. The same copies save a tensor to chunks and export chunks to a tensor.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from prepcli.planning.boxes import Box, Range, full_box, intersect, split_merged_range, strides
from prepcli.planning.grids import ChunkGrid, DimPiece, Placement, StridedPlacement, free_atom_ranges, split_dim
from trainer.models.axis_map import AxisMap

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
        """Length of a contiguous run in the file."""
        length = self.width
        for count, _, file_stride in reversed(self.dims):
            if file_stride != length:
                break
            length *= count
        return length

    @property
    def repeats(self) -> tuple[tuple[int, int], ...]:
        """(count, file stride) of the repetitions of a run, outermost first."""
        length, outer_dims = self.width, len(self.dims)
        while outer_dims and self.dims[outer_dims - 1][2] == length:
            length *= self.dims[outer_dims - 1][0]
            outer_dims -= 1
        return tuple((count, file_stride) for count, _, file_stride in self.dims[:outer_dims])

    def run_offsets(self) -> Iterator[int]:
        """Yield the file offset of each run, in packing order."""
        for displacements in itertools.product(*(range(0, count * stride, stride) for count, stride in self.repeats)):
            yield self.file_offset + sum(displacements)


@dataclass(frozen=True, slots=True)
class Region:
    """The part of a tensor that one leaf takes, and where the leaf's chunks are stored.

    Attributes:
        axis_map: Maps the tensor's elements to the leaf's.
        stacked_indices: (atom, index) of each stacked atom in the tensor's name.
        grid: Chunk grid of the leaf.
        placement: Where the chunks are stored.
        itemsize: Bytes per element.
    """

    axis_map: AxisMap
    stacked_indices: tuple[tuple[str, int], ...]
    grid: ChunkGrid
    placement: Placement
    itemsize: int


def region_copies(region: Region, box: Box, window: Box | None = None) -> Iterator[StridedCopy]:
    """Yield the copies between a box of a tensor and a leaf's chunks.

    Args:
        region: The region.
        box: Box of the tensor. Elements of other leaves are excluded.
        window: Box of the tensor whose bytes in C order the tensor offsets count; None: the whole tensor.

    Yields:
        Copies whose tensor offsets count from the first byte of the tensor or window.
    """
    stacked = {atom: (index, index + 1) for atom, index in region.stacked_indices}
    for atom_ranges in _atom_ranges_of_tensor_box(region.axis_map, box):
        yield from _copies_to_chunks(region, stacked | atom_ranges, window)


def _atom_ranges_of_tensor_box(axis_map: AxisMap, box: Box) -> Iterator[dict[str, Range]]:
    """Split a box of a tensor into boxes over its free atoms; yield the range of each atom."""
    ranges_per_dim = [
        list(free_atom_ranges(dim.factors, _clip_range(dim_range, dim.start, dim.selected_extent)))
        for dim_range, dim in zip(box, axis_map.source_dims)
    ]
    for dim_ranges in itertools.product(*ranges_per_dim):
        yield {atom: atom_range for free_ranges in dim_ranges for atom, atom_range in free_ranges.items()}


def leaf_box_copies(
    axis_map: AxisMap, box: Box, *, itemsize: int = 1, unscanned_indices: Mapping[str, int] = NO_INDICES
) -> Iterator[tuple[str, StridedCopy]]:
    """Yield the copies that fill a box of a leaf from its source tensors.

    Args:
        axis_map: Maps the tensors' elements to the leaf's.
        box: Box of the leaf.
        itemsize: Bytes per element.
        unscanned_indices: Index of each atom that selects one of several unscanned leaves.

    Yields:
        (tensor name, copy). File offsets count from the start of the box in C order, file numbers are 0. Elements that
        no copy fills are padding.
    """
    for part in leaf_box_parts(axis_map, box, unscanned_indices):
        for copy in part_copies(axis_map, part, itemsize=itemsize):
            yield part.tensor_name, copy


@dataclass(frozen=True, slots=True)
class LeafBoxPart:
    """The part of a leaf's box that one tensor fills.

    Attributes:
        box: Box of the leaf.
        tensor_name: Name of the tensor.
        atom_ranges: Range of each atom of the axis map.
    """

    box: Box
    tensor_name: str
    atom_ranges: Mapping[str, Range]


def leaf_box_parts(
    axis_map: AxisMap, box: Box, unscanned_indices: Mapping[str, int] = NO_INDICES
) -> Iterator[LeafBoxPart]:
    """Yield the parts of a box of a leaf: one or more per source tensor; see `leaf_box_copies`."""
    unscanned_ranges = {atom: (index, index + 1) for atom, index in unscanned_indices.items()}
    true_extents = {
        f.atom: f.extent
        for f in (*axis_map.stacked_factors, *(f for dim in axis_map.source_dims for f in dim.factors))
        if f.fixed is None
    }
    for atom_ranges in _atom_ranges_of_box(axis_map, box):
        clipped = unscanned_ranges | {
            atom: intersect(atom_range, (0, true_extents[atom])) for atom, atom_range in atom_ranges.items()
        }
        for stacked in _iterate_stacked(axis_map, clipped):
            ranges = clipped | {atom: (index, index + 1) for atom, index in stacked.items()}
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
        window: Box of the tensor to copy from; None: the whole tensor.

    Yields:
        Copies whose tensor offsets count from the first byte of the tensor, or of the window in C order. File offsets
        count from the start of the leaf's box in C order, file numbers are 0.
    """
    box_strides = strides([stop - start for start, stop in part.box], itemsize)
    origin = -sum(start * stride for (start, _), stride in zip(part.box, box_strides))
    for atom_ranges in _atom_ranges_in_window(axis_map, part.atom_ranges, window):
        pieces_per_dim = [
            list(split_dim(dim, math.prod(f.extent for f in dim), atom_ranges=atom_ranges))
            for dim in axis_map.leaf_dims
        ]
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
    """Return the smallest box of a tensor that contains the elements of some atom ranges."""
    box: list[Range] = []
    for dim in axis_map.source_dims:
        ranges = [atom_ranges[f.atom] if f.fixed is None else (f.fixed, f.fixed + 1) for f in dim.factors]
        factor_strides = strides([f.extent for f in dim.factors])
        first = dim.start + sum(start * stride for (start, _), stride in zip(ranges, factor_strides))
        last = dim.start + sum((stop - 1) * stride for (_, stop), stride in zip(ranges, factor_strides))
        box.append((first, last + 1))
    return tuple(box)


def _atom_ranges_in_window(
    axis_map: AxisMap, atom_ranges: Mapping[str, Range], window: Box | None
) -> Iterator[Mapping[str, Range]]:
    """Yield the boxes of atoms that are in `atom_ranges` and in a window of the tensor."""
    if window is None:
        yield atom_ranges
        return
    for window_ranges in _atom_ranges_of_tensor_box(axis_map, window):
        common = {atom: intersect(atom_ranges[atom], atom_range) for atom, atom_range in window_ranges.items()}
        if all(start < stop for start, stop in common.values()):
            yield {**atom_ranges, **common}


def _atom_ranges_of_box(axis_map: AxisMap, box: Box) -> Iterator[dict[str, Range]]:
    """Split a box of a leaf into boxes over its atoms; yield the range of each atom."""
    boxes_per_dim = [
        list(split_merged_range(dim_range, [f.extent for f in dim])) for dim_range, dim in zip(box, axis_map.leaf_dims)
    ]
    for atom_boxes in itertools.product(*boxes_per_dim):
        yield {
            f.atom: atom_range
            for dim, atom_box in zip(axis_map.leaf_dims, atom_boxes)
            for f, atom_range in zip(dim, atom_box)
        }


def _iterate_stacked(axis_map: AxisMap, atom_ranges: Mapping[str, Range]) -> Iterator[dict[str, int]]:
    """Yield the index of each stacked atom, for every tensor in the ranges."""
    atoms = [f.atom for f in axis_map.stacked_factors]
    for index in itertools.product(*(range(*atom_ranges[atom]) for atom in atoms)):
        yield dict(zip(atoms, index))


def _clip_range(index_range: Range, start: int, length: int) -> Range:
    """Return the part of a range inside `length` indices from `start` on, counted from `start`."""
    clipped_start, clipped_stop = intersect(index_range, (start, start + length))
    return clipped_start - start, clipped_stop - start


def _copies_to_chunks(
    region: Region, atom_ranges: Mapping[str, Range], window: Box | None = None
) -> Iterator[StridedCopy]:
    """Yield the copies of a box of atoms to the leaf's chunks."""
    axis_map, grid = region.axis_map, region.grid
    element_strides = strides(grid.chunk_shape, region.itemsize)
    pieces_per_dim = [
        list(split_dim(dim, length, atom_ranges=atom_ranges))
        for dim, length in zip(axis_map.leaf_dims, grid.chunk_shape)
    ]
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
            yield from _copies_by_chunk(region, atom_ranges, dim_pieces, element_strides, window=window)


def _copies_by_chunk(
    region: Region,
    atom_ranges: Mapping[str, Range],
    dim_pieces: Sequence[DimPiece],
    element_strides: Sequence[int],
    *,
    window: Box | None,
) -> Iterator[StridedCopy]:
    """Yield the copies of a box of atoms to chunks with individual offsets: at least one copy per chunk."""
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
    chunk_loops = [step for step in piece.steps if step.chunk_step]
    element_loops = tuple(step for step in piece.steps if not step.chunk_step)
    for index in itertools.product(*(range(step.count) for step in chunk_loops)):
        atom_starts, chunk_index = dict(piece.atom_starts), piece.chunk_index
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
        atom_ranges: Range of each atom that no dim piece covers.
        dim_pieces: One piece per leaf dim.
        element_strides: Bytes between elements of a chunk, per leaf dim.
        file: Number of the file.
        file_offset: Offset of the first chunk.
        itemsize: Bytes per element.
        chunk_strides: Bytes between chunks, per leaf dim; empty if the pieces touch one chunk.
        window: Box of the tensor whose bytes in C order the tensor offsets count; None: the whole tensor.

    Returns:
        The copy.
    """
    atom_starts = {atom: start for atom, (start, _) in atom_ranges.items()} | {
        atom: start for piece in dim_pieces for atom, start in piece.atom_starts
    }
    tensor_offset, tensor_strides = _tensor_offset_and_strides(axis_map, atom_starts, itemsize, window)
    file_offset += sum(
        piece.element_offset * element_stride for piece, element_stride in zip(dim_pieces, element_strides)
    )
    dims = [
        (
            step.count,
            tensor_strides.get(step.atom, 0) * step.atom_step,
            step.chunk_step * chunk_stride + step.element_step * element_stride,
        )
        for piece, element_stride, chunk_stride in zip(
            dim_pieces, element_strides, chunk_strides or (0,) * len(dim_pieces)
        )
        for step in piece.steps
    ]
    return merge_dims(StridedCopy(tensor_offset, file, file_offset, itemsize, tuple(dims)))


def _tensor_offset_and_strides(
    axis_map: AxisMap, atom_starts: Mapping[str, int], itemsize: int, window: Box | None
) -> tuple[int, dict[str, int]]:
    """Return the tensor offset of the atoms' first indices, and the tensor stride of each free atom."""
    tensor_offset, atom_strides = 0, {}
    window = full_box(axis_map.source_shape) if window is None else window
    dim_strides = strides([stop - start for start, stop in window], itemsize)
    for dim, (window_start, _), dim_stride in zip(axis_map.source_dims, window, dim_strides):
        tensor_offset += (dim.start - window_start) * dim_stride
        for factor, atom_stride in zip(dim.factors, strides([f.extent for f in dim.factors], dim_stride)):
            tensor_offset += (atom_starts[factor.atom] if factor.fixed is None else factor.fixed) * atom_stride
            if factor.fixed is None:
                atom_strides[factor.atom] = atom_stride
    return tensor_offset, atom_strides


def merge_dims(copy: StridedCopy) -> StridedCopy:
    """Return an equal copy with as few dims as possible, sorted by descending file stride."""
    dims = sorted((dim for dim in copy.dims if dim[0] > 1), key=lambda dim: -dim[2])
    width, merged = copy.width, []
    for count, tensor_stride, file_stride in reversed(dims):
        if not merged and tensor_stride == file_stride == width:
            width *= count
        elif merged and (tensor_stride, file_stride) == (merged[-1][0] * merged[-1][1], merged[-1][0] * merged[-1][2]):
            merged[-1] = (merged[-1][0] * count, merged[-1][1], merged[-1][2])
        else:
            merged.append((count, tensor_stride, file_stride))
    return StridedCopy(copy.tensor_offset, copy.file, copy.file_offset, width, tuple(reversed(merged)))
