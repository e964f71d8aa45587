"""The engine: read | digest and permute | write, each a thread, each first in, first out, within a budget.

It moves bytes as a Plan's slabs say and knows neither models nor formats. Since slabs pass each stage in order, what is
durable is one position, and a tensor's digest streams over its bytes in the tensor's own order.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import xxhash

from prepcli.console.progress import Progress
from prepcli.engine.budget import Budget, Buffers, anonymous_nbytes
from prepcli.engine.casts import Cast, Moved
from prepcli.engine.checksums import Recorder
from prepcli.engine.files import PAGE, Bytes, Files, Reads
from prepcli.engine.fills import Fills, mean_source
from prepcli.engine.journal import Journal, Prefix
from prepcli.engine.marks import Marks, Point
from prepcli.engine.permute import gather, scatter, threads
from prepcli.planning.moves import Copy
from prepcli.planning.plan import Stream
from prepcli.planning.slabs import LONG_RUN, Slab, slabs

MOST_UNSYNCED_NBYTES = 256 << 20  # written and not yet durable, besides what is being synced
NO_BYTES = xxhash.xxh3_128_hexdigest(b"")  # the digest of a tensor without elements, of which no slab passes by


@dataclass(slots=True)
class Seconds:
    """Time that each stage spent working."""

    read: float = 0.0
    move: float = 0.0
    write: float = 0.0


@dataclass(slots=True)
class Outcome:
    """What a run did: of every stream by number its digest, or what `casts.Moved` makes of it; bytes, seconds, and the
    most memory seen."""

    digests: dict[int, str] = field(default_factory=dict)
    read_nbytes: int = 0
    written_nbytes: int = 0
    copied_nbytes: int = 0  # in memory, into another order or dtype
    resumed_nbytes: int = 0
    peak_nbytes: int = 0
    seconds: Seconds = field(default_factory=Seconds)


def run(
    streams: Sequence[Stream],
    source: Reads,
    sink: Files | None,
    spend: Budget,
    progress: Progress,
    journal: Journal | None = None,
    on_digest: Callable[[int, str], None] = lambda number, digest: None,
    checksums: Recorder | None = None,
) -> Outcome:
    """Move every stream; without a sink they are only digested. `on_digest`, which is told what `Outcome.digests` has
    of a stream, may raise to stop the run. `checksums` takes in what is written.

    Whatever ends it early, what the journal names is durable and a later run with the same journal goes on from there:
    streams that the journal has whole are not written again.
    """
    task = _Run(streams, source, sink, spend, progress, journal, on_digest, checksums)
    return task.go()


@dataclass(slots=True)
class _Step:
    """A slab on its way: its buffers, of which the first has its bytes, and the digests of streams that end with it."""

    slab: Slab
    new_nbytes: int  # of the slab, that are not durable from an earlier run; 0: it is not written
    is_gathered: bool  # copied into the order and alignment of the sink
    buffers: list[Bytes]
    data: Bytes
    digests: dict[int, str] = field(default_factory=dict)
    prefix: Prefix | None = None  # of a stream that goes on after this slab

    def other(self) -> Bytes:
        """The buffer that does not have the bytes, to bring them to in another order or dtype."""
        self.buffers.reverse()
        return self.buffers[0]


class _Run:
    def __init__(
        self,
        streams: Sequence[Stream],
        source: Reads,
        sink: Files | None,
        spend: Budget,
        progress: Progress,
        journal: Journal | None,
        on_digest: Callable[[int, str], None],
        checksums: Recorder | None,
    ) -> None:
        self.streams, self.source, self.sink = streams, source, sink
        self.spend, self.progress, self.journal, self.on_digest = spend, progress, journal, on_digest
        self.checksums = checksums
        self.buffers = Buffers(spend)
        self.helpers = ThreadPoolExecutor(threads())  # they start with the first slab that is permuted
        self.fills = Fills(streams)
        self.outcome = Outcome({number: NO_BYTES for number, stream in enumerate(streams) if not stream.nbytes})
        self.outcome.digests |= journal.digests if journal else {}
        self.whole = frozenset(journal.digests if journal else ())  # streams that are durable from an earlier run
        self.prefix = journal.prefix if journal else None  # of the stream that the writer is in
        self.kept = self.prefix
        self.done_nbytes = journal.done_nbytes if journal else 0
        self.marks = _marks(sink, journal, spend, checksums)
        self.dirty = 0  # bytes written since the last point was marked
        self.fresh: dict[int, str] = {}  # digests since then
        self.state = xxhash.xxh3_128()
        self.cast: Cast | None = None  # of the stream that passes by
        self.error: BaseException | None = None

    def go(self) -> Outcome:
        """Feed the stages from this thread, which also reads; an error of any stage ends all and is raised here."""
        todo = self._todo()
        self.outcome.resumed_nbytes = self.done_nbytes
        for number in sorted(self.whole.difference(todo)):
            self.on_digest(number, self.outcome.digests[number])
        mover, writer = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        try:
            for step in self._steps(todo):
                self._reading(step, mover, writer)
                if self.error:
                    break
        finally:
            self._wait_for(mover, self.helpers, writer)
            if self.marks:
                self.marks.end(self._point())
        if self.error:
            raise self.error
        return self.outcome

    def _wait_for(self, *stages: ThreadPoolExecutor) -> None:
        """Let the stages end, also when a signal interrupts the waiting: no file is closed under a writer's hands."""
        for stage in stages:
            try:
                stage.shutdown()
            except BaseException as error:
                self.error = self.error or error  # what waits in the queues is not begun any more
                stage.shutdown()

    def _todo(self) -> list[int]:
        """The streams to read: those that are not whole, from their first byte on for their digest, and those whose
        mean fills them."""
        left = [number for number in range(len(self.streams)) if number not in self.whole]
        means = {mean_source(self.streams, n) for n in left if (fill := self.streams[n].fill) and fill.kind == "mean"}
        return sorted({*left, *means})

    def _steps(self, todo: Sequence[int]) -> Iterator[_Step]:
        for number in todo:
            for slab in slabs(number, self.streams[number], self.spend.slab_nbytes):
                is_gathered = _gathered(slab, aligned=self.sink is None or self.sink.policy.needs_alignment)
                taken = self.buffers.take(buffers_needed(slab, is_gathered))
                yield _Step(slab, self._new_nbytes(slab), is_gathered, taken, np.empty(0, np.uint8))

    def _new_nbytes(self, slab: Slab) -> int:
        """Bytes of a slab that are not durable from an earlier run."""
        if slab.stream in self.whole:
            return 0
        kept = self.kept.nbytes if self.kept and self.kept.number == slab.stream else 0
        return max(0, min(slab.nbytes, self._end(slab) - kept))

    def _end(self, slab: Slab) -> int:
        """Bytes of the slab's stream up to its end."""
        return slab.start + slab.nbytes - self.streams[slab.stream].span[0]

    def _stage(self, step: _Step, work: Callable[[], None], then: Callable[[], object] | None) -> None:
        """One stage of one slab: after an error nothing is done any more, but buffers always go back."""
        passed_on = False
        try:
            if self.error is None:
                work()
                if then:
                    then()
                    passed_on = True
        except BaseException as error:
            self.error = self.error or error
        finally:
            if not passed_on:
                self.buffers.give(step.buffers)

    def _reading(self, step: _Step, mover: ThreadPoolExecutor, writer: ThreadPoolExecutor) -> None:
        self._stage(step, lambda: self._read(step), lambda: mover.submit(self._moving, step, writer))

    def _moving(self, step: _Step, writer: ThreadPoolExecutor) -> None:
        self._stage(step, lambda: self._move(step), lambda: writer.submit(self._writing, step))

    def _writing(self, step: _Step) -> None:
        self._stage(step, lambda: self._write(step), None)

    def _read(self, step: _Step) -> None:
        began, slab = time.perf_counter(), step.slab
        if len(slab.left) == 1 and not slab.left[0].repeats:
            step.data = self.source.read_run(_as_run(slab.left[0]), step.buffers[0])
        elif slab.left:
            step.data = self.source.read_runs(slab.left, step.buffers[0])
        self.outcome.read_nbytes += step.data.size
        self.outcome.seconds.read += time.perf_counter() - began

    def _move(self, step: _Step) -> None:
        """Bring the bytes into the tensor's order, digest and cast them, bring them into the order of the sink."""
        began, slab = time.perf_counter(), step.slab
        if not slab.left:
            step.data = self.fills.rows(slab, _lead(slab, step.buffers[0], slab.nbytes))
        elif scattered(slab.left):
            step.data = scatter(slab, step.data, _lead(slab, step.other(), slab.nbytes), self.helpers)
            self.outcome.copied_nbytes += slab.nbytes
        self.fills.observe(slab, step.data)
        self._digest(step)
        if step.is_gathered:
            step.data = gather(slab, step.data, _lead(slab, step.other(), slab.written_nbytes), self.helpers)
            self.outcome.copied_nbytes += slab.written_nbytes
        self.outcome.seconds.move += time.perf_counter() - began

    def _digest(self, step: _Step) -> None:
        number, slab, stream = step.slab.stream, step.slab, self.streams[step.slab.stream]
        self.state.update(step.data.data)
        if slab.start == stream.span[0]:
            self.cast = Cast(stream.dtype, stream.cast) if stream.cast else None
        if self.cast:
            step.data = self.cast.run(step.data, _lead(slab, step.other(), slab.written_nbytes))
            self.outcome.copied_nbytes += slab.written_nbytes
        if slab.start + slab.nbytes == stream.span[1]:
            step.digests = {number: str(self._moved())}
            self.outcome.digests |= step.digests
            self.on_digest(number, step.digests[number])
        elif self.marks and slab.right:
            digest = self.cast.digest() if self.cast else self.state.hexdigest()
            step.prefix = Prefix(number, self._end(slab), digest)

    def _moved(self) -> Moved:
        """The stream that ended, as `Outcome.digests` has it."""
        read = self.state.hexdigest()
        self.state.reset()
        return Moved(read, self.cast.digest(), self.cast.counts) if self.cast else Moved(read, read)

    def _write(self, step: _Step) -> None:
        began, slab = time.perf_counter(), step.slab
        with self.checksums.observing(slab.right, step.data) if self.checksums else contextlib.nullcontext():
            if step.new_nbytes:
                self._write_new(step)
        if self.marks and self.marks.is_due(self.dirty) and not self._is_ragged(step):
            self.marks.begin(self._point())
        self.outcome.peak_nbytes = max(self.outcome.peak_nbytes, anonymous_nbytes())
        self.outcome.seconds.write += time.perf_counter() - began

    def _is_ragged(self, step: _Step) -> bool:
        """Whether later slabs write to the same pages as this one, in short runs each: were they on the disk already,
        each page would have to be read again."""
        return not step.digests and any(copy.repeats and copy.run < LONG_RUN for copy in step.slab.right)

    def _write_new(self, step: _Step) -> None:
        slab = step.slab
        if self.sink and slab.right:
            self.sink.write(slab.right, step.data)
            self.outcome.written_nbytes += slab.written_nbytes
            self.dirty += slab.written_nbytes
        self.progress.advance(step.new_nbytes)
        self.done_nbytes += step.new_nbytes
        self.prefix = step.prefix
        self.fresh |= step.digests

    def _point(self) -> Point:
        """How far the writer is; what it writes from now on belongs to the next point."""
        point = Point(self.done_nbytes, self.fresh, self.prefix)
        self.fresh, self.dirty = {}, 0
        return point


