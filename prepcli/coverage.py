"""Coverage as an equation, on bytes: reads tile every tensor, writes tile every chunk, exactly once. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator

from prepcli.moves import Copy
from prepcli.plan import Flat, Leaf, Plan, Stream, side_copies
from prepcli.slabs import Slab
from trainer.errors import PrepError

Span = tuple[int, int, int]  # file, first byte, one past the last


def check(plan: Plan, slabs: Callable[[], Iterable[Slab]]) -> None:
    """PrepError unless the slabs read each streamed byte once and write each byte of every tensor and chunk once.

    `slabs` makes them anew each time it is called: they are never all in memory.
    """
    _exact("read", _spans(c for slab in slabs() for c in slab.left), _read_spans(plan))
    _exact("written", _spans(c for slab in slabs() for c in slab.right), _written_spans(plan))


def _read_spans(plan: Plan) -> Iterator[Span]:
    """What the streams should read: Flat sides as they are declared, regions by the bytes of their whole box."""
    for stream in plan.streams:
        yield from _declared(stream, stream.left)


def _written_spans(plan: Plan) -> Iterator[Span]:
    """What should be written: every chunk of every leaf, or each tensor's own place."""
    for leaf in plan.leaves:
        yield from _chunks(leaf)
    if not plan.leaves:
        for stream in plan.streams:
            yield from _declared(stream, stream.right)


def _declared(stream: Stream, side: tuple) -> Iterator[Span]:
    low, high = stream.span
    if any(isinstance(part, Flat) for part in side):
        yield from ((part.file, part.offset + low, part.offset + high) for part in side)
    elif stream.nbytes:
        yield from _spans(side_copies(side, stream, stream.box))


def _chunks(leaf: Leaf) -> Iterator[Span]:
    size = leaf.chunk_nbytes
    found = 0
    for box in leaf.placed:
        counts = [stop - first for first, stop in zip(box.first, box.stop)]
        found += math.prod(counts)
        for index in box.indices():
            file, offset = box.places.find(index)
            yield file, offset, offset + size
    if found != math.prod(leaf.grid.counts):
        raise _error(f"{leaf.name} has {math.prod(leaf.grid.counts):,} chunks, the plan places {found:,}")


def _spans(copies: Iterable[Copy]) -> Iterator[Span]:
    for copy in copies:
        run = copy.run
        for offset in copy.offsets():
            yield copy.file, offset, offset + run


def _exact(verb: str, found: Iterable[Span], wanted: Iterable[Span]) -> None:
    have, want = _joined(verb, found), _joined(verb, wanted)
    for a, b in itertools.zip_longest(have, want):
        if a != b:
            raise _error(f"bytes {verb}: {_text(a)} where {_text(b)} should be")


def _joined(verb: str, spans: Iterable[Span]) -> list[Span]:
    """Sorted spans, neighbours joined; PrepError where two overlap."""
    out: list[Span] = []
    for file, low, high in sorted(span for span in spans if span[1] < span[2]):
        if out and out[-1][0] == file and out[-1][2] > low:
            raise _error(f"bytes {low:,} to {min(high, out[-1][2]):,} of file {file} would be {verb} twice")
        if out and out[-1][0] == file and out[-1][2] == low:
            out[-1] = (file, out[-1][1], high)
        else:
            out.append((file, low, high))
    return out


def _text(span: Span | None) -> str:
    return f"file {span[0]}, {span[1]:,} to {span[2]:,}" if span else "nothing"


def _error(why: str) -> PrepError:
    return PrepError("the plan does not add up", why, "this is a bug in prep: nothing was written")
