"""Verification of the bytes of an earlier run in a staging folder, before a run relies on them.

A journal records the durable bytes and their digests. The bytes are read from the data files, in the order of
their tensors, and compared. Different streams are written again.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import xxhash

from prepcli.core.observer import Progress
from prepcli.engine.blobs import open_blobs
from prepcli.engine.budget import Budget
from prepcli.engine.casts import parse_stream_digest
from prepcli.engine.files import Files, RunReader
from prepcli.engine.journal import JournalState, StreamPrefix
from prepcli.engine.no_follow import open_no_follow
from prepcli.engine.pipeline import Pipeline
from prepcli.engine.stream_values import allocate_run_buffers, read_values
from prepcli.planning import coverage
from prepcli.planning.plan import Plan, Stream
from prepcli.planning.tensors import itemsize
from prepcli.sources.source import Source
from prepcli.stores.reading import io_error

# Name of this task in progress reports.
CHECK_TASK = "check"


@dataclass(frozen=True, slots=True)
class StreamReader:
    """Reads streams back from data files, or again from the source, within a memory budget."""

    streams: Sequence[Stream]
    budget: Budget
    progress: Progress

    def digest_written_streams(
        self, stream_numbers: Iterable[int], data_files: Sequence[Path]
    ) -> dict[int, str]:
        """Read streams back from the data files. Return the digest of each, over its bytes in tensor order."""
        with Files(data_files) as opened:
            streams = {number: readback_stream(self.streams[number]) for number in stream_numbers}
            return self._compute_digests(streams, opened)

    def digest_source_streams(
        self, stream_numbers: Iterable[int], source: Source
    ) -> dict[int, str]:
        """Read streams again from the source. Return the digest of each."""
        streams: dict[int, Stream] = {}
        for number in stream_numbers:
            stream = self.streams[number]
            if stream.reads:
                streams[number] = replace(stream, writes=(), cast_to="", update=None, scale=None)
        with open_blobs(source.byte_sources, self.budget.cache_nbytes) as opened:
            return self._compute_digests(streams, opened)

    def _compute_digests(self, streams: Mapping[int, Stream], files: RunReader) -> dict[int, str]:
        self.progress.begin(CHECK_TASK, sum(stream.nbytes for stream in streams.values()))
        try:
            outcome = Pipeline(
                list(streams.values()), files, sink=None, budget=self.budget, progress=self.progress
            ).run()
        finally:
            self.progress.end()
        return {number: outcome.digests[position] for position, number in enumerate(streams)}

    def has_prefix(self, prefix: StreamPrefix, files: Sequence[Path]) -> bool:
        """Return whether the data files hold the first bytes of a stream."""
        stream = self.streams[prefix.stream_number]
        readback = readback_stream(stream)
        # A prefix counts bytes as read. Its digest is of the bytes as written.
        num_values = prefix.nbytes // itemsize(stream.dtype)
        end = readback.byte_range[0] + num_values * itemsize(stream.written_dtype)
        state = xxhash.xxh3_128()
        with Files(files) as opened:
            for start, data in read_values(opened, readback, buffers=allocate_run_buffers()):
                state.update(data[: max(0, end - start)].data)
                if start + data.size >= end:
                    break
        return state.hexdigest() == prefix.digest


def readback_stream(stream: Stream) -> Stream:
    """Return the stream to read the bytes written by `stream`."""
    return replace(
        stream,
        dtype=stream.written_dtype,
        reads=stream.writes,
        writes=(),
        fill=None,
        cast_to="",
        update=None,
        scale=None,
    )


def find_damaged(
    reader: StreamReader, digests: Mapping[int, str], *, files: Sequence[Path]
) -> set[int]:
    """Return the numbers of complete streams with other digests in the data files."""
    numbers: list[int] = []
    for number in digests:
        stream = reader.streams[number]
        if stream.writes and stream.nbytes:
            numbers.append(number)
    damaged: set[int] = set()
    for number, digest in reader.digest_written_streams(numbers, files).items():
        if digest != parse_stream_digest(digests[number]).written:
            damaged.add(number)
    return damaged


def find_outdated(reader: StreamReader, digests: Mapping[int, str], *, source: Source) -> set[int]:
    """Return the numbers of streams with other digests in the source."""
    outdated: set[int] = set()
    for number, digest in reader.digest_source_streams(digests, source).items():
        if digest != parse_stream_digest(digests[number]).read:
            outdated.add(number)
    return outdated


def verify_journal_state(
    reader: StreamReader,
    journal_state: JournalState,
    *,
    files: Sequence[Path],
    source: Source | None,
) -> JournalState:
    """Return the intact part of a journal's state.

    Args:
        reader: Reader of all streams of the plan.
        journal_state: The durable streams, as the journal records them.
        files: Paths of the data files, each with its planned size.
        source: The source, to read its bytes again and compare them with the digests of the journal. None if the
            files of the source are known to be unchanged.

    Returns:
        The complete streams (output files) with the bytes that the journal records. If `source` is None, also the
        first part of the file that was being written.
    """
    damaged = find_damaged(reader, journal_state.digests, files=files)
    if source:
        damaged |= find_outdated(reader, journal_state.digests, source=source)
    digests: dict[int, str] = {}
    nbytes = 0
    for number, digest in journal_state.digests.items():
        if number not in damaged:
            digests[number] = digest
            nbytes += reader.streams[number].nbytes
    # A prefix has no digest of the source's bytes to compare with a changed source. It is dropped.
    prefix = None
    if journal_state.prefix and source is None and reader.has_prefix(journal_state.prefix, files):
        prefix = journal_state.prefix
        nbytes += prefix.nbytes
    return JournalState(nbytes, digests, prefix)


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
    # A read of a hole allocates nothing, a write of zeros would fill it.
    if any(os.pread(fd, stop - start, start)):
        os.pwrite(fd, bytes(stop - start), start)
