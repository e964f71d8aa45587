"""Coverage as an equation, on bytes: reads tile every tensor, writes tile every chunk, exactly once. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Literal

from prepcli.errors import PrepError
from prepcli.planning.boxes import strides
from prepcli.planning.plan import Contiguous, Locations, OutputLeaf, Plan, Stream, location_copies
from prepcli.planning.slabs import Slab
from prepcli.planning.strided_copies import Region, StridedCopy
from prepcli.planning.tensors import itemsize
from trainer.models.axis_map import TensorDim

FileSpan = tuple[int, int, int]  # file, first byte, one past the last
Repeats = tuple[tuple[int, int], ...]  # of a run: (count, step), outermost first


def check(plan: Plan, make_slabs: Callable[[], Iterable[Slab]]) -> None:
    """PrepError unless the slabs read each streamed byte once and write each byte of every tensor and chunk once, each
    byte of a slab comes from one place and goes to one, and what has to be equal is read in the same pieces.

    `slabs` makes them anew each time it is called: they are never all in memory.
    """
    for stream in plan.streams:
        _check_stream(stream)
    for same in plan.checks:
        pieces = [
            {s.rows for s in plan.streams if s.name == name and s.reads} for name in (same.name, same.duplicate_of)
        ]
        if not pieces[1] or not pieces[1] <= pieces[0]:
            raise _coverage_error(f"{same.name} and {same.duplicate_of} would not be compared")
    _check_equal_spans("read", _copy_spans(_slab_copies(plan, make_slabs(), "left")), _expected_read_spans(plan))
    _check_equal_spans("written", _copy_spans(_slab_copies(plan, make_slabs(), "right")), _expected_write_spans(plan))


def unwritten_spans(plan: Plan) -> Iterator[FileSpan]:
    """The bytes of each data file that neither streams nor the plan itself write: they are zeros."""
    fixed = (
        (i, at, at + len(data))
        for i, file in enumerate(plan.files)
        for at, data in ((0, file.header), *file.constant_ranges)
    )
    ends = ((number, file.size, file.size) for number, file in enumerate(plan.files))
    at = 0, 0  # file, and the first byte that is not accounted for
    for number, low, high in sorted(
        [*_merge_spans("written", itertools.chain(_expected_write_spans(plan), fixed)), *ends]
    ):
        start = at[1] if at[0] == number else 0
        if start < low:
            yield number, start, low
        at = number, high


def stream_write_spans(stream: Stream) -> Iterator[FileSpan]:
    """The bytes of the data files that a stream writes."""
    return _declared_spans(stream, stream.writes, itemsize(stream.written_dtype))


def _check_stream(stream: Stream) -> None:
    """Something makes its bytes, and no two regions of a side have an element of it in common."""
    if not stream.reads and stream.fill is None:
        raise _coverage_error(f"nothing to make {stream.name} of")
    for side in (stream.reads, stream.writes):
        for a, b in itertools.combinations([part for part in side if isinstance(part, Region)], 2):
            pairs = zip(a.axis_map.source_dims, b.axis_map.source_dims)
            if not any(_row_indices(x).isdisjoint(_row_indices(y)) for x, y in pairs):
                raise _coverage_error(
                    f"two rows have a part of {stream.name}: `{a.axis_map.text}` and `{b.axis_map.text}`"
                )


def _row_indices(dim: TensorDim) -> set[int]:
    """Of a dim of a tensor, the indices that a row has."""
    found = [dim.start]
    for factor, step in zip(dim.factors, strides([f.extent for f in dim.factors])):
        taken = range(factor.extent) if factor.fixed is None else (factor.fixed,)
        found = [start + index * step for start in found for index in taken]
    return set(found)


def _slab_copies(plan: Plan, slabs: Iterable[Slab], side: Literal["left", "right"]) -> Iterator[StridedCopy]:
    for slab in slabs:
        stream = plan.streams[slab.stream_number]
        copies, parts = (slab.reads, stream.reads) if side == "left" else (slab.writes, stream.writes)
        moved, due = sum(copy.nbytes for copy in copies), slab.nbytes if side == "left" else slab.written_nbytes
        if parts and moved != due:
            missing = f"{due:,} bytes from byte {slab.start:,} on, {moved:,} of them on the {side}"
            raise _coverage_error(f"{stream.name}: {missing}")
        yield from copies


def _expected_read_spans(plan: Plan) -> Iterator[FileSpan]:
    """What the streams should read: Flat sides as they are declared, regions by the bytes of their whole box."""
    for stream in plan.streams:
        yield from _declared_spans(stream, stream.reads, itemsize(stream.dtype))


def _expected_write_spans(plan: Plan) -> Iterator[FileSpan]:
    """What should be written: every chunk of every leaf, or each tensor's own place."""
    for leaf in plan.leaves:
        yield from _chunk_spans(leaf)
    if not plan.leaves:
        for stream in plan.streams:
            yield from _declared_spans(stream, stream.writes, itemsize(stream.written_dtype))