def _marks(sink: Files | None, journal: Journal | None, spend: Budget, checksums: Recorder | None) -> Marks | None:
    if sink is None or journal is None:
        return None
    most_nbytes = min(MOST_UNSYNCED_NBYTES, spend.nbytes // 2)
    return Marks(sink, journal, most_nbytes, before_mark=checksums.save if checksums else lambda: None)


def scattered(side: tuple[Copy, ...]) -> bool:
    """Whether the runs of a side are not the tensor's own bytes in order."""
    return len(side) > 1 or any(copy.dims for copy in side)


def buffers_needed(slab: Slab, is_gathered: bool) -> int:
    """One to read into, and one more where bytes are brought into another order or dtype, in turns."""
    return 1 + (scattered(slab.left) or slab.is_cast or is_gathered)


def _gathered(slab: Slab, aligned: bool) -> bool:
    """Whether the sink needs the bytes in another order or, for `aligned` writes, with another page offset."""
    if not slab.right or scattered(slab.right):
        return bool(slab.right)
    if not aligned:
        return False
    one_run = slab.left and not scattered(slab.left) and not slab.is_cast
    return bool(one_run and (slab.left[0].offset - slab.right[0].offset) % PAGE)


def _lead(slab: Slab, into: Bytes, nbytes: int) -> Bytes:
    """Bytes of a buffer from as deep in a page as the first one to be written lies."""
    lead = slab.right[0].offset % PAGE if slab.right else 0
    return into[lead : lead + nbytes]


def _as_run(copy: Copy) -> Copy:
    return Copy(copy.at, copy.file, copy.offset, copy.run)
