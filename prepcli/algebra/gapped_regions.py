"""Regions of leaves stored in several runs with gaps between them, as Flax stores large arrays."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from prepcli.algebra.boxes import Box
from prepcli.algebra.strided_copies import ChunkedLocation, StridedCopy, region_copies


@dataclass(frozen=True, slots=True)
class GappedRegion:
    """A region of a single-chunk leaf, stored with gaps.

    Attributes:
        region: The region as if the file had no gaps.
        gaps: (offset, nbytes) of each gap, ascending. Each moves all bytes from `offset` of the gapless file on
            by `nbytes` towards the end of the file.
    """

    region: ChunkedLocation
    gaps: tuple[tuple[int, int], ...]

    def copies(self, box: Box, window: Box | None = None) -> Iterator[StridedCopy]:
        """Yield the copies between a box of the tensor and the file, as `region_copies` does.

        A gap is a range of the file with bytes of something else, e.g. a header. No copy crosses one.
        """
        # Each gap splits the copies that are left. Those before it have their final shift.
        remaining = list(region_copies(self.region, box, window))
        shift_nbytes = 0
        for boundary, nbytes in self.gaps:
            rest: list[StridedCopy] = []
            for copy in remaining:
                before, after = split_copy(copy, boundary)
                rest += after
                for part in before:
                    yield _shift_file_offset(part, shift_nbytes)
            remaining = rest
            shift_nbytes += nbytes
        for copy in remaining:
            yield _shift_file_offset(copy, shift_nbytes)


def gaps_between(runs: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Return the gaps between runs (offset, nbytes) of a leaf, for a region that starts at the first run.

    E.g. runs (100, 50), (160, 50) -> one gap (150, 10).
    """
    # Flax stores an array above 1 GiB in pieces, each with its own msgpack header: the header is the gap.
    # Offsets of gaps count in the gapless file, so that an earlier gap does not move a later one.
    gaps: list[tuple[int, int]] = []
    gapless_offset = runs[0][0]
    for (offset, nbytes), (next_offset, _) in itertools.pairwise(runs):
        gapless_offset += nbytes
        gaps.append((gapless_offset, next_offset - offset - nbytes))
    return tuple(gaps)


def split_copy(copy: StridedCopy, boundary: int) -> tuple[list[StridedCopy], list[StridedCopy]]:
    """Split a copy at a byte of the file.

    Args:
        copy: The copy to split.
        boundary: File offset.

    Returns:
        The copies of the bytes before the boundary, and the copies of the bytes from it on.
    """
    span = copy.width + sum((count - 1) * stride for count, _, stride in copy.dims)
    if copy.file_offset + span <= boundary:
        return [copy], []
    if copy.file_offset >= boundary:
        return [], [copy]
    if not copy.dims:
        width = boundary - copy.file_offset
        rest = replace(
            copy,
            tensor_offset=copy.tensor_offset + width,
            file_offset=boundary,
            width=copy.width - width,
        )
        return [replace(copy, width=width)], [rest]
    (count, tensor_stride, file_stride), *inner = copy.dims
    inner_span = sum((n - 1) * stride for n, _, stride in inner) + copy.width
    # Step i of the outermost loop spans bytes i * file_stride to i * file_stride + inner_span. Steps
    # before `first_crossing` end before the boundary, steps from `stop_crossing` on begin after it.
    distance = boundary - copy.file_offset
    first_crossing = max(0, (distance - inner_span) // file_stride + 1)
    stop_crossing = min(count, -(-distance // file_stride))
    before = _slice_outer_dim(copy, 0, first_crossing)
    after = _slice_outer_dim(copy, stop_crossing, count)
    for index in range(first_crossing, stop_crossing):
        crossed = replace(
            copy,
            tensor_offset=copy.tensor_offset + index * tensor_stride,
            file_offset=copy.file_offset + index * file_stride,
            dims=tuple(inner),
        )
        head, tail = split_copy(crossed, boundary)
        before = before + head
        after = tail + after
    return before, after


def _slice_outer_dim(copy: StridedCopy, start: int, stop: int) -> list[StridedCopy]:
    """Return the indices from `start` to `stop` of a copy's outermost dim, as a list of at most one copy."""
    if start >= stop:
        return []
    _, tensor_stride, file_stride = copy.dims[0]
    dims = ((stop - start, tensor_stride, file_stride), *copy.dims[1:])
    return [
        replace(
            copy,
            tensor_offset=copy.tensor_offset + start * tensor_stride,
            file_offset=copy.file_offset + start * file_stride,
            dims=dims,
        )
    ]


def _shift_file_offset(copy: StridedCopy, shift_nbytes: int) -> StridedCopy:
    return replace(copy, file_offset=copy.file_offset + shift_nbytes)
