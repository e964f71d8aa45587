"""Checks of a source while a conversion reads it: changes of its files, and the digests and casts of its tensors."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from prepcli.core.errors import GET_AGAIN_HINT, RERUN_HINT, DamagedError, Option, PrepError, text
from prepcli.core.formatting import count_text
from prepcli.core.json_values import JsonValue
from prepcli.engine.blobs import DerivedArrays
from prepcli.engine.casts import CastCounts, LowRankUpdate, max_finite, parse_stream_digest
from prepcli.formats.manifest import again_hint
from prepcli.planning.plan import EqualityCheck, Plan, SourceFile, Stream, read_copies
from prepcli.planning.tensors import is_decoded_tensor, split_name
from prepcli.restore.digest_checks import RecordedDigests, checkpoint_of
from prepcli.sources.source import Source
from prepcli.sources.tensor_match import not_equal_error
from prepcli.stores.buffers import Blob
from prepcli.stores.files import io_error
from prepcli.stores.paths import AnyPath, is_remote, local_copy

# An unfinished output of other bytes is in the way of the same command.
RESTART_HINT = text("{} with {}", RERUN_HINT, Option("restart", True))

# inode and change time of each file
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
    return _file_states(stats)


def read_file_states(paths: Sequence[AnyPath]) -> SourceState:
    """Return the inode and change time of each file. Raise PrepError for a missing one."""
    return _file_states(_file_stats(paths))


def _file_stats(paths: Sequence[AnyPath]) -> list[os.stat_result]:
    stats: list[os.stat_result] = []
    for path in map(local_copy, paths):
        try:
            stats.append(path.stat())
        except OSError as error:
            raise io_error(path, error) from error
    return stats


def _file_states(stats: Sequence[os.stat_result]) -> SourceState:
    # Lists rather than tuples, because the state is stored as JSON and compared with what is read back.
    return [[file_stat.st_ino, file_stat.st_ctime_ns] for file_stat in stats]


def parse_source_state(value: JsonValue) -> SourceState:
    """Return the state in a record of the run."""
    state: SourceState = []
    for entry in value if isinstance(value, list) else ():
        match entry:
            case [int(inode), int(change_time_ns)]:
                state.append([inode, change_time_ns])
    return state


def source_changed_error(
    paths: Sequence[AnyPath], source: Source, hint: str = RESTART_HINT
) -> PrepError:
    """Return the error for changed files."""
    names = ", ".join(path.name for path in paths)
    return PrepError(f"{names} changed while it was read", f"in {source.display_name}", hint)


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

    def on_digest(self, number: int, digest_text: str) -> None:
        """Check the digest of a complete stream.

        Args:
            number: Number of the stream in the plan.
            digest_text: Digest and cast counts of the stream, as the pipeline writes them.

        Raises:
            PrepError: The digest differs from the recorded one or from the tied tensor's, or the cast overflowed.
        """
        stream = self._plan.streams[number]
        stream_digest = parse_stream_digest(digest_text)
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
        blob = self._byte_source(stream)
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

    def _byte_source(self, stream: Stream) -> Path | Blob:
        """Return the file or blob with the first byte of a stream."""
        return self._source.byte_sources[next(read_copies(stream, stream.box)).file]

    def _display_name(self, name: str) -> str:
        if is_decoded_tensor(name):
            _, name = split_name(name)
        return self._plan.display_names.get(name, name)
