"""Verification of the bytes that an earlier run left in a staging folder, before a run relies on them.

A journal records which bytes are durable, and their digests. The bytes are read from the data files, in the order of
their tensors, and compared. Streams that differ are written again.
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

CHECK_TASK = "check"  # name of the task in progress reports


@dataclass(frozen=True, slots=True)
class StreamReader:
    """Reads streams back from data files, or again from the source, within a memory budget."""

    streams: Sequence[Stream]
    budget: Budget
    progress: Progress

    def written_digests(self, numbers: Iterable[int], files: Sequence[Path]) -> dict[int, str]:
        """Return the digest of each stream in the data files, in the order of the tensor's bytes."""
        with Files(files) as opened:
            return self._digests({number: readback_stream(self.streams[number]) for number in numbers}, opened)

    def source_digests(self, numbers: Iterable[int], source: Source) -> dict[int, str]:
        """Return the digest of each stream's bytes in the source."""
        streams = {
            n: replace(self.streams[n], writes=(), cast_to="", update=None) for n in numbers if self.streams[n].reads
        }
        with open_blobs(source.byte_sources, self.budget.cache_nbytes) as opened:
            return self._digests(streams, opened)

    def _digests(self, streams: Mapping[int, Stream], files: RunReader) -> dict[int, str]:
        self.progress.begin(CHECK_TASK, sum(stream.nbytes for stream in streams.values()))
        try:
            outcome = pipeline.run(list(streams.values()), files, sink=None, budget=self.budget, progress=self.progress)
        finally:
            self.progress.end()
        return {number: outcome.digests[position] for position, number in enumerate(streams)}

    def has_prefix(self, prefix: StreamPrefix, files: Sequence[Path]) -> bool:
        """Return whether the data files hold the first bytes of a stream."""
        stream, state = self.streams[prefix.stream_number], xxhash.xxh3_128()
        readback = readback_stream(stream)
        end = readback.byte_range[0] + prefix.nbytes // itemsize(stream.dtype) * itemsize(stream.written_dtype)
        with Files(files) as opened:
            for start, data in read_values(opened, readback, buffers=allocate_run_buffers()):
                state.update(data[: max(0, end - start)].data)
                if start + data.size >= end:
                    break
        return state.hexdigest() == prefix.digest


def readback_stream(stream: Stream) -> Stream:
    """Return the stream that reads the bytes that `stream` wrote."""
    return replace(
        stream, dtype=stream.written_dtype, reads=stream.writes, writes=(), fill=None, cast_to="", update=None
    )


def find_damaged(reader: StreamReader, digests: Mapping[int, str], *, files: Sequence[Path]) -> set[int]:
    """Return the numbers of complete streams whose bytes in the data files differ from their digests."""
    numbers = [number for number in digests if reader.streams[number].writes and reader.streams[number].nbytes]
    actual_digests = reader.written_digests(numbers, files)
    return {
        number for number, digest in actual_digests.items() if digest != parse_stream_digest(digests[number]).written
    }


def find_outdated(reader: StreamReader, digests: Mapping[int, str], *, source: Source) -> set[int]:
    """Return the numbers of streams whose bytes in the source differ from their digests."""
    actual_digests = reader.source_digests(digests, source)
    return {number for number, digest in actual_digests.items() if digest != parse_stream_digest(digests[number]).read}


def verify_journal_state(
    reader: StreamReader, journal_state: JournalState, *, files: Sequence[Path], source: Source | None
) -> JournalState:
    """Return the part of a journal's state whose bytes are intact.

    Args:
        reader: Reader of all streams of the plan.
        journal_state: The durable streams, as the journal records them.
        files: Paths of the data files, each with its planned size.
        source: The source, if it may have changed since and is to be read again; None if it has not changed.

    Returns:
        The complete streams whose bytes are intact. If `source` is None, also the intact prefix of the incomplete
        stream.
    """
    damaged = find_damaged(reader, journal_state.digests, files=files)
    if source:
        damaged |= find_outdated(reader, journal_state.digests, source=source)
    digests = {number: digest for number, digest in journal_state.digests.items() if number not in damaged}
    prefix = journal_state.prefix if source is None else None
    if prefix and not reader.has_prefix(prefix, files):
        prefix = None
    nbytes = sum(reader.streams[number].nbytes for number in digests)
    return JournalState(nbytes + (prefix.nbytes if prefix else 0), digests, prefix)


def zero_gaps(plan: Plan, files: Sequence[Path]) -> None:
    """Write zeros to the ranges of the data files that hold neither tensors nor headers and are not zero."""
    fds: dict[int, int] = {}
    try:
        for number, start, stop in coverage.unwritten_spans(plan):
            if number not in fds:
                fds[number] = open_no_follow(files[number], os.O_RDWR)
            _zero_range(fds[number], start, stop)
    except OSError as error:
        raise io_error(files[0].parent, error) from error
    finally:
        for fd in fds.values():
            os.close(fd)


def _zero_range(fd: int, start: int, stop: int) -> None:
    if any(os.pread(fd, stop - start, start)):
        os.pwrite(fd, bytes(stop - start), start)
