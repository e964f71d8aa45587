"""A leaf whose bytes lie in several runs of a file, as Flax stores a large one: copies that no run's end cuts. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from prepcli.planning.boxes import Box
from prepcli.planning.strided_copies import Region, StridedCopy, region_copies


@dataclass(frozen=True, slots=True)
class GappedRegion:
    """A region of a leaf in one chunk that has gaps: from byte `edge` of the file on, as the region counts it, all lies
    `nbytes` further back."""

    region: Region
    gaps: tuple[tuple[int, int], ...]  # (edge, nbytes), ascending

    def copies(self, box: Box) -> Iterator[StridedCopy]:
        """The copies that tie a box of the tensor to the runs."""
        rest, back = list(region_copies(self.region, box)), 0
        for edge, nbytes in self.gaps:
            halves = [split_copy(copy, edge) for copy in rest]
            yield from (_shift_file_offset(copy, back) for before, _ in halves for copy in before)
            rest, back = [copy for _, after in halves for copy in after], back + nbytes
        yield from (_shift_file_offset(copy, back) for copy in rest)


def gaps_between(runs: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """The gaps of a leaf in runs (offset, nbytes), for a region that begins where the first run does."""
    found, edge = [], runs[0][0]
    for (offset, nbytes), (following, _) in itertools.pairwise(runs):
        edge += nbytes
        found.append((edge, following - offset - nbytes))
    return tuple(found)


def split_copy(copy: StridedCopy, edge: int) -> tuple[list[StridedCopy], list[StridedCopy]]:
    """What of a copy lies before a byte of the file on its other side, and what does not."""
    end = copy.file_offset + sum((count - 1) * step for count, _, step in copy.dims) + copy.width
    if end <= edge or copy.file_offset >= edge:
        return ([copy], []) if end <= edge else ([], [copy])
    if not copy.dims:
        width = edge - copy.file_offset
        rest = replace(copy, tensor_offset=copy.tensor_offset + width, file_offset=edge, width=copy.width - width)
        return [replace(copy, width=width)], [rest]
    (count, here, there), *inner = copy.dims
    span = sum((n - 1) * step for n, _, step in inner) + copy.width
    low, high = (
        max(0, (edge - copy.file_offset - span) // there + 1),
        min(count, -(-(edge - copy.file_offset) // there)),
    )
    before, after = _slice_outer_dim(copy, 0, low), _slice_outer_dim(copy, high, count)
    for i in range(low, high):
        crossed = replace(
            copy,
            tensor_offset=copy.tensor_offset + i * here,
            file_offset=copy.file_offset + i * there,
            dims=tuple(inner),
        )
        first, second = split_copy(crossed, edge)
        before, after = before + first, second + after
    return before, after


def _slice_outer_dim(copy: StridedCopy, start: int, stop: int) -> list[StridedCopy]:
    """The steps from `low` to `high` of a copy's outermost dim."""
    if start >= stop:
        return []
    _, here, there = copy.dims[0]
    dims = ((stop - start, here, there), *copy.dims[1:])
    return [
        replace(
            copy,
            tensor_offset=copy.tensor_offset + start * here,
            file_offset=copy.file_offset + start * there,
            dims=dims,
        )
    ]


def _shift_file_offset(copy: StridedCopy, shift_nbytes: int) -> StridedCopy:
    return replace(copy, file_offset=copy.file_offset + shift_nbytes)
