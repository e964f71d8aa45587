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
from prepcli.engine.background_sync import BackgroundSync, SyncPoint
from prepcli.engine.budget import Budget, BufferPool, anonymous_nbytes
from prepcli.engine.casts import StreamCast, StreamDigest
from prepcli.engine.checksum_recorder import ChecksumRecorder
from prepcli.engine.files import PAGE, ByteArray, Files, RunReader
from prepcli.engine.fills import FillGenerator, mean_source_number
from prepcli.engine.journal import Journal, StreamPrefix
from prepcli.engine.permute import gather, scatter, threads
from prepcli.planning.plan import Stream
from prepcli.planning.slabs import LONG_RUN_NBYTES, Slab, split_stream
from prepcli.planning.strided_copies import StridedCopy

MOST_UNSYNCED_NBYTES = 256 << 20  # written and not yet durable, besides what is being synced
EMPTY_DIGEST = xxhash.xxh3_128_hexdigest(b"")  # the digest of a tensor without elements, of which no slab passes by


@dataclass(slots=True)
class StageSeconds:
    """Time that each stage spent working."""

    read: float = 0.0
    move: float = 0.0
    write: float = 0.0


@dataclass(slots=True)
class PipelineResult:
    """What a run did: of every stream by number its digest, or what `casts.Moved` makes of it; bytes, seconds, and the
    most memory seen."""

    digests: dict[int, str] = field(default_factory=dict)
    read_nbytes: int = 0
    written_nbytes: int = 0
    copied_nbytes: int = 0  # in memory, into another order or dtype
    resumed_nbytes: int = 0
    peak_nbytes: int = 0
    seconds: StageSeconds = field(default_factory=StageSeconds)


def run(
    streams: Sequence[Stream],
    source: RunReader,
    sink: Files | None,
    budget: Budget,
    progress: Progress,
    journal: Journal | None = None,
    on_digest: Callable[[int, str], None] = lambda number, digest: None,
    checksums: ChecksumRecorder | None = None,
) -> PipelineResult:
    """Move every stream; without a sink they are only digested. `on_digest`, which is told what `Outcome.digests` has
    of a stream, may raise to stop the run. `checksums` takes in what is written.

    Whatever ends it early, what the journal names is durable and a later run with the same journal goes on from there:
    streams that the journal has whole are not written again.
    """
    task = _PipelineRun(streams, source, sink, budget, progress, journal, on_digest, checksums)
    return task.run()


@dataclass(slots=True)
class _SlabTask:
    """A slab on its way: its buffers, of which the first has its bytes, and the digests of streams that end with it."""

    slab: Slab
    new_nbytes: int  # of the slab, that are not durable from an earlier run; 0: it is not written
    needs_gather: bool  # copied into the order and alignment of the sink
    buffers: list[ByteArray]
    data: ByteArray
    digests: dict[int, str] = field(default_factory=dict)
    prefix: StreamPrefix | None = None  # of a stream that goes on after this slab

    def swap_buffers(self) -> ByteArray:
        """The buffer that does not have the bytes, to bring them to in another order or dtype."""
        self.buffers.reverse()
        return self.buffers[0]


