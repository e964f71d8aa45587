"""Checks on the streams of a conversion: recorded digests, equality of tied tensors, and overflow of casts."""

from __future__ import annotations

from pathlib import Path

from prepcli.engine.casts import CastCounts, max_finite, parse_stream_digest
from prepcli.errors import GET_AGAIN_HINT, DamagedError, PrepError
from prepcli.planning.accounting import not_equal_error
from prepcli.planning.plan import EqualityCheck, Plan, Stream, read_copies
from prepcli.sources.source import Source


class IntegrityChecker:
    """Checks of each stream's digest.

    A digest has to be equal to the one in the source's manifest, and to that of a tensor it is tied to. A cast may not
    overflow.
    """

    def __init__(self, plan: Plan, source: Source, *, allow_overflow: bool) -> None:
        self._plan, self._source, self._allow_overflow = plan, source, allow_overflow
        recorded = {(t.name, low, high): text for t in source.all_tensors for low, high, text in t.digests}
        self._expected = {i: recorded.get((s.name, *s.rows)) for i, s in enumerate(plan.streams) if s.reads}
        self._digests: dict[tuple[str, tuple[int, int]], str] = {}

    def on_digest(self, number: int, text: str) -> None:
        """Check the digest of a complete stream.

        Args:
            number: Number of the stream in the plan.
            text: Digest and cast counts of the stream, as the pipeline writes them.

        Raises:
            PrepError: The digest differs from the recorded one or from that of the tied tensor, or the cast overflowed.
        """
        stream, digest = self._plan.streams[number], parse_stream_digest(text).read
        self._check_overflow(stream, parse_stream_digest(text).counts)
        expected = self._expected.get(number)
        if expected and expected != digest:
            why = f"its bytes have the digest {digest}, its manifest records {expected}: the file has changed"
            what = f"{self._display_name(stream.name)} in {self._checkpoint_name(stream)} is damaged"
            raise DamagedError(what, why, GET_AGAIN_HINT)
        self._digests[stream.name, stream.rows] = digest
        for check in self._plan.checks:
            if stream.name in (check.name, check.duplicate_of):
                self._compare(check, stream)

    def _check_overflow(self, stream: Stream, counts: CastCounts | None) -> None:
        if not counts or not counts.overflowed or self._allow_overflow:
            return
        name, dtype = self._display_name(stream.name), stream.written_dtype
        largest = f"{max_finite(dtype):g}"
        if stream.update:
            what = f"{counts.overflowed:,} values of {name} become infinite or nan"
            why = f"the adapter has nan, infinite or too large values: the largest of {dtype} is {largest}"
            raise PrepError(what, why, "another step of the adapter; `--allow-overflow` writes them nevertheless")
        what = f"{counts.overflowed:,} values of {name} are too large for {dtype}"
        raise PrepError(what, f"its largest value is {largest}", "`--allow-overflow` makes them infinite")

    def _compare(self, check: EqualityCheck, stream: Stream) -> None:
        digests = [self._digests.get((name, stream.rows)) for name in (check.name, check.duplicate_of)]
        if None in digests or digests[0] == digests[1]:
            return
        from prepcli.engine.compare import compare_streams

        streams = [
            next(s for s in self._plan.streams if (s.name, s.rows) == (n, stream.rows))
            for n in (check.name, check.duplicate_of)
        ]
        row = compare_streams(
            self._source.byte_sources, streams[0], blobs_b=self._source.byte_sources, stream_b=streams[1]
        ).row
        raise not_equal_error(
            self._source.family,
            check,
            display_names=self._plan.display_names,
            difference=f"first difference in row {row}",
        )

    def _checkpoint_name(self, stream: Stream) -> str:
        """Return the name of a stream's checkpoint: the source, or the adapter of a merge."""
        file = self._source.byte_sources[next(read_copies(stream, stream.box)).file]
        if isinstance(file, Path) and not file.is_relative_to(self._source.root):
            return str(file.parent)
        return self._source.display_name

    def _display_name(self, name: str) -> str:
        return self._plan.display_names.get(name, name)
