"""The engine: a pipeline of three stages, read, move (permute, digest, cast) and write, within a memory budget.

Each stage processes slabs in order, in a thread of its own or in the calling thread. The durable state of a unit is
therefore a single position, and a tensor's digest is computed over its bytes in C order as they pass. The engine does
not depend on models or formats.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import numpy as np

from prepcli.algebra.strided_copies import StridedCopy
from prepcli.core.errors import RERUN_HINT, Option, PrepError, text
from prepcli.core.observer import Progress
from prepcli.core.worker_thread import CallingThread, WorkerThread, wait_for_threads
from prepcli.engine.background_sync import BackgroundSync, StreamPrefix, SyncPoint, UnitPart
from prepcli.engine.budget import Budget, BufferPool, anonymous_nbytes
from prepcli.engine.casts import ValueTransform
from prepcli.engine.checksum_recorder import ChecksumRecorder
from prepcli.engine.conversion_result import ConversionResult
from prepcli.engine.digest import StreamDigest, TensorDigest
from prepcli.engine.files import PAGE, Files, RunReader, RunWriter
from prepcli.engine.fills import FillGenerator, mean_source_number
from prepcli.engine.permute import gather, needs_permute, scatter, threads
from prepcli.engine.shared_runs import RunSharing, SharedRun
from prepcli.planning.plan import Stream
from prepcli.planning.slabs import LONG_RUN_NBYTES, Slab, split_stream
from prepcli.stores.buffers import ByteArray

# Bytes written since the last sync point, at most.
MOST_UNSYNCED_NBYTES = 256 << 20
# Slabs of a pipeline without threads stay in the caches of a core from the read to the write.
CACHED_SLAB_NBYTES = 4 << 20
# A look at the memory of the process takes as long as hashing 2 MiB.
MEMORY_INTERVAL_S = 0.02
# A claim of a unit holds a file descriptor until the unit is synced, e.g. seconds on a slow disk.
MAX_UNSYNCED_UNITS = 64


@dataclass(frozen=True, slots=True)
class PipelineUnit:
    """Streams moved together.

    Attributes:
        number: Number of the unit.
        streams: Numbers of its streams, in processing order.
        digests: Digests of the streams that an earlier start has made durable. They are not written again.
        prefix: The partly durable stream.
    """

    number: int
    streams: Sequence[int]
    digests: Mapping[int, StreamDigest] = field(default_factory=dict[int, StreamDigest])
    prefix: StreamPrefix | None = None


class UnitObserver(Protocol):
    """Follows the units of a pipeline. Each method may raise to stop it."""

    def begin_unit(self, unit: PipelineUnit) -> None:
        """Prepare the sink for a unit, in the thread that writes, before its first byte."""
        ...

    def complete_unit(self, number: int) -> None:
        """Handle a unit of which all bytes are passed to the sink, in the thread that writes."""
        ...

    def record_durable(self, point: SyncPoint) -> None:
        """Record a sync point, in the thread that syncs. Called only for a sink of files."""
        ...


@dataclass(slots=True)
class _SlabTask:
    """A slab in the pipeline.

    Attributes:
        slab: The slab.
        new_nbytes: Bytes not durable from an earlier start. If it is 0, the slab is not written.
        prefix_nbytes: Bytes in the durable prefix of the stream.
        earlier_digest: Digest of the durable prefix as it was written, if it ends in the slab.
        differs_from_prefix: Whether the durable prefix has another digest now. Set by the move stage.
        needs_gather: Whether the bytes must be copied to the order and page offset of the sink.
        buffers: Buffers of the slab. The first one contains its bytes.
        data: The bytes.
        shared: The part of the bytes that the sink shares with the source, and does not write.
        digests: Digests of the stream, if this is its last slab.
        prefix: The stream's state after this slab, if it does not end here.
    """

    slab: Slab
    new_nbytes: int
    needs_gather: bool
    buffers: list[ByteArray]
    data: ByteArray
    shared: SharedRun | None = None
    prefix_nbytes: int = 0
    earlier_digest: str = ""
    differs_from_prefix: bool = False
    digests: dict[int, StreamDigest] = field(default_factory=dict)
    prefix: StreamPrefix | None = None

    def swap_buffers(self, nbytes: int) -> ByteArray:
        """Swap the two buffers, and return the first `nbytes` of the new first one as the target of a copy."""
        self.buffers.reverse()
        return self.first_buffer(nbytes)

    def first_buffer(self, nbytes: int) -> ByteArray:
        """Return a view of the first buffer with the page offset of the first byte to write.

        Direct I/O needs equal page offsets in memory and in the file. A buffer is two pages longer than a slab.
        """
        page_offset = 0
        if self.slab.writes:
            page_offset = self.slab.writes[0].file_offset % PAGE
        return self.buffers[0][page_offset : page_offset + nbytes]


class Pipeline:
    """Moves every stream from its source to the sink.

    Units are moved one after another without a pause between them. They may be an iterator: a unit is taken from it
    once the bytes of the units before are read.
    """

    # A slab passes through three threads. Only `buffers` crosses between them without a queue.
    #
    #   calling thread  acquire 1 or 2 buffers -> read runs      -> mover.submit
    #   mover           permute -> digest -> cast -> gather      -> writer.submit
    #   writer          checksum -> write -> maybe a sync point  -> release the buffers
    #
    # A slab needs a second buffer if its bytes change places or dtype on the way: each such copy
    # goes from the first buffer to the second, which then counts as the first. The read stage
    # blocks in `acquire` while all buffers are on the way, so memory is bounded by the pool.
    #
    # Without threads of its own, the calling thread runs the three stages of a slab one after another. Several such
    # pipelines use all cores if no stage waits for a disk, and a slab never changes its core.
    #
    # Durability: the writer hands (complete units, digests, prefix) to the sync thread about once a
    # second. That thread syncs the files, and only then reports the point to the observer. A kill before
    # the report loses the bytes since the last one, which a later run writes again.
    #
    # The durable prefix of a stream is not written again, but read, and compared with its digest. The source may have
    # been read wrongly when the prefix was written, without an error before its kill or before the end of the stream.
    # If the digests differ, the stream passes once more, and all of it is written.
    #
    # The begin and the end of a unit pass through the queues between its slabs, so that they are in order.

    def __init__(
        self,
        streams: Sequence[Stream],
        source: RunReader,
        *,
        sink: RunWriter | None,
        budget: Budget,
        progress: Progress,
        units: Iterable[PipelineUnit] | None = None,
        observer: UnitObserver | None = None,
        on_digest: Callable[[int, StreamDigest], None] = lambda number, digest: None,
        checksums: ChecksumRecorder | None = None,
        has_threads: bool = True,
    ) -> None:
        """Prepare to move streams.

        Args:
            streams: The streams of all units, in order.
            source: Reader of the source files.
            sink: Writes the bytes, or None to digest the streams only.
            budget: Memory budget.
            progress: Receives the number of moved bytes.
            units: The units to move, or None for one unit of all streams.
            observer: Follows the units.
            on_digest: Called with the number and the digests of each completed stream. It may raise to stop all.
            checksums: Records the checksums of written blocks.
            has_threads: Whether the move and the write stage have threads of their own.
        """
        self.streams = streams
        self.source = source
        self.sink = sink
        self.budget = budget
        self.progress = progress
        self.on_digest = on_digest
        self.checksums = checksums
        self.has_threads = has_threads
        self.buffers = BufferPool(budget)
        self.sharing = RunSharing(source, sink)
        self.permute_pool: ThreadPoolExecutor | None = None
        if has_threads:
            # They start with the first permuted slab.
            self.permute_pool = ThreadPoolExecutor(threads())
        self.fills = FillGenerator(streams)
        self.result = ConversionResult()
        self.units: Iterable[PipelineUnit] = units or (PipelineUnit(0, range(len(streams))),)
        self.observer = observer
        # State of the move stage, for the stream that it digests
        self.digest = TensorDigest()
        self.prefix_digest = TensorDigest()
        self.change: ValueTransform | None = None
        # Of the write stage: the next sync point
        self.background_sync: BackgroundSync | None = None
        if isinstance(sink, Files) and observer is not None:
            self.background_sync = BackgroundSync(
                sink,
                observer.record_durable,
                # Unsynced bytes are dirty pages, which a small budget must bound too.
                max_unsynced_nbytes=min(MOST_UNSYNCED_NBYTES, budget.nbytes // 2),
            )
        self.written_unit = -1
        self.written_digests: dict[int, StreamDigest] = {}
        self.prefix: StreamPrefix | None = None
        self.unsynced_nbytes = 0
        self.unsynced_units: list[int] = []
        self.next_memory_look_s = 0.0
        self.error: BaseException | None = None

    def run(self) -> ConversionResult:
        """Run the pipeline, and raise the first error of any stage. The calling thread is the read stage.

        Raises:
            PrepError: Reading or writing failed.
        """
        self.mover = WorkerThread() if self.has_threads else CallingThread()
        self.writer = WorkerThread() if self.has_threads else CallingThread()
        try:
            for unit in self.units:
                self._read_unit(unit)
                if self.error:
                    break
            self._finish_stages()
        except BaseException as error:
            self.fail(error)
            # The error is kept, and the caller closes the files.
            self._finish_stages()
        self.mover.stop()
        self.writer.stop()
        # The observer may refer to the pipeline. Its memory makes room for the checks of the written bytes.
        self.buffers.clear()
        self.change = None
        if self.error:
            raise self.error
        return self.result

    def _read_unit(self, unit: PipelineUnit) -> None:
        """Read the slabs of a unit, and pass them on between its begin and its end."""
        for number in unit.streams:
            # An empty tensor has no slabs.
            stream = self.streams[number]
            if not stream.nbytes:
                self.result.digests[number] = StreamDigest.of_empty(stream.digest_algorithm)
        self.result.digests |= unit.digests
        for number in unit.digests:
            self.result.resumed_nbytes += self.streams[number].nbytes
        if unit.prefix:
            self.result.resumed_nbytes += unit.prefix.nbytes
        # Incomplete streams are read, and the streams that their fill averages. A partly durable one is read from its
        # first byte on, for its digest.
        needed: set[int] = set()
        for number in unit.streams:
            if number in unit.digests:
                continue
            needed.add(number)
            if self.streams[number].averages_rows:
                needed.add(mean_source_number(self.streams, number))
        stream_numbers = [number for number in unit.streams if number in needed]
        # Digests of an earlier start take part in the checks: a tied tensor of this one is compared with them.
        for number in sorted(unit.digests.keys() - set(stream_numbers)):
            self.on_digest(number, unit.digests[number])
        self._pass_in_order(partial(self._begin_unit, unit))
        for number in stream_numbers:
            if number in unit.digests:
                # It is read for the mean of its rows.
                self._read_stream(number, self.streams[number].nbytes)
            elif unit.prefix and unit.prefix.stream_number == number:
                prefix = unit.prefix
                if not self._read_stream(number, prefix.nbytes, prefix.digest):
                    self.result.resumed_nbytes -= prefix.nbytes
                    self.progress.advance(-prefix.nbytes)
                    self._read_stream(number, 0)
            else:
                self._read_stream(number, 0)
            if self.error:
                return
        self._pass_in_order(partial(self._end_unit, unit.number))

    def _read_stream(self, number: int, durable_nbytes: int, prefix_digest: str = "") -> bool:
        """Read the slabs of a stream, and pass them on. Its first `durable_nbytes` bytes are not written.

        Return False, and stop, if these bytes have another digest than `prefix_digest`.
        """
        max_nbytes = self.budget.slab_nbytes
        cached_nbytes = max_nbytes
        if not self.has_threads:
            cached_nbytes = min(max_nbytes, CACHED_SLAB_NBYTES)
        stream = self.streams[number]
        slabs = split_stream(number, stream, max_nbytes=max_nbytes, cached_nbytes=cached_nbytes)
        for slab in slabs:
            task = self._make_task(slab, durable_nbytes)
            if prefix_digest and task.new_nbytes < slab.nbytes:
                task.prefix_nbytes = slab.nbytes - task.new_nbytes
                if self._stream_nbytes_through(slab) >= durable_nbytes:
                    task.earlier_digest = prefix_digest
            self._run_stage(task, self._read_slab, self._submit_move)
            if task.earlier_digest:
                # The move stage compares the digests.
                self.mover.drain()
            if self.error:
                break
            if task.differs_from_prefix:
                return False
        return True

    def _pass_in_order(self, call: Callable[[], None]) -> None:
        """Call a function in the thread that writes, after all slabs so far."""
        self.mover.submit(lambda: self.writer.submit(lambda: self._run_unless_failed(call)))

    def _run_unless_failed(self, call: Callable[[], None]) -> None:
        if self.error is None:
            try:
                call()
            except BaseException as error:
                self.fail(error)

    def _begin_unit(self, unit: PipelineUnit) -> None:
        self.written_unit = unit.number
        self.written_digests = dict(unit.digests)
        self.prefix = unit.prefix
        if self.observer:
            self.observer.begin_unit(unit)

    def _end_unit(self, number: int) -> None:
        self.written_unit = -1
        if self.observer:
            self.observer.complete_unit(number)
        self.unsynced_units.append(number)

    def fail(self, error: BaseException) -> None:
        """End the pipeline with an error, the first one of all. Slabs in later stages are skipped."""
        self.error = self.error or error

    def _finish_stages(self) -> None:
        """Wait for the stages to end, even if a signal interrupts the wait, and sync all written bytes."""
        # The mover submits to the writer, so the writer gets its last task only after the mover has
        # ended.
        if self.permute_pool is not None:
            self.mover.submit(self.permute_pool.shutdown)
        wait_for_threads([self.mover], self.fail)
        self.writer.submit(self._sync_last_point)
        wait_for_threads([self.writer], self.fail)

    def _sync_last_point(self) -> None:
        """Make all written bytes durable, also after an error."""
        # All buffers that the pipeline has used are still allocated.
        self._look_at_memory()
        background_sync = self.background_sync
        self.background_sync = None
        try:
            if background_sync:
                background_sync.finish(self._take_sync_point())
        except BaseException as error:
            self.fail(error)

    def _make_task(self, slab: Slab, durable_nbytes: int) -> _SlabTask:
        """Return the task of a slab, with buffers from the pool. The first bytes of its stream are durable."""
        is_aligned = self.sink is None or self.sink.needs_alignment
        is_gathered = needs_gather(slab, is_aligned)
        has_copies = needs_permute(slab.reads) or slab.changes_values or is_gathered
        buffers = self.buffers.acquire(2 if has_copies else 1)
        # E.g. 100 durable bytes, slab of bytes 64 to 128: 28 are new, and the whole slab is written.
        new_nbytes = max(0, min(slab.nbytes, self._stream_nbytes_through(slab) - durable_nbytes))
        return _SlabTask(slab, new_nbytes, is_gathered, buffers, np.empty(0, np.uint8))

    def _stream_nbytes_through(self, slab: Slab) -> int:
        """Return the number of the stream's bytes up to the end of a slab."""
        return slab.start + slab.nbytes - self.streams[slab.stream_number].byte_range[0]

    def _submit_move(self, task: _SlabTask) -> None:
        self.mover.submit(partial(self._run_stage, task, self._move_slab, self._submit_write))

    def _submit_write(self, task: _SlabTask) -> None:
        self.writer.submit(partial(self._run_stage, task, self._checksum_and_write))

    def _run_stage(
        self,
        task: _SlabTask,
        work: Callable[[_SlabTask], None],
        submit_next: Callable[[_SlabTask], None] | None = None,
    ) -> None:
        """Do the work of a stage for a slab, and pass the slab to the next stage.

        After an error in any stage the work is skipped. Buffers are always released.
        """
        passed_on = False
        try:
            if self.error is None:
                work(task)
                if submit_next is not None:
                    submit_next(task)
                    passed_on = True
        except BaseException as error:
            self.fail(error)
        finally:
            if not passed_on:
                self.buffers.release(task.buffers)

    def _read_slab(self, task: _SlabTask) -> None:
        """Read a slab's runs into its first buffer."""
        # A single run goes to the buffer at its page offset in the file, so that direct I/O needs no copy.
        # Several runs are packed from the start of the buffer.
        start_s = time.perf_counter()
        reads = task.slab.reads
        if task.new_nbytes == task.slab.nbytes:
            # Durable bytes of an earlier start are compared before they are replaced.
            is_changed = self.streams[task.slab.stream_number].is_changed
            task.shared = self.sharing.share(task.slab, is_changed=is_changed)
        if task.shared:
            task.data = task.shared.read_bytes(task.buffers[0])
        elif len(reads) == 1 and not reads[0].repeats:
            # Loops that only lengthen the run are left out.
            copy = reads[0]
            run = StridedCopy(copy.tensor_offset, copy.file, copy.file_offset, copy.run_nbytes)
            task.data = self.source.read_run(run, task.buffers[0])
        elif reads:
            task.data = self.source.read_runs(reads, task.buffers[0])
        self.result.read_nbytes += task.data.size
        self.result.seconds["read"] += time.perf_counter() - start_s

    def _move_slab(self, task: _SlabTask) -> None:
        """Bring a slab into the tensor's order, digest and cast it, and bring it into the sink's order."""
        start_s = time.perf_counter()
        slab = task.slab
        if not slab.reads:
            task.data = self.fills.make_rows(slab, task.first_buffer(slab.nbytes))
        elif needs_permute(slab.reads):
            out = task.swap_buffers(slab.nbytes)
            task.data = scatter(slab, task.data, out=out, pool=self.permute_pool)
            self.result.copied_nbytes += slab.nbytes
        # Here the bytes are in the tensor's C order. Digests, casts and the means for filled rows need this order.
        self.fills.add_slab(slab, task.data)
        self._digest_and_cast(task)
        if task.needs_gather:
            out = task.swap_buffers(slab.written_nbytes)
            task.data = gather(slab, task.data, out=out, pool=self.permute_pool)
            self.result.copied_nbytes += slab.written_nbytes
        self.result.seconds["move"] += time.perf_counter() - start_s

    def _digest_and_cast(self, task: _SlabTask) -> None:
        """Add a slab to the digest of its stream, and cast the slab.

        A stream is a range of rows of one tensor and has one digest. It passes in slabs: ranges of bytes, each as
        long as a buffer. The last slab of a stream completes the digest.
        """
        slab = task.slab
        number = slab.stream_number
        stream = self.streams[number]
        # One transform per stream: it keeps the digest and the counts of the cast over all slabs.
        if slab.start == stream.byte_range[0]:
            self.digest = TensorDigest(algorithm=stream.digest_algorithm)
            self.prefix_digest = TensorDigest(algorithm=stream.digest_algorithm)
            # The matrices of one update are freed before those of the next are read.
            self.change = None
            if stream.is_changed:
                self.change = ValueTransform(stream, self.source)
                self._look_at_memory()
        # The digest of the read bytes comes before the cast. The cast adds a digest of the written
        # bytes.
        self.digest.update(task.data.data)
        if self.change:
            task.data = self.change.apply(task.data, task.swap_buffers(slab.written_nbytes))
            self.result.copied_nbytes += slab.written_nbytes
        if task.prefix_nbytes:
            read_itemsize, written_itemsize = slab.itemsizes
            written_nbytes = task.prefix_nbytes // read_itemsize * written_itemsize
            self.prefix_digest.update(task.data[:written_nbytes].data)
        if task.earlier_digest and task.earlier_digest != self.prefix_digest.text():
            # The slab passes once more.
            task.differs_from_prefix = True
            task.new_nbytes = 0
        elif slab.start + slab.nbytes == stream.byte_range[1]:
            digest = self.digest.text()
            stream_digest = StreamDigest(digest, digest)
            if self.change:
                stream_digest = self.change.stream_digest(digest)
            # A durable stream is read again for the mean of its rows.
            if self.result.digests.get(number, stream_digest) != stream_digest:
                raise PrepError(
                    f"{stream.name} was read with other values than by an earlier run",
                    "the source has changed, or one of the reads was wrong",
                    text("{} with {}", RERUN_HINT, Option("restart", True)),
                )
            task.digests = {number: stream_digest}
            self.result.digests |= task.digests
            self.on_digest(number, task.digests[number])
        elif self.background_sync and slab.writes:
            # A later run compares the written bytes with it, which differ from the read ones after a cast.
            digest = self.change.digest() if self.change else self.digest.text()
            task.prefix = StreamPrefix(number, self._stream_nbytes_through(slab), digest)

    def _checksum_and_write(self, task: _SlabTask) -> None:
        """Record a slab's checksums, write it, and submit a sync point if one is due."""
        start_s = time.perf_counter()
        # Checksums are computed during the write, because the write waits for the disk. Blocks with bytes of an earlier
        # run stay unknown: their checksums must be of the bytes on disk.
        recording = contextlib.nullcontext()
        if self.checksums and task.new_nbytes:
            if self.has_threads:
                recording = self.checksums.recording(task.slab.writes, task.data)
            else:
                self.checksums.record(task.slab.writes, task.data)
        slab = task.slab
        with recording:
            if task.new_nbytes:
                if self.sink and slab.writes:
                    if task.shared:
                        task.shared.write_ends(task.data)
                    else:
                        self.sink.write(slab.writes, task.data)
                    self.result.written_nbytes += slab.written_nbytes
                    self.unsynced_nbytes += slab.written_nbytes
                self.progress.advance(task.new_nbytes)
                self.prefix = task.prefix
                self.written_digests |= task.digests
            elif task.differs_from_prefix:
                self.prefix = None
        is_full = len(self.unsynced_units) >= MAX_UNSYNCED_UNITS
        if (
            self.background_sync
            and (is_full or self.background_sync.is_due(self.unsynced_nbytes))
            and not _shares_pages(task)
        ):
            self.background_sync.submit(self._take_sync_point())
        end_s = time.perf_counter()
        if end_s >= self.next_memory_look_s:
            self._look_at_memory()
            self.next_memory_look_s = end_s + MEMORY_INTERVAL_S
        self.result.seconds["write"] += end_s - start_s

    def _look_at_memory(self) -> None:
        self.result.peak_nbytes = max(self.result.peak_nbytes, anonymous_nbytes())

    def _take_sync_point(self) -> SyncPoint:
        """Return the writer's position, and start collecting the next sync point."""
        part: UnitPart | None = None
        if self.written_unit >= 0:
            part = UnitPart(self.written_unit, dict(self.written_digests), self.prefix)
        point = SyncPoint(tuple(self.unsynced_units), part)
        self.unsynced_units = []
        self.unsynced_nbytes = 0
        return point


def needs_gather(slab: Slab, is_aligned: bool) -> bool:
    """Whether the sink needs a slab's bytes in another order or, for aligned writes, at another page offset."""
    if not slab.writes:
        return False
    if needs_permute(slab.writes):
        return True
    if not is_aligned:
        return False
    # A single run keeps its page offset of the source from the read to the write. Any copy on the
    # way already brings it to the page offset of the sink.
    if not slab.reads or needs_permute(slab.reads) or slab.changes_values:
        return False
    return (slab.reads[0].file_offset - slab.writes[0].file_offset) % PAGE != 0


def _shares_pages(task: _SlabTask) -> bool:
    """Return whether later slabs write short runs to the pages of a slab.

    A sync between them would write each page to disk several times and read it back.
    """
    if task.digests:
        return False
    return any(copy.repeats and copy.run_nbytes < LONG_RUN_NBYTES for copy in task.slab.writes)
