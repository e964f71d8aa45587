"""Coverage as an equation, on bytes: reads tile every tensor, writes tile every chunk, exactly once. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Literal

from prepcli.errors import PrepError
from prepcli.planning.boxes import strides
from prepcli.planning.moves import Copy, Region
from prepcli.planning.plan import Flat, Leaf, Plan, Side, Stream, side_copies
from prepcli.planning.slabs import Slab
from prepcli.planning.tensors import itemsize
from trainer.models.axis_map import TensorDim

Span = tuple[int, int, int]  # file, first byte, one past the last
Repeats = tuple[tuple[int, int], ...]  # of a run: (count, step), outermost first


def check(plan: Plan, slabs: Callable[[], Iterable[Slab]]) -> None:
    """PrepError unless the slabs read each streamed byte once and write each byte of every tensor and chunk once, each
    byte of a slab comes from one place and goes to one, and what has to be equal is read in the same pieces.

    `slabs` makes them anew each time it is called: they are never all in memory.
    """
    for stream in plan.streams:
        _check_stream(stream)
    for same in plan.checks:
        pieces = [{s.rows for s in plan.streams if s.name == name and s.left} for name in (same.name, same.other)]
        if not pieces[1] or not pieces[1] <= pieces[0]:
            raise _error(f"{same.name} and {same.other} would not be compared")
    _exact("read", _spans(_copies(plan, slabs(), "left")), _read_spans(plan))
    _exact("written", _spans(_copies(plan, slabs(), "right")), _written_spans(plan))


def gaps(plan: Plan) -> Iterator[Span]:
    """The bytes of each data file that neither streams nor the plan itself write: they are zeros."""
    fixed = ((i, at, at + len(data)) for i, file in enumerate(plan.files) for at, data in ((0, file.head), *file.fixed))
    ends = ((number, file.size, file.size) for number, file in enumerate(plan.files))
    at = 0, 0  # file, and the first byte that is not accounted for
    for number, low, high in sorted([*_joined("written", itertools.chain(_written_spans(plan), fixed)), *ends]):
        start = at[1] if at[0] == number else 0
        if start < low:
            yield number, start, low
        at = number, high


def written_spans(stream: Stream) -> Iterator[Span]:
    """The bytes of the data files that a stream writes."""
    return _declared(stream, stream.right, itemsize(stream.written_dtype))


def _check_stream(stream: Stream) -> None:
    """Something makes its bytes, and no two regions of a side have an element of it in common."""
    if not stream.left and stream.fill is None:
        raise _error(f"nothing to make {stream.name} of")
    for side in (stream.left, stream.right):
        for a, b in itertools.combinations([part for part in side if isinstance(part, Region)], 2):
            pairs = zip(a.row.source, b.row.source)
            if not any(_indices(x).isdisjoint(_indices(y)) for x, y in pairs):
                raise _error(f"two rows have a part of {stream.name}: `{a.row.text}` and `{b.row.text}`")


def _indices(dim: TensorDim) -> set[int]:
    """Of a dim of a tensor, the indices that a row has."""
    found = [dim.start]
    for factor, step in zip(dim.factors, strides([f.extent for f in dim.factors])):
        taken = range(factor.extent) if factor.held is None else (factor.held,)
        found = [start + index * step for start in found for index in taken]
    return set(found)


def _copies(plan: Plan, slabs: Iterable[Slab], side: Literal["left", "right"]) -> Iterator[Copy]:
    for slab in slabs:
        stream = plan.streams[slab.stream]
        copies, parts = (slab.left, stream.left) if side == "left" else (slab.right, stream.right)
        moved, due = sum(copy.nbytes for copy in copies), slab.nbytes if side == "left" else slab.written_nbytes
        if parts and moved != due:
            missing = f"{due:,} bytes from byte {slab.start:,} on, {moved:,} of them on the {side}"
            raise _error(f"{stream.name}: {missing}")
        yield from copies


def _read_spans(plan: Plan) -> Iterator[Span]:
    """What the streams should read: Flat sides as they are declared, regions by the bytes of their whole box."""
    for stream in plan.streams:
        yield from _declared(stream, stream.left, itemsize(stream.dtype))


def _written_spans(plan: Plan) -> Iterator[Span]:
    """What should be written: every chunk of every leaf, or each tensor's own place."""
    for leaf in plan.leaves:
        yield from _chunks(leaf)
    if not plan.leaves:
        for stream in plan.streams:
            yield from _declared(stream, stream.right, itemsize(stream.written_dtype))


