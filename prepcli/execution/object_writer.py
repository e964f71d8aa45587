"""Write units of work to an object store: their objects are assembled, compressed if necessary, and sent.

The length of a compressed chunk is known only after its compression. The notes of the units record the lengths, and the
last process computes the places of all chunks from them. The bytes depend only on the raw chunk and the compression,
not on the sizes of pieces.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from prepcli.algebra.strided_copies import StridedCopy
from prepcli.engine.checksum_recorder import ChecksumRecorder
from prepcli.engine.digest import StreamDigest
from prepcli.engine.object_assembler import ObjectAssembler, Piece, PieceLimits
from prepcli.execution.finalize import output_path
from prepcli.execution.output import UnitNote
from prepcli.formats.codecs import Encoder, codec_of
from prepcli.planning import coverage
from prepcli.planning.chunk_placement import ChunkExtent, chunk_extents
from prepcli.planning.item_storage import Compression
from prepcli.planning.object_files import streams_of_spans
from prepcli.planning.plan import Plan, Stream
from prepcli.planning.work_units import WorkUnit
from prepcli.stores.buffers import ByteArray, allocate_buffer
from prepcli.stores.byte_ranges import RemoteFile
from prepcli.stores.object_writes import ObjectUploads

# An encoder gets so many bytes at a time.
SLICE_NBYTES = 1 << 20
MAX_THREADS = 8
# Encoders may use this part of the memory.
CONTEXT_SHARE = 16


class ObjectWriter:
    """Assembles and sends the objects of units, and notes a unit once all are sent and its streams are digested.

    Attributes:
        assembler: The sink of the pipeline.
    """

    def __init__(
        self,
        plan: Plan,
        units: Sequence[WorkUnit],
        uploads: ObjectUploads,
        limits: PieceLimits,
        *,
        on_done: Callable[[int, UnitNote], None],
        num_compressing: int = 0,
    ) -> None:
        """Begin without a unit.

        Args:
            plan: The plan of the output.
            units: All units of the plan.
            uploads: Sends the pieces.
            limits: Limits of the memory.
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
        self._digests: dict[int, dict[int, StreamDigest]] = {}
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
            self._compressor = ObjectCompressor(self._extents, plan.compression, num_compressing)
        # Compressed bytes of each object so far, by file
        self._compressed_nbytes: dict[int, int] = {}
        self.assembler = ObjectAssembler(
            {}, {}, limits, send=self._send, on_complete=self._record_checksums
        )

    def expect(self, number: int) -> None:
        """Expect the digests of a unit. Called before its first byte is read."""
        unit = self._units[number]
        streams = [stream for stream in unit.streams if self._plan.streams[stream].nbytes]
        self._objects[number] = []
        self._digests[number] = {}
        self._num_pending[number] = len(streams) + len(unit.files)
        self._unit_of_file.update(dict.fromkeys(unit.files, number))
        self._unit_of_stream.update(dict.fromkeys(streams, number))

    def begin(self, number: int) -> None:
        """Begin to assemble the objects of a unit, in the thread that writes."""
        files = self._units[number].files
        spans = {file: self._spans.get(file, []) for file in files}
        self.assembler.add({file: self._plan.files[file] for file in files}, spans)

    def missing_streams(self, slab_nbytes: int) -> list[Stream]:
        """Begin another pass. Return the streams with bytes of incomplete pieces, or an empty list if there are none.

        Args:
            slab_nbytes: Maximum size of a slab.
        """
        missing = self.assembler.missing_spans()
        if not missing:
            return []
        self.assembler.begin_pass()
        streams: list[Stream] = []
        for number in sorted({self._unit_of_file[file] for file in missing}):
            streams += [self._plan.streams[stream] for stream in self._units[number].streams]
        return streams_of_spans(streams, missing, slab_nbytes=slab_nbytes)

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
            sent = self._uploads.send(path, piece.data, start=piece.start, size=file.size)
        else:
            data = self._compressor.compress(piece)
            start = self._compressed_nbytes.get(piece.file, 0)
            self._compressed_nbytes[piece.file] = start + data.size
            # The size of the object is known at its last piece.
            is_last = piece.start + piece.data.size == file.size
            size = start + data.size if is_last else None
            sent = self._uploads.send(path, data, start=start, size=size, max_nbytes=file.size)
        # More pieces of the object follow.
        if sent is None:
            return
        number = self._unit_of_file[piece.file]
        with self._lock:
            self._objects[number].append(sent)
        self._count_part(number)

    def add_digest(self, stream: int, digest: StreamDigest) -> None:
        """Add the digests of a stream of the plan."""
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
        if not is_done:
            return
        blocks: list[int] = []
        lengths: dict[int, Sequence[int]] = {}
        for file in self._units[number].files:
            blocks += block_numbers(self._extents.get(file, ()))
            if self._compressor is not None:
                lengths[file] = self._compressor.lengths(file)
        numbers = np.array(blocks, np.uint64)
        sums = self._recorder.sums[numbers.astype(np.int64)]
        objects = sorted(self._objects.pop(number), key=lambda file: file.path)
        digests = self._digests.pop(number)
        self._on_done(
            number, UnitNote(digests, numbers, sums, objects=tuple(objects), lengths=lengths)
        )