def _declared_spans(stream: Stream, locations: Locations, item_nbytes: int) -> Iterator[FileSpan]:
    for part in locations if stream.nbytes else ():
        if isinstance(part, Contiguous):
            low, high = (edge // itemsize(stream.dtype) * item_nbytes for edge in stream.byte_range)
            yield part.file, part.offset + low, part.offset + high
        else:
            yield from _copy_spans(location_copies((part,), stream.shape, item_nbytes, stream.box))


def _chunk_spans(leaf: OutputLeaf) -> Iterator[FileSpan]:
    size = leaf.chunk_nbytes
    found = 0
    for box in leaf.placed_chunks:
        counts = [stop - first for first, stop in zip(box.first, box.stop)]
        found += math.prod(counts)
        for index in box.indices():
            file, offset = box.placement.find(index)
            yield file, offset, offset + size
    if found != math.prod(leaf.grid.chunk_counts):
        raise _coverage_error(
            f"{leaf.name} has {math.prod(leaf.grid.chunk_counts):,} chunks, the plan places {found:,}"
        )


def _copy_spans(copies: Iterable[StridedCopy]) -> Iterator[FileSpan]:
    """The bytes of all copies on the other side.

    A band of a transpose is a run in each of a thousand rows, and the next band goes on there: such copies become one
    with longer runs before any run is told apart, else there would be millions.
    """
    ends: dict[tuple[int, int, Repeats], tuple[int, int]] = {}  # file, end of the first run, repeats -> its start, run
    for copy in copies:
        run, repeats = copy.run_nbytes, copy.repeats
        start, before = ends.pop((copy.file, copy.file_offset, repeats), (copy.file_offset, 0))
        end = copy.file, copy.file_offset + run, repeats
        if end in ends:  # the same bytes once more
            yield from _run_spans(copy.file, *ends[end], repeats)
        ends[end] = start, before + run
    for (file, _, repeats), (start, run) in ends.items():
        yield from _run_spans(file, start, run, repeats)


def _run_spans(file: int, first_offset: int, run_nbytes: int, repeats: Repeats) -> Iterator[FileSpan]:
    while repeats and repeats[-1][1] == run_nbytes:
        run_nbytes, repeats = run_nbytes * repeats[-1][0], repeats[:-1]
    for steps in itertools.product(*(range(0, count * step, step) for count, step in repeats)):
        low = first_offset + sum(steps)
        yield file, low, low + run_nbytes


def _check_equal_spans(verb: str, actual_spans: Iterable[FileSpan], expected_spans: Iterable[FileSpan]) -> None:
    have, want = _merge_spans(verb, actual_spans), _merge_spans(verb, expected_spans)
    for a, b in itertools.zip_longest(have, want):
        if a != b:
            raise _coverage_error(f"bytes {verb}: {_span_text(a)} where {_span_text(b)} should be")


def _merge_spans(verb: str, spans: Iterable[FileSpan]) -> list[FileSpan]:
    """Sorted spans, neighbours joined; PrepError where two overlap."""
    out: list[FileSpan] = []
    for file, low, high in sorted(span for span in spans if span[1] < span[2]):
        if out and out[-1][0] == file and out[-1][2] > low:
            raise _coverage_error(f"bytes {low:,} to {min(high, out[-1][2]):,} of file {file} would be {verb} twice")
        if out and out[-1][0] == file and out[-1][2] == low:
            out[-1] = (file, out[-1][1], high)
        else:
            out.append((file, low, high))
    return out


def _span_text(span: FileSpan | None) -> str:
    return f"file {span[0]}, {span[1]:,} to {span[2]:,}" if span else "nothing"


def _coverage_error(why: str) -> PrepError:
    return PrepError("the plan does not add up", why, "this is a bug in prep: nothing was written")