def _declared(stream: Stream, side: Side, item: int) -> Iterator[Span]:
    for part in side if stream.nbytes else ():
        if isinstance(part, Flat):
            low, high = (edge // itemsize(stream.dtype) * item for edge in stream.span)
            yield part.file, part.offset + low, part.offset + high
        else:
            yield from _spans(side_copies((part,), stream.shape, item, stream.box))


def _chunks(leaf: Leaf) -> Iterator[Span]:
    size = leaf.chunk_nbytes
    found = 0
    for box in leaf.placed:
        counts = [stop - first for first, stop in zip(box.first, box.stop)]
        found += math.prod(counts)
        for index in box.indices():
            file, offset = box.places.find(index)
            yield file, offset, offset + size
    if found != math.prod(leaf.grid.counts):
        raise _error(f"{leaf.name} has {math.prod(leaf.grid.counts):,} chunks, the plan places {found:,}")


def _spans(copies: Iterable[Copy]) -> Iterator[Span]:
    """The bytes of all copies on the other side.

    A band of a transpose is a run in each of a thousand rows, and the next band goes on there: such copies become one
    with longer runs before any run is told apart, else there would be millions.
    """
    ends: dict[tuple[int, int, Repeats], tuple[int, int]] = {}  # file, end of the first run, repeats -> its start, run
    for copy in copies:
        run, repeats = copy.run, copy.repeats
        start, before = ends.pop((copy.file, copy.offset, repeats), (copy.offset, 0))
        end = copy.file, copy.offset + run, repeats
        if end in ends:  # the same bytes once more
            yield from _runs(copy.file, *ends[end], repeats)
        ends[end] = start, before + run
    for (file, _, repeats), (start, run) in ends.items():
        yield from _runs(file, start, run, repeats)


def _runs(file: int, start: int, run: int, repeats: Repeats) -> Iterator[Span]:
    while repeats and repeats[-1][1] == run:
        run, repeats = run * repeats[-1][0], repeats[:-1]
    for steps in itertools.product(*(range(0, count * step, step) for count, step in repeats)):
        low = start + sum(steps)
        yield file, low, low + run


def _exact(verb: str, found: Iterable[Span], wanted: Iterable[Span]) -> None:
    have, want = _joined(verb, found), _joined(verb, wanted)
    for a, b in itertools.zip_longest(have, want):
        if a != b:
            raise _error(f"bytes {verb}: {_text(a)} where {_text(b)} should be")


def _joined(verb: str, spans: Iterable[Span]) -> list[Span]:
    """Sorted spans, neighbours joined; PrepError where two overlap."""
    out: list[Span] = []
    for file, low, high in sorted(span for span in spans if span[1] < span[2]):
        if out and out[-1][0] == file and out[-1][2] > low:
            raise _error(f"bytes {low:,} to {min(high, out[-1][2]):,} of file {file} would be {verb} twice")
        if out and out[-1][0] == file and out[-1][2] == low:
            out[-1] = (file, out[-1][1], high)
        else:
            out.append((file, low, high))
    return out


def _text(span: Span | None) -> str:
    return f"file {span[0]}, {span[1]:,} to {span[2]:,}" if span else "nothing"


def _error(why: str) -> PrepError:
    return PrepError("the plan does not add up", why, "this is a bug in prep: nothing was written")
