"""Check a plan's coverage: reads tile every tensor and writes tile every chunk exactly once."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence

from prepcli.algebra.axis_map import TensorDim
from prepcli.algebra.boxes import Range, strides
from prepcli.algebra.strided_copies import StridedCopy
from prepcli.core.errors import PrepError
from prepcli.planning.arrays import Locations, location_copies
from prepcli.planning.plan import Plan, Stream
from prepcli.planning.slabs import Slab, split_stream
from prepcli.planning.tensors import is_decoded_tensor

# File number, start byte, stop byte.
FileSpan = tuple[int, int, int]
# (count, stride) of a repeated run, outermost first
Repeats = tuple[tuple[int, int], ...]


def check(plan: Plan, slab_nbytes: int) -> None:
    """Check a plan: every byte must be read and written exactly once. It may be read again for a check.

    Args:
        plan: The plan to check.
        slab_nbytes: Largest size of a slab.

    Raises:
        PrepError: A byte is read or written twice or not at all, or tensors that must be equal are read in different
            pieces.
    """
    for stream in plan.streams:
        if not stream.reads and not stream.is_generated:
            raise _coverage_error(f"{stream.name} is neither read nor filled")
        _check_disjoint(stream.name, stream.reads)
        _check_disjoint(stream.name, stream.writes)
    for equality in plan.checks:
        rows = _read_rows(plan, equality.name)
        original_rows = _read_rows(plan, equality.duplicate_of)
        if not original_rows or not original_rows <= rows:
            raise _coverage_error(
                f"{equality.name} and {equality.duplicate_of} would not be compared"
            )
    # Both directions are compared as byte ranges: the slabs' copies, and the plan's locations.
    # Slabs come from the code that the engine runs, so an error of the index algebra is found here. The engine may make
    # smaller ones for the caches. None is kept, because a plan may have too many for memory.
    # Tensors that are read for a check alone may have bytes of others. Among themselves they share none.
    read_runs = {False: _CopiedRuns(), True: _CopiedRuns()}
    expected_reads: dict[bool, list[FileSpan]] = {False: [], True: []}
    written_runs = _CopiedRuns()
    for number, stream in enumerate(plan.streams):
        is_check = is_decoded_tensor(stream.name)
        expected_reads[is_check] += _stream_spans(stream, stream.reads)
        for slab in split_stream(number, stream, max_nbytes=slab_nbytes):
            if stream.reads:
                _check_nbytes(stream, slab, "reads", slab.reads, slab.nbytes)
            if stream.writes:
                _check_nbytes(stream, slab, "writes", slab.writes, slab.written_nbytes)
            read_runs[is_check].add(slab.reads)
            written_runs.add(slab.writes)
    for is_check, runs in read_runs.items():
        actual = _merge_spans(runs.spans(), "read")
        _check_equal_spans("read", actual, _merge_spans(expected_reads[is_check], "read"))
    actual = _merge_spans(written_runs.spans(), "written")
    expected = _merge_spans(_expected_write_spans(plan), "written")
    _check_equal_spans("written", actual, expected)


def _read_rows(plan: Plan, name: str) -> set[Range]:
    """Return the row ranges in which a tensor is read."""
    return {stream.rows for stream in plan.streams if stream.name == name and stream.reads}


def unwritten_spans(plan: Plan) -> Iterator[FileSpan]:
    """Yield the byte ranges of the data files that neither streams nor constants write. They must be zero."""
    constant_spans: list[FileSpan] = []
    file_ends: list[FileSpan] = []
    for number, file in enumerate(plan.files):
        file_ends.append((number, file.size, file.size))
        for offset, data in ((0, file.header), *file.constant_ranges):
            constant_spans.append((number, offset, offset + len(data)))
    written = _expected_write_spans(plan) + constant_spans
    last_file = 0
    last_stop = 0
    for number, start, stop in sorted([*_merge_spans(written, "written"), *file_ends]):
        gap_start = last_stop if last_file == number else 0
        if gap_start < start:
            yield number, gap_start, start
        last_file = number
        last_stop = stop


def written_spans(plan: Plan) -> list[FileSpan]:
    """Return the byte ranges of the data files that streams write, sorted and joined."""
    return _merge_spans(_expected_write_spans(plan), "written")


def stream_write_spans(stream: Stream) -> list[FileSpan]:
    """Return the byte ranges of the data files written by a stream."""
    return _stream_spans(stream, stream.writes)


def _check_disjoint(name: str, locations: Locations) -> None:
    """Raise PrepError if two regions of a tensor share an element: they have a common index in every dim."""
    regions = [location for location in locations if location.axis_map is not None]
    for a, b in itertools.combinations(regions, 2):
        dims = zip(a.axis_map.source_dims, b.axis_map.source_dims)
        if not any(_row_indices(x).isdisjoint(_row_indices(y)) for x, y in dims):
            raise _coverage_error(
                f"two rows map the same part of {name}: `{a.axis_map.text}` and `{b.axis_map.text}`"
            )


def _row_indices(dim: TensorDim) -> set[int]:
    """Return the indices of a tensor dim mapped by an axis-map row."""
    # E.g. (heads=2 qkv=3 at 1 head_dim=2) of a fused dim of 12: 1 * 2 + {0, 6} + {0, 1} = {2, 3, 8, 9}.
    indices = [dim.start]
    for factor, stride in zip(dim.factors, strides([factor.extent for factor in dim.factors])):
        factor_indices = range(factor.extent) if factor.fixed is None else (factor.fixed,)
        steps = [index * stride for index in factor_indices]
        indices = list(map(sum, itertools.product(indices, steps)))
    return set(indices)


def _check_nbytes(
    stream: Stream, slab: Slab, direction: str, copies: Sequence[StridedCopy], nbytes: int
) -> None:
    """Raise PrepError if the reads or the writes of a slab have another number of bytes than the slab."""
    copied_nbytes = sum(copy.nbytes for copy in copies)
    if copied_nbytes != nbytes:
        why = f"has {nbytes:,} bytes, its {direction} have {copied_nbytes:,}"
        raise _coverage_error(f"{stream.name}: the slab at byte {slab.start:,} {why}")


def _expected_write_spans(plan: Plan) -> list[FileSpan]:
    """Return the byte ranges to write: every chunk of every leaf, or every tensor without leaves.

    Raises:
        PrepError: The plan places too few or too many chunks of a leaf.
    """
    spans: list[FileSpan] = []
    for leaf in plan.leaves:
        chunk_nbytes = leaf.chunk_nbytes
        num_before = len(spans)
        for box in leaf.placed_chunks:
            file = box.chunks.file
            for offset in box.offsets():
                spans.append((file, offset, offset + chunk_nbytes))
        chunk_count = math.prod(leaf.grid.chunk_counts)
        placed_count = len(spans) - num_before
        if placed_count != chunk_count:
            raise _coverage_error(
                f"{leaf.name} has {chunk_count:,} chunks, the plan places {placed_count:,}"
            )
    if not plan.leaves:
        for stream in plan.streams:
            spans += stream_write_spans(stream)
    return spans


def _stream_spans(stream: Stream, locations: Locations) -> list[FileSpan]:
    """Return the byte ranges of a stream's rows in the files of `locations` (its reads or its writes)."""
    if not stream.nbytes:
        return []
    runs = _CopiedRuns()
    runs.add(location_copies(locations, stream.box))
    return runs.spans()


