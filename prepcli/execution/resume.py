"""What an earlier run left in a staging folder: read back before a run relies on it.

A journal says which bytes are durable and what digests they have. Here they are read from the data files, in the order
of their tensors, and compared. What differs is written anew.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import xxhash

from prepcli.console.progress import Progress
from prepcli.engine import pipeline
from prepcli.engine.blobs import open_blobs
from prepcli.engine.budget import Budget
from prepcli.engine.casts import parse_stream_digest
from prepcli.engine.files import Files, RunReader, io_error
from prepcli.engine.journal import JournalState, StreamPrefix
from prepcli.engine.no_follow import open_no_follow
from prepcli.engine.stream_values import allocate_run_buffers, read_values
from prepcli.planning import coverage
from prepcli.planning.plan import Plan, Stream
from prepcli.planning.tensors import itemsize
from prepcli.sources.source import Source

CHECK_TASK = "check"  # the task, as progress calls it


@dataclass(frozen=True, slots=True)
class StreamReader:
    """Reads streams back from data files, or again from the source, within a budget."""

    streams: Sequence[Stream]
    budget: Budget
    progress: Progress

    def written_digests(self, numbers: Iterable[int], files: Sequence[Path]) -> dict[int, str]:
        """The digest of what the data files hold of each stream, in the order of the tensor's bytes."""
        with Files(files) as opened:
            return self._digests({number: readback_stream(self.streams[number]) for number in numbers}, opened)

    def source_digests(self, numbers: Iterable[int], source: Source) -> dict[int, str]:
        """The digest of what the source holds of each stream that is read from it."""
        read = {n: replace(self.streams[n], writes=(), cast_to="") for n in numbers if self.streams[n].reads}
        with open_blobs(source.byte_sources, self.budget.cache_nbytes) as opened:
            return self._digests(read, opened)

    def _digests(self, streams: Mapping[int, Stream], files: RunReader) -> dict[int, str]:
        self.progress.begin(CHECK_TASK, sum(stream.nbytes for stream in streams.values()))
        try:
            outcome = pipeline.run(list(streams.values()), files, None, self.budget, self.progress)
        finally:
            self.progress.end()
        return {number: outcome.digests[at] for at, number in enumerate(streams)}

    def has_prefix(self, prefix: StreamPrefix, files: Sequence[Path]) -> bool:
        """Whether the data files hold the first bytes of a stream."""
        stream, state = self.streams[prefix.stream_number], xxhash.xxh3_128()
        back = readback_stream(stream)
        end = back.byte_range[0] + prefix.nbytes // itemsize(stream.dtype) * itemsize(stream.written_dtype)
        with Files(files) as opened:
            for start, data in read_values(opened, back, allocate_run_buffers()):
                state.update(data[: max(0, end - start)].data)
                if start + data.size >= end:
                    break
        return state.hexdigest() == prefix.digest


def readback_stream(stream: Stream) -> Stream:
    """The stream that reads what another one wrote."""
    return replace(stream, dtype=stream.written_dtype, reads=stream.writes, writes=(), fill=None, cast_to="")


def find_damaged(reader: StreamReader, digests: Mapping[int, str], files: Sequence[Path]) -> set[int]:
    """The whole streams that the data files do not hold as promised."""
    numbers = [number for number in digests if reader.streams[number].writes and reader.streams[number].nbytes]
    found = reader.written_digests(numbers, files)
    return {number for number, digest in found.items() if digest != parse_stream_digest(digests[number]).written}


def find_outdated(reader: StreamReader, digests: Mapping[int, str], source: Source) -> set[int]:
    """The streams that the source does not hold any more as they were read."""
    found = reader.source_digests(digests, source)
    return {number for number, digest in found.items() if digest != parse_stream_digest(digests[number]).read}


def verify_marked(
    reader: StreamReader, marked: JournalState, files: Sequence[Path], source: Source | None
) -> JournalState:
    """The part of what a journal promises that holds.

    Args:
        reader: Of all streams of the plan.
        promised: What the journal says.
        files: The data files, each with its planned size.
        source: The source where it may have changed since: it is read again too. None where it has not.
    """
    bad = find_damaged(reader, marked.digests, files)
    if source:
        bad |= find_outdated(reader, marked.digests, source)
    digests = {number: digest for number, digest in marked.digests.items() if number not in bad}
    prefix = marked.prefix if source is None else None
    if prefix and not reader.has_prefix(prefix, files):
        prefix = None
    nbytes = sum(reader.streams[number].nbytes for number in digests)
    return JournalState(nbytes + (prefix.nbytes if prefix else 0), digests, prefix)


def zero_gaps(plan: Plan, files: Sequence[Path]) -> None:
    """Write zeros where the data files of a plan hold neither tensors nor a header, and are not zero."""
    fds: dict[int, int] = {}
    try:
        for number, low, high in coverage.unwritten_spans(plan):
            if number not in fds:
                fds[number] = open_no_follow(files[number], os.O_RDWR)
            _zero_range(fds[number], low, high)
    except OSError as error:
        raise io_error(files[0].parent, error) from error
    finally:
        for fd in fds.values():
            os.close(fd)


def _zero_range(fd: int, low: int, high: int) -> None:
    if any(os.pread(fd, high - low, low)):
        os.pwrite(fd, bytes(high - low), low)