class _PipelineRun:
    def __init__(
        self,
        streams: Sequence[Stream],
        source: RunReader,
        sink: Files | None,
        budget: Budget,
        progress: Progress,
        journal: Journal | None,
        on_digest: Callable[[int, str], None],
        checksums: ChecksumRecorder | None,
    ) -> None:
        self.streams, self.source, self.sink = streams, source, sink
        self.spend, self.progress, self.journal, self.on_digest = budget, progress, journal, on_digest
        self.checksums = checksums
        self.buffers = BufferPool(budget)
        self.helpers = ThreadPoolExecutor(threads())  # they start with the first slab that is permuted
        self.fills = FillGenerator(streams)
        self.outcome = PipelineResult(
            {number: EMPTY_DIGEST for number, stream in enumerate(streams) if not stream.nbytes}
        )
        self.outcome.digests |= journal.digests if journal else {}
        self.whole = frozenset(journal.digests if journal else ())  # streams that are durable from an earlier run
        self.prefix = journal.prefix if journal else None  # of the stream that the writer is in
        self.kept = self.prefix
        self.done_nbytes = journal.done_nbytes if journal else 0
        self.marks = _make_background_sync(sink, journal, budget, checksums)
        self.dirty = 0  # bytes written since the last point was marked
        self.fresh: dict[int, str] = {}  # digests since then
        self.state = xxhash.xxh3_128()
        self.cast: StreamCast | None = None  # of the stream that passes by
        self.error: BaseException | None = None

    def run(self) -> PipelineResult:
        """Feed the stages from this thread, which also reads; an error of any stage ends all and is raised here."""
        todo = self._streams_to_read()
        self.outcome.resumed_nbytes = self.done_nbytes
        for number in sorted(self.whole.difference(todo)):
            self.on_digest(number, self.outcome.digests[number])
        mover, writer = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        try:
            for step in self._make_tasks(todo):
                self._run_read(step, mover, writer)
                if self.error:
                    break
        finally:
            self._wait_for(mover, self.helpers, writer)
            if self.marks:
                self.marks.finish(self._take_sync_point())
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

    def _streams_to_read(self) -> list[int]:
        """The streams to read: those that are not whole, from their first byte on for their digest, and those whose
        mean fills them."""
        left = [number for number in range(len(self.streams)) if number not in self.whole]
        means = {
            mean_source_number(self.streams, n) for n in left if (fill := self.streams[n].fill) and fill.kind == "mean"
        }
        return sorted({*left, *means})

    def _make_tasks(self, stream_numbers: Sequence[int]) -> Iterator[_SlabTask]:
        for number in stream_numbers:
            for slab in split_stream(number, self.streams[number], self.spend.slab_nbytes):
                is_gathered = _needs_gather(slab, is_aligned=self.sink is None or self.sink.policy.needs_alignment)
                taken = self.buffers.acquire(buffers_needed(slab, is_gathered))
                yield _SlabTask(slab, self._new_nbytes(slab), is_gathered, taken, np.empty(0, np.uint8))

    def _new_nbytes(self, slab: Slab) -> int:
        """Bytes of a slab that are not durable from an earlier run."""
        if slab.stream_number in self.whole:
            return 0
        kept = self.kept.nbytes if self.kept and self.kept.stream_number == slab.stream_number else 0
        return max(0, min(slab.nbytes, self._stream_nbytes_through(slab) - kept))

    def _stream_nbytes_through(self, slab: Slab) -> int:
        """Bytes of the slab's stream up to its end."""
        return slab.start + slab.nbytes - self.streams[slab.stream_number].byte_range[0]

    def _run_stage(self, task: _SlabTask, work: Callable[[], None], next_stage: Callable[[], object] | None) -> None:
        """One stage of one slab: after an error nothing is done any more, but buffers always go back."""
        passed_on = False
        try:
            if self.error is None:
                work()
                if next_stage:
                    next_stage()
                    passed_on = True
        except BaseException as error:
            self.error = self.error or error
        finally:
            if not passed_on:
                self.buffers.release(task.buffers)

    def _run_read(self, task: _SlabTask, mover: ThreadPoolExecutor, writer: ThreadPoolExecutor) -> None:
        self._run_stage(task, lambda: self._read(task), lambda: mover.submit(self._run_move, task, writer))

    def _run_move(self, task: _SlabTask, writer: ThreadPoolExecutor) -> None:
        self._run_stage(task, lambda: self._move(task), lambda: writer.submit(self._run_write, task))

    def _run_write(self, task: _SlabTask) -> None:
        self._run_stage(task, lambda: self._write(task), None)

    def _read(self, task: _SlabTask) -> None:
        began, slab = time.perf_counter(), task.slab
        if len(slab.reads) == 1 and not slab.reads[0].repeats:
            task.data = self.source.read_run(_as_single_run(slab.reads[0]), task.buffers[0])
        elif slab.reads:
            task.data = self.source.read_runs(slab.reads, task.buffers[0])
        self.outcome.read_nbytes += task.data.size
        self.outcome.seconds.read += time.perf_counter() - began

    def _move(self, task: _SlabTask) -> None:
        """Bring the bytes into the tensor's order, digest and cast them, bring them into the order of the sink."""
        began, slab = time.perf_counter(), task.slab
        if not slab.reads:
            task.data = self.fills.make_rows(slab, _page_offset_view(slab, task.buffers[0], slab.nbytes))
        elif needs_permute(slab.reads):
            task.data = scatter(
                slab, task.data, _page_offset_view(slab, task.swap_buffers(), slab.nbytes), self.helpers
            )
            self.outcome.copied_nbytes += slab.nbytes
        self.fills.add_slab(slab, task.data)
        self._digest(task)
        if task.needs_gather:
            task.data = gather(
                slab, task.data, _page_offset_view(slab, task.swap_buffers(), slab.written_nbytes), self.helpers
            )
            self.outcome.copied_nbytes += slab.written_nbytes
        self.outcome.seconds.move += time.perf_counter() - began

    def _digest(self, task: _SlabTask) -> None:
        number, slab, stream = task.slab.stream_number, task.slab, self.streams[task.slab.stream_number]
        self.state.update(task.data.data)
        if slab.start == stream.byte_range[0]:
            self.cast = StreamCast(stream.dtype, stream.cast_to) if stream.cast_to else None
        if self.cast:
            task.data = self.cast.cast(task.data, _page_offset_view(slab, task.swap_buffers(), slab.written_nbytes))
            self.outcome.copied_nbytes += slab.written_nbytes
        if slab.start + slab.nbytes == stream.byte_range[1]:
            task.digests = {number: str(self._finish_stream_digest())}
            self.outcome.digests |= task.digests
            self.on_digest(number, task.digests[number])
        elif self.marks and slab.writes:
            digest = self.cast.digest() if self.cast else self.state.hexdigest()
            task.prefix = StreamPrefix(number, self._stream_nbytes_through(slab), digest)

    def _finish_stream_digest(self) -> StreamDigest:
        """The stream that ended, as `Outcome.digests` has it."""
        read = self.state.hexdigest()
        self.state.reset()
        return StreamDigest(read, self.cast.digest(), self.cast.counts) if self.cast else StreamDigest(read, read)

    def _write(self, task: _SlabTask) -> None:
        began, slab = time.perf_counter(), task.slab
        with self.checksums.recording(slab.writes, task.data) if self.checksums else contextlib.nullcontext():
            if task.new_nbytes:
                self._write_new(task)
        if self.marks and self.marks.is_due(self.dirty) and not self._shares_pages_with_next(task):
            self.marks.submit(self._take_sync_point())
        self.outcome.peak_nbytes = max(self.outcome.peak_nbytes, anonymous_nbytes())
        self.outcome.seconds.write += time.perf_counter() - began

    def _shares_pages_with_next(self, task: _SlabTask) -> bool:
        """Whether later slabs write to the same pages as this one, in short runs each: were they on the disk already,
        each page would have to be read again."""
        return not task.digests and any(copy.repeats and copy.run_nbytes < LONG_RUN_NBYTES for copy in task.slab.writes)

    def _write_new(self, task: _SlabTask) -> None:
        slab = task.slab
        if self.sink and slab.writes:
            self.sink.write(slab.writes, task.data)
            self.outcome.written_nbytes += slab.written_nbytes
            self.dirty += slab.written_nbytes
        self.progress.advance(task.new_nbytes)
        self.done_nbytes += task.new_nbytes
        self.prefix = task.prefix
        self.fresh |= task.digests

    def _take_sync_point(self) -> SyncPoint:
        """How far the writer is; what it writes from now on belongs to the next point."""
        point = SyncPoint(self.done_nbytes, self.fresh, self.prefix)
        self.fresh, self.dirty = {}, 0
        return point


