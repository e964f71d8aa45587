"""Checks of written data files: their bytes against earlier notes, and their state before the publication.

A note records the digests of durable tensors. Their bytes are read from the data files, in the order of the tensors,
and compared. Reading all of them back before the publication would cost as much as writing them. A file truncated
during the writes has holes or another size, and a changed file has another change time. Only the streams next to a
hole are read back.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from prepcli.core.errors import RESUME_HINT, PrepError
from prepcli.core.observer import Progress
from prepcli.engine.background_sync import StreamPrefix
from prepcli.engine.blobs import open_blobs
from prepcli.engine.budget import Budget
from prepcli.engine.casts import parse_stream_digest
from prepcli.engine.digest import TensorDigest
from prepcli.engine.files import Files, RunReader
from prepcli.engine.pipeline import Pipeline
from prepcli.engine.stream_values import allocate_run_buffers, read_values
from prepcli.planning import coverage
from prepcli.planning.coverage import FileSpan, stream_write_spans
from prepcli.planning.plan import Plan, Stream
from prepcli.planning.tensors import itemsize
from prepcli.sources.source import Source
from prepcli.stores.files import io_error
from prepcli.stores.output_files import open_no_follow

# Name of this task in progress reports.
CHECK_TASK = "check"
# On each side of a hole: file systems truncate in the middle of a block.
HOLE_MARGIN_NBYTES = 1 << 17

FileStamps = dict[Path, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class StreamReader:
    """Reads streams back from data files, or again from the source, within a memory budget."""

    streams: Sequence[Stream]
    budget: Budget
    progress: Progress

    def digest_written_streams(
        self, stream_numbers: Iterable[int], written: RunReader
    ) -> dict[int, str]:
        """Read streams back from the data files. Return the digest of each, over its bytes in tensor order."""
        streams = {number: readback_stream(self.streams[number]) for number in stream_numbers}
        return self.digest_streams(streams, written)

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
            return self.digest_streams(streams, opened)

    def digest_streams(self, streams: Mapping[int, Stream], files: RunReader) -> dict[int, str]:
        """Read streams, given by number. Return the digest of each."""
        self.progress.begin(CHECK_TASK, sum(stream.nbytes for stream in streams.values()))
        try:
            outcome = Pipeline(
                list(streams.values()), files, sink=None, budget=self.budget, progress=self.progress
            ).run()
        finally:
            self.progress.end()
        return {number: outcome.digests[position] for position, number in enumerate(streams)}

    def has_prefix(self, prefix: StreamPrefix, written: RunReader) -> bool:
        """Return whether the data files hold the first bytes of a stream."""
        stream = self.streams[prefix.stream_number]
        readback = readback_stream(stream)
        # A prefix counts bytes as read. Its digest is of the bytes as written.
        num_values = prefix.nbytes // itemsize(stream.dtype)
        end = readback.byte_range[0] + num_values * itemsize(stream.written_dtype)
        state = TensorDigest()
        for start, data in read_values(written, readback, buffers=allocate_run_buffers()):
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
        operations=(),
    )


def find_damaged(reader: StreamReader, digests: Mapping[int, str], written: RunReader) -> set[int]:
    """Return the numbers of complete streams with other digests in the data files."""
    numbers: list[int] = []
    for number in digests:
        stream = reader.streams[number]
        if stream.writes and stream.nbytes:
            numbers.append(number)
    damaged: set[int] = set()
    for number, digest in reader.digest_written_streams(numbers, written).items():
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


def check_data_files(
    plan: Plan, files: Sequence[Path], *, digests: Mapping[int, str], reader: StreamReader
) -> None:
    """Check the sizes of the data files, and read streams next to holes back.

    Args:
        plan: The plan of the output.
        files: Paths of the data files, in the plan's order.
        digests: Digests of the streams, by number.
        reader: Reads streams back from the data files.

    Raises:
        PrepError: A file has another size, or lost bytes of a stream.
    """
    # A hole inside written bytes means that another program truncated the file while it was written:
    # later writes extend it again. Planned gaps and bytes of zeros are holes too, which is harmless.
    holes: list[FileSpan] = []
    for number, file in enumerate(plan.files):
        for start, stop in file_holes(files[number], file.size):
            holes.append((number, start - HOLE_MARGIN_NBYTES, stop + HOLE_MARGIN_NBYTES))
    if not holes:
        return
    touched: dict[int, str] = {}
    for number, stream in enumerate(plan.streams):
        if number in digests and _overlap_any_hole(holes, stream_write_spans(stream)):
            touched[number] = digests[number]
    with Files(files) as written:
        if find_damaged(reader, touched, written):
            raise changed_error(files[0].parent)


def file_holes(path: Path, size: int) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of each hole of a data file. Raise PrepError if it has another size."""
    try:
        fd = open_no_follow(path, os.O_RDONLY)
        try:
            if os.fstat(fd).st_size != size:
                raise changed_error(path)
            yield from _hole_ranges(fd, size)
        finally:
            os.close(fd)
    except OSError as error:
        raise io_error(path, error) from error


def _hole_ranges(fd: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of each hole of a file, or none if the file system does not report holes."""
    position = 0
    while position < size:
        try:
            start = os.lseek(fd, position, os.SEEK_HOLE)
        except OSError:
            return
        try:
            position = os.lseek(fd, start, os.SEEK_DATA) if start < size else size
        except OSError as error:
            if error.errno != errno.ENXIO:
                return
            # The rest of the file is a hole.
            position = size
        if start < position:
            yield start, position


def _overlap_any_hole(holes: Sequence[FileSpan], spans: Sequence[FileSpan]) -> bool:
    for file, low, high in spans:
        for hole_file, start, stop in holes:
            if file == hole_file and low < stop and start < high:
                return True
    return False


def read_stamps(files: Sequence[Path]) -> FileStamps:
    """Return one stamp per file. Writes change a stamp, reads and syncs do not."""
    return {path: _file_stamp(path) for path in files}


def check_unchanged(stamps: FileStamps) -> None:
    """Raise PrepError if a file was written to, truncated or replaced since its stamp was read."""
    for path, stamp in stamps.items():
        if _file_stamp(path) != stamp:
            raise changed_error(path)


def _file_stamp(path: Path) -> tuple[int, ...]:
    try:
        file_stat = path.lstat()
    except OSError as error:
        raise io_error(path, error) from error
    return file_stat.st_ino, file_stat.st_size, file_stat.st_mtime_ns, file_stat.st_ctime_ns


def changed_error(path: Path) -> PrepError:
    """Return the error for an output that another program has changed before its publication."""
    return PrepError(
        f"{path} was changed by another program", "it changed while it was written", RESUME_HINT
    )
