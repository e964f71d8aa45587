"""Checks of the data of an output: its source while it is read, and the written files before the publication.

Changes of the source's files, and digests and casts of its tensors, are checked while a conversion reads them.

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

from prepcli.core.errors import (
    GET_AGAIN_HINT,
    RERUN_HINT,
    RESUME_HINT,
    DamagedError,
    Option,
    PrepError,
    text,
)
from prepcli.core.formatting import count_text
from prepcli.core.json_values import JsonValue
from prepcli.core.observer import Progress
from prepcli.engine.background_sync import StreamPrefix
from prepcli.engine.blobs import DerivedArrays, open_blobs
from prepcli.engine.budget import Budget
from prepcli.engine.casts import LowRankUpdate, max_finite
from prepcli.engine.digest import CastCounts, StreamDigest, TensorDigest
from prepcli.engine.files import Files, RunReader
from prepcli.engine.pipeline import Pipeline
from prepcli.engine.stream_values import allocate_run_buffers, read_values
from prepcli.formats.manifest import again_hint
from prepcli.planning import coverage
from prepcli.planning.arrays import location_copies
from prepcli.planning.coverage import stream_write_spans
from prepcli.planning.plan import EqualityCheck, Plan, SourceFile, Stream
from prepcli.planning.tensors import is_decoded_tensor, itemsize, split_name
from prepcli.restore.digest_checks import CHECK_TASK, RecordedDigests, checkpoint_of
from prepcli.sources.source import Source
from prepcli.sources.tensor_match import not_equal_error
from prepcli.stores.files import io_error, open_no_follow
from prepcli.stores.paths import AnyPath, is_remote, local_copy

# An unfinished output of other bytes is in the way of the same command.
RESTART_HINT = text("{} with {}", RERUN_HINT, Option("restart", True))

# Inode and change time of each file. Lists rather than tuples, because the state is stored as JSON and compared with
# what is read back.
SourceState = list[list[int]]


def read_source_state(
    stamps: Sequence[SourceFile], source: Source, hint: str = RESTART_HINT
) -> SourceState:
    """Return the inode and change time of each file of a source, or an empty list for a remote source.

    The state is not part of the plan: a source that was copied with its times is the same source, but its bytes
    are compared again.

    Args:
        stamps: The size and time of each file when the source was opened.
        source: The opened source.
        hint: Advice in the error.

    Returns:
        [inode, change time in ns] of each file.

    Raises:
        PrepError: The size or time of a file differs from its stamp.
    """
    # Sizes and times are in the stamps. Inode and change time also differ after a copy that keeps the time or
    # a `chmod`, where the bytes are equal, so that a difference only leads to a comparison.
    if is_remote(source.files):
        return []
    stats = _file_stats(source.files)
    for expected, path, file_stat in zip(stamps, source.files, stats):
        if (file_stat.st_size, file_stat.st_mtime_ns) != (expected.size, expected.mtime_ns):
            raise source_changed_error([path], source, hint)
    return [[file_stat.st_ino, file_stat.st_ctime_ns] for file_stat in stats]


def read_file_states(paths: Sequence[AnyPath]) -> SourceState:
    """Return the inode and change time of each file. Raise PrepError for a missing one."""
    return [[file_stat.st_ino, file_stat.st_ctime_ns] for file_stat in _file_stats(paths)]


def _file_stats(paths: Sequence[AnyPath]) -> list[os.stat_result]:
    stats: list[os.stat_result] = []
    for path in map(local_copy, paths):
        try:
            stats.append(path.stat())
        except OSError as error:
            raise io_error(path, error) from error
    return stats


def parse_source_state(value: JsonValue) -> SourceState:
    """Return the state in a record of the conversion."""
    state: SourceState = []
    for entry in value if isinstance(value, list) else ():
        match entry:
            case [int(inode), int(change_time_ns)]:
                state.append([inode, change_time_ns])
    return state


class SourceChangedError(PrepError):
    """A source has other bytes than when it was read."""


def source_changed_error(
    paths: Sequence[AnyPath], source: Source, hint: str = RESTART_HINT
) -> SourceChangedError:
    """Return the error for changed files."""
    names = ", ".join(path.name for path in paths)
    return SourceChangedError(
        f"{names} changed while it was read", f"in {source.display_name}", hint
    )


def touched_files(
    paths: Sequence[AnyPath], before: SourceState, *, now: SourceState
) -> list[AnyPath]:
    """Return the files with another inode or change time than before."""
    touched: list[AnyPath] = []
    for path, state_before, state_now in zip(paths, before, now):
        if state_before != state_now:
            touched.append(path)
    return touched


class IntegrityChecker:
    """Checks each stream's digest. A stream is a row range of one tensor.

    A digest has to be equal to the one in the source's manifest, and to the digest of a tied tensor. A cast may not
    overflow.
    """

    def __init__(self, plan: Plan, source: Source, *, allow_overflow: bool) -> None:
        self._plan = plan
        self._source = source
        self._allow_overflow = allow_overflow
        self._recorded = RecordedDigests(source)
        self._digests: dict[tuple[str, tuple[int, int]], str] = {}

    def on_digest(self, number: int, stream_digest: StreamDigest) -> None:
        """Check the digests of a complete stream.

        Args:
            number: Number of the stream in the plan.
            stream_digest: Its digests, and the counts of its cast.

        Raises:
            PrepError: The digest differs from the recorded one or from the tied tensor's, or the cast overflowed.
        """
        stream = self._plan.streams[number]
        digest = stream_digest.read
        self._check_overflow(stream, stream_digest.counts)
        expected = self._recorded.find(stream)
        if stream.reads and expected and expected != digest:
            raise self._digest_error(stream, digest, expected)
        self._digests[stream.name, stream.rows] = digest
        for check in self._plan.checks:
            if stream.name in (check.name, check.duplicate_of):
                self._compare_digests(check, stream)

    def _digest_error(self, stream: Stream, digest: str, expected: str) -> PrepError:
        """Return the error for a stream with another digest than the recorded one."""
        name = self._display_name(stream.name)
        # The file or blob with the first byte of the stream
        first_copy = next(location_copies(stream.reads, stream.box))
        blob = self._source.byte_sources[first_copy.file]
        if isinstance(blob, DerivedArrays) and is_decoded_tensor(stream.name):
            return PrepError(
                f"{name} of {blob.name} has other values than {self._source.display_name}",
                f"its decoded values have the digest {digest}, the manifest records {expected}",
                text(
                    "{} names the quantised model, {} writes the values. Add {} to either",
                    Option("quantized_source", "SOURCE"),
                    Option("quantized", "dequantize"),
                    Option("restart", True),
                ),
            )
        checkpoint_name = checkpoint_of(self._source, blob)
        hint = GET_AGAIN_HINT
        if checkpoint_name == self._source.display_name:
            hint = again_hint(self._source.manifest)
        return DamagedError(
            f"{name} in {checkpoint_name} is damaged",
            f"its bytes have the digest {digest}, its record has {expected}: the file has changed",
            hint,
        )

    def _check_overflow(self, stream: Stream, counts: CastCounts | None) -> None:
        """Raise PrepError if a cast or an adapter made values infinite or nan, unless this is allowed."""
        if not counts or not counts.overflowed or self._allow_overflow:
            return
        name = self._display_name(stream.name)
        dtype = stream.written_dtype
        largest = f"{max_finite(dtype):g}"
        if any(isinstance(operation, LowRankUpdate) for operation in stream.operations):
            verb = "becomes" if counts.overflowed == 1 else "become"
            what = f"{count_text(counts.overflowed, 'value')} of {name} {verb} infinite or nan"
            why = f"the adapter has nan, infinite or too large values: the largest of {dtype} is {largest}"
            raise PrepError(
                what,
                why,
                text(
                    "use another step of the adapter, or pass {} to write the values nevertheless",
                    Option("allow_overflow", True),
                ),
            )
        verb = "is" if counts.overflowed == 1 else "are"
        what = f"{count_text(counts.overflowed, 'value')} of {name} {verb} too large for {dtype}"
        hint = text("{} makes them infinite", Option("allow_overflow", True))
        raise PrepError(what, f"its largest value is {largest}", hint)

    def _compare_digests(self, check: EqualityCheck, stream: Stream) -> None:
        """Raise PrepError if two tensors were read with different digests, although they must be equal."""
        digest = self._digests.get((check.name, stream.rows))
        original_digest = self._digests.get((check.duplicate_of, stream.rows))
        if digest is None or original_digest is None or digest == original_digest:
            return
        # Only for the message: the digests are of all bytes, and the comparison finds the first difference.
        from prepcli.engine.stream_values import compare_streams

        row = compare_streams(
            self._source.byte_sources,
            self._find_stream(check.name, stream.rows),
            blobs_b=self._source.byte_sources,
            stream_b=self._find_stream(check.duplicate_of, stream.rows),
        ).row
        raise not_equal_error(
            self._source.family,
            check,
            display_names=self._plan.display_names,
            difference=f"first difference in row {row}",
        )

    def _find_stream(self, name: str, rows: tuple[int, int]) -> Stream:
        return next(s for s in self._plan.streams if s.name == name and s.rows == rows)

    def _display_name(self, name: str) -> str:
        if is_decoded_tensor(name):
            _, name = split_name(name)
        return self._plan.display_names.get(name, name)


# On each side of a hole: file systems truncate in the middle of a block.
HOLE_MARGIN_NBYTES = 1 << 17

FileStamps = dict[Path, tuple[int, ...]]


@dataclass(slots=True)
class StreamReader:
    """Reads streams back from data files, or again from the source, within a memory budget.

    `peak_nbytes` is the largest anonymous memory seen.
    """

    streams: Sequence[Stream]
    budget: Budget
    progress: Progress
    peak_nbytes: int = 0

    def digest_written_streams(
        self, stream_numbers: Iterable[int], written: RunReader
    ) -> dict[int, StreamDigest]:
        """Read streams back from the data files. Return the digests of each, over its bytes in tensor order."""
        streams = {number: readback_stream(self.streams[number]) for number in stream_numbers}
        return self.digest_streams(streams, written)

    def digest_streams(
        self, streams: Mapping[int, Stream], files: RunReader
    ) -> dict[int, StreamDigest]:
        """Read streams, given by number. Return the digests of each."""
        self.progress.begin(CHECK_TASK, sum(stream.nbytes for stream in streams.values()))
        try:
            outcome = Pipeline(
                list(streams.values()), files, sink=None, budget=self.budget, progress=self.progress
            ).run()
        finally:
            self.progress.end()
        self.peak_nbytes = max(self.peak_nbytes, outcome.peak_nbytes)
        return {number: outcome.digests[position] for position, number in enumerate(streams)}

    def has_prefix(self, prefix: StreamPrefix, written: RunReader) -> bool:
        """Return whether the data files hold the first bytes of a stream."""
        stream = self.streams[prefix.stream_number]
        readback = readback_stream(stream)
        # A prefix counts bytes as read. Its digest is of the bytes as written.
        num_values = prefix.nbytes // itemsize(stream.dtype)
        end = readback.byte_range[0] + num_values * itemsize(stream.written_dtype)
        state = TensorDigest(algorithm=stream.digest_algorithm)
        for start, data in read_values(written, readback, buffers=allocate_run_buffers()):
            state.update(data[: max(0, end - start)].data)
            if start + data.size >= end:
                break
        return state.text() == prefix.digest


def readback_stream(stream: Stream) -> Stream:
    """Return the stream to read the bytes written by `stream`."""
    return replace(
        stream,
        dtype=stream.written_dtype,
        reads=stream.writes,
        writes=(),
        operations=(),
    )


def find_damaged(
    reader: StreamReader, digests: Mapping[int, StreamDigest], written: RunReader
) -> set[int]:
    """Return the numbers of complete streams with other digests in the data files."""
    numbers: list[int] = []
    for number in digests:
        stream = reader.streams[number]
        if stream.writes and stream.nbytes:
            numbers.append(number)
    damaged: set[int] = set()
    for number, digest in reader.digest_written_streams(numbers, written).items():
        if digest.read != digests[number].written:
            damaged.add(number)
    return damaged


def find_outdated(
    reader: StreamReader, digests: Mapping[int, StreamDigest], *, source: Source
) -> set[int]:
    """Return the numbers of streams with other digests in the source."""
    streams: dict[int, Stream] = {}
    for number in digests:
        stream = reader.streams[number]
        if stream.reads:
            streams[number] = replace(stream, writes=(), operations=())
    with open_blobs(source.byte_sources, reader.budget.cache_nbytes) as opened:
        found = reader.digest_streams(streams, opened)
    outdated: set[int] = set()
    for number, digest in found.items():
        if digest.read != digests[number].read:
            outdated.add(number)
    return outdated


def zero_gaps(plan: Plan, files: Sequence[Path]) -> None:
    """Write zeros to the ranges of the data files that hold neither tensors nor headers and are not zero."""
    fds: dict[int, int] = {}
    try:
        for number, start, stop in coverage.unwritten_spans(plan):
            if number not in fds:
                fds[number] = open_no_follow(files[number], os.O_RDWR)
            # A read of a hole allocates nothing, a write of zeros would fill it.
            if any(os.pread(fds[number], stop - start, start)):
                os.pwrite(fds[number], bytes(stop - start), start)
    except OSError as error:
        raise io_error(files[0].parent, error) from error
    finally:
        for fd in fds.values():
            os.close(fd)


def check_data_files(
    plan: Plan, files: Sequence[Path], *, digests: Mapping[int, StreamDigest], reader: StreamReader
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
    holes: dict[int, list[tuple[int, int]]] = {}
    for number, file in enumerate(plan.files):
        for start, stop in file_holes(files[number], file.size):
            span = (start - HOLE_MARGIN_NBYTES, stop + HOLE_MARGIN_NBYTES)
            holes.setdefault(number, []).append(span)
    if not holes:
        return
    touched: dict[int, StreamDigest] = {}
    for number, digest in digests.items():
        for file, low, high in stream_write_spans(plan.streams[number]):
            if any(low < stop and start < high for start, stop in holes.get(file, ())):
                touched[number] = digest
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
            position = 0
            while position < size:
                try:
                    start = os.lseek(fd, position, os.SEEK_HOLE)
                except OSError:
                    # The file system does not report holes.
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
        finally:
            os.close(fd)
    except OSError as error:
        raise io_error(path, error) from error


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