def _make_background_sync(
    sink: Files | None, journal: Journal | None, budget: Budget, checksums: ChecksumRecorder | None
) -> BackgroundSync | None:
    if sink is None or journal is None:
        return None
    most_nbytes = min(MOST_UNSYNCED_NBYTES, budget.nbytes // 2)
    return BackgroundSync(sink, journal, most_nbytes, before_record=checksums.save if checksums else lambda: None)


def needs_permute(copies: tuple[StridedCopy, ...]) -> bool:
    """Whether the runs of a side are not the tensor's own bytes in order."""
    return len(copies) > 1 or any(copy.dims for copy in copies)


def buffers_needed(slab: Slab, is_gathered: bool) -> int:
    """One to read into, and one more where bytes are brought into another order or dtype, in turns."""
    return 1 + (needs_permute(slab.reads) or slab.is_cast or is_gathered)


def _needs_gather(slab: Slab, is_aligned: bool) -> bool:
    """Whether the sink needs the bytes in another order or, for `aligned` writes, with another page offset."""
    if not slab.writes or needs_permute(slab.writes):
        return bool(slab.writes)
    if not is_aligned:
        return False
    one_run = slab.reads and not needs_permute(slab.reads) and not slab.is_cast
    return bool(one_run and (slab.reads[0].file_offset - slab.writes[0].file_offset) % PAGE)


def _page_offset_view(slab: Slab, into: ByteArray, nbytes: int) -> ByteArray:
    """Bytes of a buffer from as deep in a page as the first one to be written lies."""
    lead = slab.writes[0].file_offset % PAGE if slab.writes else 0
    return into[lead : lead + nbytes]


def _as_single_run(copy: StridedCopy) -> StridedCopy:
    return StridedCopy(copy.tensor_offset, copy.file, copy.file_offset, copy.run_nbytes)