class _CopiedRuns:
    """The runs of copies in the files.

    One slab of a transpose writes a short run in each of many rows, and the next slab continues these runs. Such copies
    are joined to longer runs before they are expanded, because there would be millions of ranges.
    """

    def __init__(self) -> None:
        # (file, end of the first run, repeats) -> (start of the first run, bytes per run), e.g. two slabs
        # that write 8 bytes at 0, 100, 200 and 8 bytes at 8, 108, 208 become 16 bytes at 0, 100, 200
        self._runs_by_end: dict[tuple[int, int, Repeats], tuple[int, int]] = {}
        self._repeated: list[FileSpan] = []

    def add(self, copies: Iterable[StridedCopy]) -> None:
        """Add the runs of copies, each joined with the run that it continues."""
        for copy in copies:
            run_nbytes = copy.run_nbytes
            repeats = copy.repeats
            preceding_end = (copy.file, copy.file_offset, repeats)
            start, preceding_nbytes = self._runs_by_end.pop(preceding_end, (copy.file_offset, 0))
            end = (copy.file, copy.file_offset + run_nbytes, repeats)
            # The same bytes are copied twice. Both runs are kept.
            if end in self._runs_by_end:
                self._repeated += _run_spans(copy.file, *self._runs_by_end[end], repeats)
            self._runs_by_end[end] = (start, preceding_nbytes + run_nbytes)

    def spans(self) -> list[FileSpan]:
        """Return the byte ranges of all runs."""
        # A slab that ends within the rows of a permutation leaves runs with different repeats. E.g. even values at
        # 0, 4, 8 and odd ones at 2, 6, in each of 4,096 rows: they are joined in the first row alone.
        spans = [*self._repeated]
        first_runs: dict[tuple[int, Repeats], list[FileSpan]] = {}
        for (file, _, repeats), (start, run_nbytes) in self._runs_by_end.items():
            runs = first_runs.setdefault((file, repeats[:1]), [])
            runs += _run_spans(file, start, run_nbytes, repeats[1:])
        for (file, outer_repeats), runs in first_runs.items():
            for _, start, stop in _merge_spans(runs):
                spans += _run_spans(file, start, stop - start, outer_repeats)
        return spans


