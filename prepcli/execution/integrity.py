"""What the bytes that pass by have to be: as recorded, equal where tensors are tied, not too large for a cast."""

from __future__ import annotations

from prepcli.engine.casts import Counts, largest, moved
from prepcli.errors import PrepError
from prepcli.planning.accounting import not_same
from prepcli.planning.plan import Plan, Same, Stream
from prepcli.sources.source import Source


class Expectations:
    """What digests have to be: those that the source's manifest records, and equal ones for tied tensors; and that no
    value overflows."""

    def __init__(self, plan: Plan, source: Source, allow_overflow: bool) -> None:
        self._plan, self._source, self._allow_overflow = plan, source, allow_overflow
        recorded = {(t.name, low, high): text for t in source.everything for low, high, text in t.digests}
        self._wanted = {i: recorded.get((s.name, *s.rows)) for i, s in enumerate(plan.streams) if s.left}
        self._seen: dict[tuple[str, tuple[int, int]], str] = {}

    def seen(self, number: int, text: str) -> None:
        """Take in what the engine says of a whole stream. PrepError if it is not what it has to be."""
        stream, found = self._plan.streams[number], moved(text).read
        self._check_overflow(stream, moved(text).counts)
        wanted = self._wanted.get(number)
        if wanted and wanted != found:
            why = f"its bytes have the digest {found}, its manifest records {wanted}: they have changed since"
            raise PrepError(f"{self._called(stream.name)} in {self._source.name} is damaged", why, "make it anew")
        self._seen[stream.name, stream.rows] = found
        for check in self._plan.checks:
            if stream.name in (check.name, check.other):
                self._compare(check, stream)

    def _check_overflow(self, stream: Stream, counts: Counts | None) -> None:
        if counts and counts.overflowed and not self._allow_overflow:
            what = f"{counts.overflowed:,} values of {self._called(stream.name)} are too large for {stream.cast}"
            why = f"the largest that it has is {largest(stream.cast):g}"
            raise PrepError(what, why, "`--allow-overflow` makes them infinite")

    def _compare(self, check: Same, stream: Stream) -> None:
        pair = [self._seen.get((name, stream.rows)) for name in (check.name, check.other)]
        if None in pair or pair[0] == pair[1]:
            return
        from prepcli.engine.compare import first_difference

        sides = [
            next(s for s in self._plan.streams if (s.name, s.rows) == (n, stream.rows))
            for n in (check.name, check.other)
        ]
        row = first_difference(self._source.reads, sides[0], self._source.reads, sides[1]).row
        raise not_same(self._source.family, check, self._plan.names, f"first difference in row {row}")

    def _called(self, name: str) -> str:
        return self._plan.names.get(name, name)
