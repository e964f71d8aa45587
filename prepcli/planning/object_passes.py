"""Streams of a further pass over a source, for objects without room in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from prepcli.algebra.boxes import Range
from prepcli.algebra.strided_copies import StridedCopy
from prepcli.planning.plan import Stream
from prepcli.planning.slabs import Slab, split_stream

# Byte ranges by file, ascending
FileSpans = Mapping[int, Sequence[tuple[int, int]]]


def streams_of_spans(
    streams: Sequence[Stream], spans: FileSpans, *, slab_nbytes: int
) -> list[Stream]:
    """Return the parts of streams with writes to byte ranges of files.

    Args:
        streams: All streams, in order.
        spans: The byte ranges.
        slab_nbytes: Maximum size of a slab.

    Returns:
        Streams with fewer rows. Their digests are not those of the tensors.
    """
    # New rows with the mean of the true ones need the true rows, also if these are written already.
    averaged: set[str] = set()
    parts: list[Stream | None] = []
    for number, stream in enumerate(streams):
        rows = _touching_rows(number, stream, spans, slab_nbytes)
        part: Stream | None = None
        if rows is not None:
            part = stream
            # The adapter and the values of new rows count from the first row.
            if stream.shape and stream.update is None and stream.fill is None:
                part = replace(stream, rows=rows)
            if stream.fill is not None and stream.fill.needs_true_rows:
                averaged.add(stream.name)
        parts.append(part)
    needed: list[Stream] = []
    for stream, part in zip(streams, parts):
        if stream.name in averaged:
            needed.append(stream)
        elif part is not None:
            needed.append(part)
    return needed


def _touching_rows(number: int, stream: Stream, spans: FileSpans, slab_nbytes: int) -> Range | None:
    """Return the rows of the slabs with writes to byte ranges, or None if there are none."""
    first: int | None = None
    stop = 0
    for slab in split_stream(number, stream, max_nbytes=slab_nbytes):
        if not any(_touches(copy, spans) for copy in slab.writes):
            continue
        slab_rows = _slab_rows(slab, stream)
        if first is None:
            first = slab_rows[0]
        stop = slab_rows[1]
    if first is None:
        return None
    return first, stop


def _slab_rows(slab: Slab, stream: Stream) -> Range:
    return slab.start // stream.row_nbytes, -(-(slab.start + slab.nbytes) // stream.row_nbytes)


def _touches(copy: StridedCopy, spans: FileSpans) -> bool:
    """Return whether the range from the first to the last byte of a copy overlaps byte ranges."""
    last_offset = sum((count - 1) * stride for count, stride in copy.repeats)
    stop = copy.file_offset + last_offset + copy.run_nbytes
    return any(start < stop and copy.file_offset < end for start, end in spans.get(copy.file, ()))