def _run_spans(
    file: int, first_offset: int, run_nbytes: int, repeats: Repeats
) -> Iterator[FileSpan]:
    """Yield the byte range of each repetition of a run."""
    while repeats and repeats[-1][1] == run_nbytes:
        run_nbytes *= repeats[-1][0]
        repeats = repeats[:-1]
    ranges = [range(0, count * stride, stride) for count, stride in repeats]
    for displacements in itertools.product(*ranges):
        start = first_offset + sum(displacements)
        yield file, start, start + run_nbytes


def _check_equal_spans(verb: str, actual: list[FileSpan], expected: list[FileSpan]) -> None:
    """Raise PrepError unless two lists of merged byte ranges are equal."""
    for actual_span, expected_span in itertools.zip_longest(actual, expected):
        if actual_span != expected_span:
            raise _coverage_error(
                f"bytes {verb}: {_span_text(actual_span)} where {_span_text(expected_span)} should be"
            )


def _merge_spans(spans: Iterable[FileSpan], once: str = "") -> list[FileSpan]:
    """Sort spans and join adjacent ones. With `once`, e.g. `read`, raise PrepError if two overlap."""
    merged: list[FileSpan] = []
    for file, start, stop in sorted(span for span in spans if span[1] < span[2]):
        if once and merged and merged[-1][0] == file and merged[-1][2] > start:
            raise _coverage_error(
                f"bytes {start:,} to {min(stop, merged[-1][2]):,} of file {file} would be {once} twice"
            )
        if merged and merged[-1][0] == file and merged[-1][2] == start:
            merged[-1] = (file, merged[-1][1], stop)
        else:
            merged.append((file, start, stop))
    return merged


def _span_text(span: FileSpan | None) -> str:
    if span is None:
        return "nothing"
    return f"file {span[0]}, {span[1]:,} to {span[2]:,}"


def _coverage_error(why: str) -> PrepError:
    return PrepError("the plan is inconsistent", why, "this is a bug in prep: nothing was written")
