"""Progress of the units of work of a process: sent objects, digests, and checksums of their blocks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from prepcli.algebra.strided_copies import StridedCopy
from prepcli.engine.checksum_recorder import ChecksumRecorder
from prepcli.engine.object_assembler import Piece
from prepcli.execution.bucket_run import UnitNote
from prepcli.execution.finalize import output_path
from prepcli.execution.object_compressor import ObjectCompressor
from prepcli.planning.chunk_placement import ChunkExtent, chunk_extents
from prepcli.planning.plan import Plan
from prepcli.planning.work_units import WorkUnit
from prepcli.stores.buffers import ByteArray
from prepcli.stores.byte_ranges import RemoteFile
from prepcli.stores.object_writes import ObjectUploads


class UnitProgress:
    """Sends the pieces of objects, and notes a unit once all its objects are sent and its streams digested."""

    def __init__(
        self,
        plan: Plan,
        units: Mapping[int, WorkUnit],
        uploads: ObjectUploads,
        *,
        on_done: Callable[[int, UnitNote], None],
        num_compressing: int = 0,
    ) -> None:
        """Begin with no object sent.

        Args:
            plan: The plan of the whole output.
            units: The units to write, by number.
            uploads: Sends the pieces.
            on_done: Called with the number and the note of each complete unit, in one of several threads.
            num_compressing: Number of concurrent compressions. 0 without compression.
        """
        self._plan = plan
        self._units = units
        self._uploads = uploads
        self._on_done = on_done
        self._unit_of_file: dict[int, int] = {}
        self._unit_of_stream: dict[int, int] = {}
        self._objects: dict[int, list[RemoteFile]] = {}
        self._digests: dict[int, dict[int, str]] = {}
        self._num_pending: dict[int, int] = {}
        # The pipeline digests in one thread, and pieces are sent in others.
        self._lock = threading.Lock()
        for number, unit in units.items():
            streams = [stream for stream in unit.streams if plan.streams[stream].nbytes]
            self._unit_of_file.update(dict.fromkeys(unit.files, number))
            self._unit_of_stream.update(dict.fromkeys(streams, number))
            self._objects[number] = []
            self._digests[number] = {}
            self._num_pending[number] = len(streams) + len(unit.files)
        extents = chunk_extents(plan.leaves)
        self._extents: dict[int, list[ChunkExtent]] = {}
        for extent in extents:
            if extent.file in self._unit_of_file:
                self._extents.setdefault(extent.file, []).append(extent)
        self._recorder = ChecksumRecorder(None, extents)
        self._compressor: ObjectCompressor | None = None
        if plan.compression:
            self._compressor = ObjectCompressor(self._extents, plan.compression, num_compressing)
        # Compressed bytes of each object so far, by file
        self._compressed_nbytes: dict[int, int] = {}

    def record_checksums(self, piece: Piece) -> None:
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

    def send(self, piece: Piece) -> None:
        """Send a piece, in one of several threads. Raises PrepError."""
        file = self._plan.files[piece.file]
        path = output_path(self._plan, file.path)
        if self._compressor is None:
            sent = self._uploads.send(path, piece.data, start=piece.start, size=file.size)
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
        return self._uploads.send(path, data, start=start, size=size, max_nbytes=raw_nbytes)

    def add_digest(self, stream: int, digest: str) -> None:
        """Add the digest of a stream of the plan."""
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
        return UnitNote(tuple(objects), self._digests.pop(number), numbers, sums, lengths)


def _block_numbers(extents: Sequence[ChunkExtent]) -> list[int]:
    """Return the numbers of the checksum blocks in extents."""
    numbers: list[int] = []
    for extent in extents:
        for position in range(extent.chunk_count):
            first = extent.first_block(position)
            numbers += range(first, first + extent.blocks.per_chunk.block_count)
    return numbers
