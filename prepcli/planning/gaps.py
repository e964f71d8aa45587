"""A leaf whose bytes lie in several runs of a file, as Flax stores a large one: copies that no run's end cuts. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from prepcli.planning.boxes import Box
from prepcli.planning.moves import Copy, Region, copies


@dataclass(frozen=True, slots=True)
class Gapped:
    """A region of a leaf in one chunk that has gaps: from byte `edge` of the file on, as the region counts it, all lies
    `nbytes` further back."""

    region: Region
    gaps: tuple[tuple[int, int], ...]  # (edge, nbytes), ascending

    def copies(self, box: Box) -> Iterator[Copy]:
        """The copies that tie a box of the tensor to the runs."""
        rest, back = list(copies(self.region, box)), 0
        for edge, nbytes in self.gaps:
            halves = [cut(copy, edge) for copy in rest]
            yield from (_moved(copy, back) for before, _ in halves for copy in before)
            rest, back = [copy for _, after in halves for copy in after], back + nbytes
        yield from (_moved(copy, back) for copy in rest)


def gaps_between(runs: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """The gaps of a leaf in runs (offset, nbytes), for a region that begins where the first run does."""
    found, edge = [], runs[0][0]
    for (offset, nbytes), (following, _) in itertools.pairwise(runs):
        edge += nbytes
        found.append((edge, following - offset - nbytes))
    return tuple(found)


def cut(copy: Copy, edge: int) -> tuple[list[Copy], list[Copy]]:
    """What of a copy lies before a byte of the file on its other side, and what does not."""
    end = copy.offset + sum((count - 1) * step for count, _, step in copy.dims) + copy.width
    if end <= edge or copy.offset >= edge:
        return ([copy], []) if end <= edge else ([], [copy])
    if not copy.dims:
        width = edge - copy.offset
        rest = replace(copy, at=copy.at + width, offset=edge, width=copy.width - width)
        return [replace(copy, width=width)], [rest]
    (count, here, there), *inner = copy.dims
    span = sum((n - 1) * step for n, _, step in inner) + copy.width
    low, high = max(0, (edge - copy.offset - span) // there + 1), min(count, -(-(edge - copy.offset) // there))
    before, after = _steps(copy, 0, low), _steps(copy, high, count)
    for i in range(low, high):
        crossed = replace(copy, at=copy.at + i * here, offset=copy.offset + i * there, dims=tuple(inner))
        first, second = cut(crossed, edge)
        before, after = before + first, second + after
    return before, after


def _steps(copy: Copy, low: int, high: int) -> list[Copy]:
    """The steps from `low` to `high` of a copy's outermost dim."""
    if low >= high:
        return []
    _, here, there = copy.dims[0]
    dims = ((high - low, here, there), *copy.dims[1:])
    return [replace(copy, at=copy.at + low * here, offset=copy.offset + low * there, dims=dims)]


def _moved(copy: Copy, back: int) -> Copy:
    return replace(copy, offset=copy.offset + back)
