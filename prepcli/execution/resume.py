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
from prepcli.engine.casts import moved
from prepcli.engine.files import Files, Reads, io_error
from prepcli.engine.journal import Marked, Prefix
from prepcli.engine.own_files import open_own
from prepcli.engine.values import run_buffers, values
from prepcli.planning import coverage
from prepcli.planning.plan import Plan, Stream
from prepcli.planning.tensors import itemsize
from prepcli.sources.source import Source

CHECK = "check"  # the task, as progress calls it


@dataclass(frozen=True, slots=True)
class StreamReader:
    """Reads streams back from data files, or again from the source, within a budget."""

    streams: Sequence[Stream]
    spend: Budget
    progress: Progress

    def written(self, numbers: Iterable[int], files: Sequence[Path]) -> dict[int, str]:
        """The digest of what the data files hold of each stream, in the order of the tensor's bytes."""
        with Files(files) as opened:
            return self._digests({number: as_written(self.streams[number]) for number in numbers}, opened)

    def source(self, numbers: Iterable[int], source: Source) -> dict[int, str]:
        """The digest of what the source holds of each stream that is read from it."""
        read = {n: replace(self.streams[n], right=(), cast="") for n in numbers if self.streams[n].left}
        with open_blobs(source.reads, self.spend.cache_nbytes) as opened:
            return self._digests(read, opened)

    def _digests(self, streams: Mapping[int, Stream], files: Reads) -> dict[int, str]:
        self.progress.begin(CHECK, sum(stream.nbytes for stream in streams.values()))
        try:
            outcome = pipeline.run(list(streams.values()), files, None, self.spend, self.progress)
        finally:
            self.progress.end()
        return {number: outcome.digests[at] for at, number in enumerate(streams)}

    def has_prefix(self, prefix: Prefix, files: Sequence[Path]) -> bool:
        """Whether the data files hold the first bytes of a stream."""
        stream, state = self.streams[prefix.number], xxhash.xxh3_128()
        back = as_written(stream)
        end = back.span[0] + prefix.nbytes // itemsize(stream.dtype) * itemsize(stream.written_dtype)
        with Files(files) as opened:
            for start, data in values(opened, back, run_buffers()):
                state.update(data[: max(0, end - start)].data)
                if start + data.size >= end:
                    break
        return state.hexdigest() == prefix.digest


def as_written(stream: Stream) -> Stream:
    """The stream that reads what another one wrote."""
    return replace(stream, dtype=stream.written_dtype, left=stream.right, right=(), fill=None, cast="")


def damaged(reader: StreamReader, promised: Mapping[int, str], files: Sequence[Path]) -> set[int]:
    """The whole streams that the data files do not hold as promised."""
    numbers = [number for number in promised if reader.streams[number].right and reader.streams[number].nbytes]
    found = reader.written(numbers, files)
    return {number for number, digest in found.items() if digest != moved(promised[number]).written}


def outdated(reader: StreamReader, promised: Mapping[int, str], source: Source) -> set[int]:
    """The streams that the source does not hold any more as they were read."""
    found = reader.source(promised, source)
    return {number for number, digest in found.items() if digest != moved(promised[number]).read}


def kept(reader: StreamReader, promised: Marked, files: Sequence[Path], source: Source | None) -> Marked:
    """The part of what a journal promises that holds.

    Args:
        reader: Of all streams of the plan.
        promised: What the journal says.
        files: The data files, each with its planned size.
        source: The source where it may have changed since: it is read again too. None where it has not.
    """
    bad = damaged(reader, promised.digests, files)
    if source:
        bad |= outdated(reader, promised.digests, source)
    digests = {number: digest for number, digest in promised.digests.items() if number not in bad}
    prefix = promised.prefix if source is None else None
    if prefix and not reader.has_prefix(prefix, files):
        prefix = None
    nbytes = sum(reader.streams[number].nbytes for number in digests)
    return Marked(nbytes + (prefix.nbytes if prefix else 0), digests, prefix)


def clear_gaps(plan: Plan, files: Sequence[Path]) -> None:
    """Write zeros where the data files of a plan hold neither tensors nor a header, and are not zero."""
    fds: dict[int, int] = {}
    try:
        for number, low, high in coverage.gaps(plan):
            if number not in fds:
                fds[number] = open_own(files[number], os.O_RDWR)
            _clear(fds[number], low, high)
    except OSError as error:
        raise io_error(files[0].parent, error) from error
    finally:
        for fd in fds.values():
            os.close(fd)


def _clear(fd: int, low: int, high: int) -> None:
    if any(os.pread(fd, high - low, low)):
        os.pwrite(fd, bytes(high - low), low)
