"""Write units of work file by file: data files are assembled in memory, compressed if necessary, and sent.

An object in a bucket has no writes at an offset, and the place of a compressed chunk is unknown before the chunks in
front of it are compressed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from prepcli.algebra.strided_copies import StridedCopy
from prepcli.core.observer import NullProgress
from prepcli.engine.background_sync import SyncPoint
from prepcli.engine.blobs import open_blobs
from prepcli.engine.budget import Budget
from prepcli.engine.casts import matrix_nbytes
from prepcli.engine.checksum_recorder import ChecksumRecorder
from prepcli.engine.files import RunReader
from prepcli.engine.fills import piece_nbytes
from prepcli.engine.object_assembler import ObjectAssembler, Piece, PieceLimits, make_object_budget
from prepcli.engine.pipeline import Pipeline, PipelineUnit
from prepcli.execution.finalize import output_path, raw_chunks
from prepcli.execution.object_compressor import (
    CompressedChunks,
    ObjectCompressor,
    compression_threads,
    locate_chunks,
)
from prepcli.execution.run import Run
from prepcli.execution.unit_notes import UnitNote
from prepcli.formats.codecs import codec_of
from prepcli.planning import coverage
from prepcli.planning.chunk_placement import ChunkExtent, chunk_extents
from prepcli.planning.object_files import OBJECT_NBYTES, streams_of_spans
from prepcli.planning.plan import Plan, Stream
from prepcli.planning.slabs import min_buffer_nbytes
from prepcli.stores.buffers import ByteArray
from prepcli.stores.byte_ranges import RemoteFile
from prepcli.stores.object_store import part_nbytes


class PieceSender(Protocol):
    """Writes data files from their pieces. See `ObjectUploads.send`."""

    def send(
        self, path: str, data: ByteArray, *, start: int, size: int | None, max_nbytes: int = 0
    ) -> RemoteFile | None:
        """Write consecutive bytes of a file. Return the file after its last piece."""
        ...


@dataclass(frozen=True, slots=True)
class ObjectBudget:
    """How the memory of a run is divided that assembles its data files.

    Attributes:
        pipeline: Budget of the pipeline.
        pieces: Limits of the pieces.
        num_compressing: Number of concurrent compressions. 0 without compression.
    """

    pipeline: Budget
    pieces: PieceLimits
    num_compressing: int

    @classmethod
    def of_plan(cls, plan: Plan, memory_nbytes: int) -> ObjectBudget:
        """Divide a memory limit. Raise UsageError if it is too small."""
        largest_nbytes = max((file.size for file in plan.files), default=0)
        kept_nbytes = max(matrix_nbytes(plan.streams), piece_nbytes(plan.streams))
        num_compressing = 0
        if compression := plan.compression:
            num_compressing = compression_threads(compression, memory_nbytes)
            # As many contexts again for chunks of split objects, continued by a later piece
            encoder_nbytes = codec_of(compression).encoder_nbytes(compression.level)
            kept_nbytes += 2 * num_compressing * encoder_nbytes
        pipeline, pieces = make_object_budget(
            memory_nbytes,
            min_buffer_nbytes=min_buffer_nbytes(plan.streams),
            kept_nbytes=kept_nbytes,
            object_nbytes=OBJECT_NBYTES,
            largest_nbytes=largest_nbytes,
            part_nbytes=part_nbytes(largest_nbytes),
            num_compressing=num_compressing,
        )
        return cls(pipeline, pieces, num_compressing)


class ObjectWriter:
    """Assembles and sends the objects of units, and notes a unit once all are sent and its streams are digested."""

    def __init__(
        self,
        run: Run,
        sender: PieceSender,
        budget: ObjectBudget,
        *,
        on_done: Callable[[int, UnitNote], None],
    ) -> None:
        """Begin without a unit.

        Args:
            run: The run of the output.
            sender: Writes the pieces.
            budget: How the memory is divided.
            on_done: Called with the number and the note of each complete unit, in one of several threads.
        """
        plan = run.plan
        self._run = run
        self._plan = plan
        self._units = run.units
        self._sender = sender
        self._budget = budget.pipeline
        self._on_done = on_done
        self._unit_of_file: dict[int, int] = {}
        self._unit_of_stream: dict[int, int] = {}
        self._objects: dict[int, list[RemoteFile]] = {}
        self._digests: dict[int, dict[int, str]] = {}
        self._num_pending: dict[int, int] = {}
        # The pipeline digests in one thread, and pieces are sent in others.
        self._lock = threading.Lock()
        self._spans: dict[int, list[tuple[int, int]]] = {}
        for file, start, stop in coverage.written_spans(plan):
            self._spans.setdefault(file, []).append((start, stop))
        extents = chunk_extents(plan.leaves)
        self._extents: dict[int, list[ChunkExtent]] = {}
        for extent in extents:
            self._extents.setdefault(extent.file, []).append(extent)
        self._recorder = ChecksumRecorder(extents)
        self._compressor: ObjectCompressor | None = None
        if plan.compression:
            self._compressor = ObjectCompressor(
                self._extents, plan.compression, budget.num_compressing
            )
        # Compressed bytes of each object so far, by file
        self._compressed_nbytes: dict[int, int] = {}
        self._assembler = ObjectAssembler(
            {}, {}, budget.pieces, send=self._send, on_complete=self._record_checksums
        )

    def write(self, units: Iterator[PipelineUnit]) -> None:
        """Write units. Called once.

        Raises:
            PrepError: Reading or writing failed.
        """
        run = self._run
        with (
            closing(self._assembler),
            open_blobs(run.source.byte_sources, self._budget.cache_nbytes) as reader,
        ):
            outcome = Pipeline(
                self._plan.streams,
                reader,
                sink=self._assembler,
                budget=self._budget,
                progress=run.pool.progress,
                units=map(self._expect, units),
                observer=self,
                on_digest=self._add_digest,
            ).run()
            self._assembler.wait()
            run.add_result(replace(outcome, written_nbytes=0))
            # Each pass assembles at least one piece, because the memory is free when it begins.
            while streams := self._begin_pass():
                self._write_again(streams, reader)

    def _expect(self, unit: PipelineUnit) -> PipelineUnit:
        """Expect the digests of a unit, before its first byte is read."""
        number = unit.number
        files = self._units[number].files
        streams = [stream for stream in unit.streams if self._plan.streams[stream].nbytes]
        self._objects[number] = []
        self._digests[number] = {}
        self._num_pending[number] = len(streams) + len(files)
        self._unit_of_file.update(dict.fromkeys(files, number))
        self._unit_of_stream.update(dict.fromkeys(streams, number))
        return unit

    def begin_unit(self, unit: PipelineUnit) -> None:
        """Begin to assemble the objects of a unit. See `UnitObserver`."""
        files = self._units[unit.number].files
        spans = {file: self._spans.get(file, []) for file in files}
        self._assembler.add({file: self._plan.files[file] for file in files}, spans)

    def complete_unit(self, number: int) -> None:
        """Wait for the objects of the unit, which complete it. See `UnitObserver`."""

    def record_durable(self, point: SyncPoint) -> None:
        """Ignore a sync: the assembler has none. See `UnitObserver`."""

    def _begin_pass(self) -> list[Stream]:
        """Begin another pass. Return the streams with bytes of incomplete pieces."""
        missing = self._assembler.missing_spans()
        if not missing:
            return []
        self._assembler.begin_pass()
        streams: list[Stream] = []
        for number in sorted({self._unit_of_file[file] for file in missing}):
            streams += [self._plan.streams[stream] for stream in self._units[number].streams]
        return streams_of_spans(streams, missing, slab_nbytes=self._budget.slab_nbytes)

    def _write_again(self, streams: Sequence[Stream], reader: RunReader) -> None:
        """Read streams again for the missing pieces. Their digests are ignored: they have a part of the rows."""
        outcome = Pipeline(
            streams, reader, sink=self._assembler, budget=self._budget, progress=NullProgress()
        ).run()
        self._assembler.wait()
        self._run.add_result(replace(outcome, written_nbytes=0))
        self._run.pool.check()

    def _record_checksums(self, piece: Piece) -> None:
        """Record the checksums of a piece. The pieces of an object come in order, one call at a time."""
        piece_stop = piece.start + piece.data.size
        for extent in self._extents.get(piece.file, ()):
            nbytes = extent.blocks.per_chunk.chunk_nbytes
            # Chunks without gaps between them are one run.
            num_runs = extent.chunk_count
            if extent.stride_nbytes == nbytes:
                nbytes *= num_runs
                num_runs = 1
            for position in range(num_runs):
                chunk_start = extent.offset + position * extent.stride_nbytes
                start = max(chunk_start, piece.start)
                stop = min(chunk_start + nbytes, piece_stop)
                if start < stop:
                    run = piece.data[start - piece.start : stop - piece.start]
                    copy = StridedCopy(0, piece.file, start, stop - start)
                    self._recorder.record((copy,), run)

    def _send(self, piece: Piece) -> None:
        """Send a piece, in one of several threads. Raises PrepError."""
        file = self._plan.files[piece.file]
        path = output_path(self._plan, file.path)
        if self._compressor is None:
            sent = self._sender.send(path, piece.data, start=piece.start, size=file.size)
        else:
            sent = self._send_compressed(path, self._compressor.compress(piece), piece)
        # More pieces of the object follow.
        if sent is None:
            return
        number = self._unit_of_file[piece.file]
        with self._lock:
            self._objects[number].append(sent)
        self._count_part(number)

    def _send_compressed(self, path: str, data: ByteArray, piece: Piece) -> RemoteFile | None:
        """Send the compressed bytes of a piece. Return the object after its last piece."""
        raw_nbytes = self._plan.files[piece.file].size
        start = self._compressed_nbytes.get(piece.file, 0)
        self._compressed_nbytes[piece.file] = start + data.size
        size: int | None = None
        if piece.start + piece.data.size == raw_nbytes:
            size = start + data.size
        return self._sender.send(path, data, start=start, size=size, max_nbytes=raw_nbytes)

    def _add_digest(self, stream: int, digest: str) -> None:
        self._run.integrity.on_digest(stream, digest)
        number = self._unit_of_stream[stream]
        with self._lock:
            self._digests[number][stream] = digest
        self._count_part(number)

    def _count_part(self, number: int) -> None:
        """Count an object or a stream of a unit as complete. Note the unit after the last one."""
        with self._lock:
            self._num_pending[number] -= 1
            is_done = self._num_pending[number] == 0
        # Outside of the lock: the note is a request, which other threads need not wait for.
        if is_done:
            self._on_done(number, self._note(number))

    def _note(self, number: int) -> UnitNote:
        blocks: list[int] = []
        for file in self._units[number].files:
            blocks += _block_numbers(self._extents.get(file, ()))
        numbers = np.array(blocks, np.uint64)
        objects = sorted(self._objects.pop(number), key=lambda file: file.path)
        sums = self._recorder.sums[numbers.astype(np.int64)]
        lengths: dict[int, Sequence[int]] = {}
        if self._compressor is not None:
            for file in self._units[number].files:
                lengths[file] = self._compressor.lengths(file)
        digests = self._digests.pop(number)
        return UnitNote(digests, numbers, sums, objects=tuple(objects), lengths=lengths)


def compressed_chunks(plan: Plan, notes: Sequence[UnitNote]) -> CompressedChunks | None:
    """Return the locations of compressed chunks from the notes of all units, or None if the chunks are raw."""
    if not plan.compression:
        return None
    lengths: dict[int, Sequence[int]] = {}
    for note in notes:
        lengths |= note.lengths
    paths = [file.path for file in plan.files]
    return locate_chunks(raw_chunks(plan.leaves), lengths, paths)


def _block_numbers(extents: Sequence[ChunkExtent]) -> list[int]:
    """Return the numbers of the checksum blocks in extents."""
    numbers: list[int] = []
    for extent in extents:
        for position in range(extent.chunk_count):
            first = extent.first_block(position)
            numbers += range(first, first + extent.blocks.per_chunk.block_count)
    return numbers