def block_numbers(extents: Sequence[ChunkExtent]) -> list[int]:
    """Return the numbers of the checksum blocks in extents."""
    numbers: list[int] = []
    for extent in extents:
        for position in range(extent.chunk_count):
            first = extent.first_block(position)
            numbers += range(first, first + extent.blocks.per_chunk.block_count)
    return numbers


# --- Compression


@dataclass(slots=True)
class _ObjectState:
    """The chunks of an object, and its progress.

    Attributes:
        chunks: Offset and size of each raw chunk, ascending.
        lengths: Compressed lengths of the first chunks.
        stream: Compressor of the current chunk, if its first bytes are compressed.
        length: Compressed bytes of the current chunk so far.
    """

    chunks: Sequence[tuple[int, int]]
    lengths: list[int] = field(default_factory=list[int])
    stream: Encoder | None = None
    length: int = 0


class _Buffer:
    """Compressed bytes of a piece.

    It takes no memory for unused bytes, and returns its memory at once. Freed bytearrays of several threads stayed in
    the process: up to 40 MiB at a limit of 128 MiB.
    """

    def __init__(self, max_nbytes: int) -> None:
        self._memory = allocate_buffer(max_nbytes)
        self._nbytes = 0

    @property
    def content(self) -> ByteArray:
        """The bytes so far."""
        return self._memory[: self._nbytes]

    def append(self, data: bytes) -> None:
        """Append bytes."""
        stop = self._nbytes + len(data)
        self._memory[self._nbytes : stop] = np.frombuffer(data, np.uint8)
        self._nbytes = stop


class ObjectCompressor:
    """Compresses pieces of objects in several threads. The pieces of one object come in order, one at a time."""

    def __init__(
        self,
        extents: Mapping[int, Sequence[ChunkExtent]],
        compression: Compression,
        num_threads: int,
    ) -> None:
        """Begin with no piece.

        Args:
            extents: Extents of each object, by file number, sorted by offset.
            compression: Codec and level.
            num_threads: Number of concurrent compressions.
        """
        self._codec = codec_of(compression)
        self._level = compression.level
        self._extents = extents
        self._states: dict[int, _ObjectState] = {}
        self._slots = threading.Semaphore(num_threads)

    def compress(self, piece: Piece) -> ByteArray:
        """Return the compressed bytes of a piece. They may be empty before the last piece of an object."""
        state = self._state(piece.file)
        num_chunks = len(state.chunks) - len(state.lengths)
        compressed = _Buffer(self._codec.max_encoded_nbytes(piece.data.size, num_chunks))
        with self._slots:
            while len(state.lengths) < len(state.chunks):
                offset, nbytes = state.chunks[len(state.lengths)]
                first = max(offset, piece.start)
                stop = min(offset + nbytes, piece.start + piece.data.size)
                if first >= stop:
                    # The chunk begins in a later piece.
                    break
                if state.stream is None:
                    state.stream = self._codec.open_encoder(self._level, nbytes)
                run = piece.data[first - piece.start : stop - piece.start]
                for start in range(0, run.size, SLICE_NBYTES):
                    data = state.stream.compress(run[start : start + SLICE_NBYTES].data)
                    compressed.append(data)
                    state.length += len(data)
                if stop < offset + nbytes:
                    # The next piece continues the chunk.
                    break
                data = state.stream.flush()
                compressed.append(data)
                state.lengths.append(state.length + len(data))
                state.stream = None
                state.length = 0
        return compressed.content

    def lengths(self, file: int) -> list[int]:
        """Return the compressed lengths of the chunks of a complete object, in the order of their offsets."""
        return self._state(file).lengths

    def _state(self, file: int) -> _ObjectState:
        if file not in self._states:
            chunks: list[tuple[int, int]] = []
            for extent in self._extents.get(file, ()):
                for position in range(extent.chunk_count):
                    offset = extent.offset + position * extent.stride_nbytes
                    chunks.append((offset, extent.blocks.per_chunk.chunk_nbytes))
            self._states[file] = _ObjectState(sorted(chunks))
        return self._states[file]


def compression_threads(encoder_nbytes: int, memory_nbytes: int) -> int:
    """Return the number of threads for the compression within a memory limit."""
    return max(1, min(MAX_THREADS, memory_nbytes // CONTEXT_SHARE // encoder_nbytes))
