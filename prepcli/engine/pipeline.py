"""The engine: a pipeline of three stages, read, move (permute, digest, cast) and write, within a memory budget.

Each stage is a thread that processes slabs in order. The durable state of a run is therefore a single position, and a
tensor's digest is computed over its bytes in C order as they pass. The engine does not depend on models or formats.
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
from prepcli.engine.casts import StreamDigest, ValueChange
from prepcli.engine.checksum_recorder import ChecksumRecorder
from prepcli.engine.files import ByteArray, Files, RunReader
from prepcli.engine.fills import FillGenerator, mean_source_number
from prepcli.engine.journal import Journal, StreamPrefix
from prepcli.engine.low_rank import value_change
from prepcli.engine.permute import gather, scatter, threads
from prepcli.engine.slab_buffers import buffers_needed, needs_gather, needs_permute, page_offset_view
from prepcli.engine.worker_thread import WorkerThread, wait_for_threads
from prepcli.planning.plan import Stream
from prepcli.planning.slabs import LONG_RUN_NBYTES, Slab, split_stream
from prepcli.planning.strided_copies import StridedCopy

MOST_UNSYNCED_NBYTES = 256 << 20  # maximum bytes written since the last sync point
EMPTY_DIGEST = xxhash.xxh3_128_hexdigest(b"")  # the digest of an empty tensor, which has no slabs


@dataclass(slots=True)
class StageSeconds:
    """Busy time of each stage in seconds."""

    read: float = 0.0
    move: float = 0.0
    write: float = 0.0


@dataclass(slots=True)
class PipelineResult:
    """The result of a run.

    Attributes:
        digests: Text of each stream's `StreamDigest`, by stream number.
        read_nbytes: Bytes read.
        written_nbytes: Bytes written.
        copied_nbytes: Bytes copied in memory, to another order or dtype.
        resumed_nbytes: Bytes that were durable from an earlier run.
        peak_nbytes: Largest resident memory seen.
        seconds: Busy time of each stage.
    """

    digests: dict[int, str] = field(default_factory=dict)
    read_nbytes: int = 0
    written_nbytes: int = 0
    copied_nbytes: int = 0
    resumed_nbytes: int = 0
    peak_nbytes: int = 0
    seconds: StageSeconds = field(default_factory=StageSeconds)


def run(
    streams: Sequence[Stream],
    source: RunReader,
    *,
    sink: Files | None,
    budget: Budget,
    progress: Progress,
    journal: Journal | None = None,
    on_digest: Callable[[int, str], None] = lambda number, digest: None,
    checksums: ChecksumRecorder | None = None,
) -> PipelineResult:
    """Move every stream from its source to the sink.

    After an interruption at any point, all bytes recorded in the journal are durable. A later run with the same
    journal resumes there and does not write complete streams again.

    Args:
        streams: The streams, in order.
        source: Reader of the source files.
        sink: Files to write; None to digest the streams only.
        budget: Memory budget.
        progress: Receives the number of moved bytes.
        journal: Records durable bytes; None to not resume.
        on_digest: Called with the number and the digest of each completed stream. It may raise to stop the run.
        checksums: Records the checksums of written blocks.

    Returns:
        The result.

    Raises:
        PrepError: Reading or writing failed.
    """
    return _PipelineRun(streams, source, sink, budget, progress, journal, on_digest, checksums).run()


@dataclass(slots=True)
class _SlabTask:
    """A slab in the pipeline.

    Attributes:
        slab: The slab.
        new_nbytes: Bytes not durable from an earlier run. If it is 0, the slab is not written.
        needs_gather: Whether the bytes must be copied to the order and page offset of the sink.
        buffers: Buffers of the slab. The first one contains its bytes.
        data: The bytes.
        digests: Digest of the stream that ends with this slab.
        prefix: The stream's state after this slab, if it does not end here.
    """

    slab: Slab
    new_nbytes: int
    needs_gather: bool
    buffers: list[ByteArray]
    data: ByteArray
    digests: dict[int, str] = field(default_factory=dict)
    prefix: StreamPrefix | None = None

    def swap_buffers(self) -> ByteArray:
        """Make the other buffer the first one, and return it as the target of a copy."""
        self.buffers.reverse()
        return self.buffers[0]


class _PipelineRun:
    """A run of the pipeline and its state."""

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
        self.budget, self.progress, self.on_digest = budget, progress, on_digest
        self.checksums = checksums
        self.buffers = BufferPool(budget)
        self.permute_pool = ThreadPoolExecutor(threads())  # its threads start with the first permuted slab
        self.fills = FillGenerator(streams)
        self.result = PipelineResult(
            {number: EMPTY_DIGEST for number, stream in enumerate(streams) if not stream.nbytes}
        )
        self.result.digests |= journal.digests if journal else {}
        self.durable_numbers = frozenset(journal.digests if journal else ())  # streams from an earlier run
        self.prefix = journal.prefix if journal else None  # of the stream that is being written
        self.resumed_prefix = self.prefix
        self.done_nbytes = journal.done_nbytes if journal else 0
        self.background_sync = _make_background_sync(sink, journal, budget, checksums)
        self.unsynced_nbytes = 0  # bytes written since the last sync point
        self.unsynced_digests: dict[int, str] = {}  # digests completed since the last sync point
        self.hash_state = xxhash.xxh3_128()
        self.change: ValueChange | None = None  # of the stream that is being moved
        self.error: BaseException | None = None

    def run(self) -> PipelineResult:
        """Run the pipeline, and raise the first error of any stage. The calling thread is the read stage."""
        stream_numbers = self._streams_to_read()
        self.result.resumed_nbytes = self.done_nbytes
        for number in sorted(self.durable_numbers.difference(stream_numbers)):
            self.on_digest(number, self.result.digests[number])
        mover, writer = WorkerThread(), WorkerThread()
        try:
            for task in self._make_tasks(stream_numbers):
                self._run_read(task, mover, writer)
                if self.error:
                    break
            self._finish(mover, writer)
        except BaseException as error:
            self._set_error(error)
            self._finish(mover, writer)  # the caller closes the files
        mover.stop()
        writer.stop()
        if self.error:
            raise self.error
        return self.result

    def _set_error(self, error: BaseException) -> None:
        """Remember the first error of the run. Slabs in later stages are skipped."""
        self.error = self.error or error

    def _finish(self, mover: WorkerThread, writer: WorkerThread) -> None:
        """Wait for the stages to end, even if a signal interrupts the wait, and sync all written bytes."""
        mover.submit(self.permute_pool.shutdown)
        wait_for_threads([mover], self._set_error)
        writer.submit(self._sync_last_point)
        wait_for_threads([writer], self._set_error)

    def _sync_last_point(self) -> None:
        """Make all written bytes durable, also after an error."""
        background_sync, self.background_sync = self.background_sync, None
        try:
            if background_sync:
                background_sync.finish(self._take_sync_point())
        except BaseException as error:
            self._set_error(error)

    def _streams_to_read(self) -> list[int]:
        """Return the numbers of the streams to read: incomplete streams, and streams whose mean fills them.

        A partly durable stream is read from its first byte on, for its digest.
        """
        pending = [number for number in range(len(self.streams)) if number not in self.durable_numbers]
        mean_sources = {
            mean_source_number(self.streams, number)
            for number in pending
            if (fill := self.streams[number].fill) and fill.kind == "mean"
        }
        return sorted({*pending, *mean_sources})

    def _make_tasks(self, stream_numbers: Sequence[int]) -> Iterator[_SlabTask]:
        """Yield the slabs of streams, each with buffers from the pool."""
        for number in stream_numbers:
            for slab in split_stream(number, self.streams[number], max_nbytes=self.budget.slab_nbytes):
                is_aligned = self.sink is None or self.sink.policy.needs_alignment
                is_gathered = needs_gather(slab, is_aligned)
                buffers = self.buffers.acquire(buffers_needed(slab, is_gathered))
                yield _SlabTask(slab, self._new_nbytes(slab), is_gathered, buffers, np.empty(0, np.uint8))

    def _new_nbytes(self, slab: Slab) -> int:
        """Return the number of a slab's bytes not durable from an earlier run."""
        if slab.stream_number in self.durable_numbers:
            return 0
        durable_nbytes = (
            self.resumed_prefix.nbytes
            if self.resumed_prefix and self.resumed_prefix.stream_number == slab.stream_number
            else 0
        )
        return max(0, min(slab.nbytes, self._stream_nbytes_through(slab) - durable_nbytes))

    def _stream_nbytes_through(self, slab: Slab) -> int:
        """Return the number of the stream's bytes up to the end of a slab."""
        return slab.start + slab.nbytes - self.streams[slab.stream_number].byte_range[0]

    def _run_stage(self, task: _SlabTask, work: Callable[[], None], next_stage: Callable[[], object] | None) -> None:
        """Run one stage of a slab, and submit the next one.

        After an error in any stage the work is skipped. Buffers are always released.
        """
        passed_on = False
        try:
            if self.error is None:
                work()
                if next_stage:
                    next_stage()
                    passed_on = True
        except BaseException as error:
            self._set_error(error)
        finally:
            if not passed_on:
                self.buffers.release(task.buffers)

    def _run_read(self, task: _SlabTask, mover: WorkerThread, writer: WorkerThread) -> None:
        """Run the read stage of a slab."""
        self._run_stage(task, lambda: self._read(task), lambda: mover.submit(lambda: self._run_move(task, writer)))

    def _run_move(self, task: _SlabTask, writer: WorkerThread) -> None:
        """Run the move stage of a slab."""
        self._run_stage(task, lambda: self._move(task), lambda: writer.submit(lambda: self._run_write(task)))

    def _run_write(self, task: _SlabTask) -> None:
        """Run the write stage of a slab."""
        self._run_stage(task, lambda: self._write(task), None)

    def _read(self, task: _SlabTask) -> None:
        """Read a slab's runs into its first buffer."""
        start_s, slab = time.perf_counter(), task.slab
        if len(slab.reads) == 1 and not slab.reads[0].repeats:
            task.data = self.source.read_run(_as_single_run(slab.reads[0]), task.buffers[0])
        elif slab.reads:
            task.data = self.source.read_runs(slab.reads, task.buffers[0])
        self.result.read_nbytes += task.data.size
        self.result.seconds.read += time.perf_counter() - start_s

    def _move(self, task: _SlabTask) -> None:
        """Bring a slab into the tensor's order, digest and cast it, and bring it into the sink's order."""
        start_s, slab = time.perf_counter(), task.slab
        if not slab.reads:
            task.data = self.fills.make_rows(slab, page_offset_view(slab, task.buffers[0], nbytes=slab.nbytes))
        elif needs_permute(slab.reads):
            task.data = scatter(
                slab,
                task.data,
                out=page_offset_view(slab, task.swap_buffers(), nbytes=slab.nbytes),
                pool=self.permute_pool,
            )
            self.result.copied_nbytes += slab.nbytes
        self.fills.add_slab(slab, task.data)
        self._digest(task)
        if task.needs_gather:
            task.data = gather(
                slab,
                task.data,
                out=page_offset_view(slab, task.swap_buffers(), nbytes=slab.written_nbytes),
                pool=self.permute_pool,
            )
            self.result.copied_nbytes += slab.written_nbytes
        self.result.seconds.move += time.perf_counter() - start_s

    def _digest(self, task: _SlabTask) -> None:
        """Update the stream's digest with a slab, cast the slab, and finish the digest after the last one."""
        number, slab, stream = task.slab.stream_number, task.slab, self.streams[task.slab.stream_number]
        self.hash_state.update(task.data.data)
        if slab.start == stream.byte_range[0]:
            self.change = value_change(stream, self.source)
        if self.change:
            task.data = self.change.apply(
                task.data, page_offset_view(slab, task.swap_buffers(), nbytes=slab.written_nbytes)
            )
            self.result.copied_nbytes += slab.written_nbytes
        if slab.start + slab.nbytes == stream.byte_range[1]:
            task.digests = {number: str(self._finish_stream_digest())}
            self.result.digests |= task.digests
            self.on_digest(number, task.digests[number])
        elif self.background_sync and slab.writes:
            digest = self.change.digest() if self.change else self.hash_state.hexdigest()
            task.prefix = StreamPrefix(number, self._stream_nbytes_through(slab), digest)

    def _finish_stream_digest(self) -> StreamDigest:
        """Return the digests of the stream that ended, and reset the hash state."""
        read = self.hash_state.hexdigest()
        self.hash_state.reset()
        return StreamDigest(read, self.change.digest(), self.change.counts) if self.change else StreamDigest(read, read)

    def _write(self, task: _SlabTask) -> None:
        """Record a slab's checksums, write it, and submit a sync point if one is due."""
        start_s, slab = time.perf_counter(), task.slab
        with self.checksums.recording(slab.writes, task.data) if self.checksums else contextlib.nullcontext():
            if task.new_nbytes:
                self._write_new(task)
        if (
            self.background_sync
            and self.background_sync.is_due(self.unsynced_nbytes)
            and not self._shares_pages_with_next(task)
        ):
            self.background_sync.submit(self._take_sync_point())
        self.result.peak_nbytes = max(self.result.peak_nbytes, anonymous_nbytes())
        self.result.seconds.write += time.perf_counter() - start_s

    def _shares_pages_with_next(self, task: _SlabTask) -> bool:
        """Whether later slabs write short runs to the pages of this slab.

        A sync between them would write each page to disk several times and read it back.
        """
        return not task.digests and any(copy.repeats and copy.run_nbytes < LONG_RUN_NBYTES for copy in task.slab.writes)

    def _write_new(self, task: _SlabTask) -> None:
        """Write a slab, and advance the writer's position."""
        slab = task.slab
        if self.sink and slab.writes:
            self.sink.write(slab.writes, task.data)
            self.result.written_nbytes += slab.written_nbytes
            self.unsynced_nbytes += slab.written_nbytes
        self.progress.advance(task.new_nbytes)
        self.done_nbytes += task.new_nbytes
        self.prefix = task.prefix
        self.unsynced_digests |= task.digests

    def _take_sync_point(self) -> SyncPoint:
        """Return the writer's position, and start collecting the next sync point."""
        point = SyncPoint(self.done_nbytes, self.unsynced_digests, self.prefix)
        self.unsynced_digests, self.unsynced_nbytes = {}, 0
        return point


def _make_background_sync(
    sink: Files | None, journal: Journal | None, budget: Budget, checksums: ChecksumRecorder | None
) -> BackgroundSync | None:
    """Create the background sync of a run; None without a sink or a journal."""
    if sink is None or journal is None:
        return None
    max_unsynced_nbytes = min(MOST_UNSYNCED_NBYTES, budget.nbytes // 2)
    return BackgroundSync(
        sink,
        journal,
        max_unsynced_nbytes=max_unsynced_nbytes,
        before_record=checksums.save if checksums else lambda: None,
    )


def _as_single_run(copy: StridedCopy) -> StridedCopy:
    """Return a copy of one run without dims."""
    return StridedCopy(copy.tensor_offset, copy.file, copy.file_offset, copy.run_nbytes)
