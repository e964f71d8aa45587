"""Assemble objects in memory from the runs of a pipeline, and send each complete one.

An object has no writes at an offset. A large object is cut into pieces, sent in order. If the memory for
pieces is used up by incomplete ones, the bytes of another piece are skipped, and a later pass over the streams of this
piece writes them.
"""

from __future__ import annotations

import bisect
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from prepcli.algebra.strided_copies import StridedCopy
from prepcli.core.worker_thread import WorkerThread, wait_for_threads
from prepcli.engine.budget import (
    MAX_BUFFERS,
    MAX_SLAB_NBYTES,
    MIB,
    Budget,
    bookkeeping_nbytes,
    make_budget,
)
from prepcli.engine.files import PAGE
from prepcli.planning.plan import OutputFile
from prepcli.stores.buffers import ByteArray, allocate_buffer

# (file number, piece number)
PieceKey = tuple[int, int]
# Start and stop bytes, ascending
Spans = Sequence[tuple[int, int]]
MIN_BUFFERS = 4
# Larger requests are hardly faster, and take long to repeat.
MAX_PIECE_NBYTES = 64 * MIB
MIN_PIECE_NBYTES = 4 * MIB
MAX_SENDING_THREADS = 8
MAX_PARTS_IN_FLIGHT = 4


@dataclass(frozen=True, slots=True)
class PieceLimits:
    """Limits of the memory for pieces.

    Attributes:
        total_nbytes: Memory for all pieces.
        piece_nbytes: Maximum size of a piece.
        split_files: Maximum number of split objects under way at the same time.
        parts_in_flight: Number of parts of one object in flight at the same time.
        num_threads: Number of pieces in flight at the same time.
    """

    total_nbytes: int
    piece_nbytes: int
    split_files: int = 1
    parts_in_flight: int = 1
    num_threads: int = 4


@dataclass(slots=True)
class Piece:
    """Consecutive bytes of an object.

    Attributes:
        file: Number of the object among the plan's data files.
        number: Number of the piece in the object.
        start: Offset of the first byte.
        data: The bytes. Gaps are zero.
        missing_nbytes: Number of bytes still to write.
    """

    file: int
    number: int
    start: int
    data: ByteArray
    missing_nbytes: int


class ObjectAssembler:
    """Assembles the pieces of objects. It is the sink of a pipeline, and has the interface `RunWriter`."""

    # The pipeline writes in one thread. `_lock` protects what that thread shares with the threads
    # that send: the memory in use, the pieces in flight, and the order of the pieces of an object.
    # The main thread takes no lock, because a signal could leave it locked (see `worker_thread`). Its
    # calls run in `_caller`.
    needs_alignment = False

    def __init__(
        self,
        files: Mapping[int, OutputFile],
        spans: Mapping[int, Spans],
        limits: PieceLimits,
        *,
        send: Callable[[Piece], None],
        on_complete: Callable[[Piece], None] = lambda piece: None,
    ) -> None:
        """Prepare to assemble objects.

        Args:
            files: The objects to assemble, by number. Bytes of other files are ignored.
            spans: Byte ranges written by streams, by file.
            limits: Limits of the memory.
            send: Sends a piece, in one of several threads. Pieces of one object are sent in order.
            on_complete: Called with each complete piece before it is sent, in order for each object.
        """
        self._files = dict(files)
        self._spans = dict(spans)
        self._limits = limits
        self._send = send
        self._on_complete = on_complete
        self._open: dict[PieceKey, Piece] = {}
        # Pieces that are complete, and pieces of this pass without memory.
        self._complete: set[PieceKey] = set()
        self._missed: set[PieceKey] = set()
        # Number of the next piece to open, and of the next one to send, by file
        self._next_open = dict.fromkeys(files, 0)
        self._next_send = dict.fromkeys(files, 0)
        self._waiting: dict[PieceKey, Piece] = {}
        self._split_files: set[int] = set()
        self._lock = threading.Condition()
        self._used_nbytes = 0
        self._in_flight = 0
        self._error: BaseException | None = None
        self._to_send = queue.SimpleQueue[Piece | None]()
        self._caller = WorkerThread()
        for _ in range(limits.num_threads):
            WorkerThread().submit(self._send_pieces)
        self.begin_pass()

    def add(self, files: Mapping[int, OutputFile], spans: Mapping[int, Spans]) -> None:
        """Add objects to assemble. Called in the thread that writes."""
        self._files |= files
        self._spans |= spans
        self._next_open |= dict.fromkeys(files, 0)
        self._next_send |= dict.fromkeys(files, 0)
        for file in files:
            self._open_blank_pieces(file)

    def begin_pass(self) -> None:
        """Begin a pass over the streams of all incomplete pieces."""
        self._call(self._begin_pass)

    def _begin_pass(self) -> None:
        self._missed = set()
        for file in self._files:
            self._next_open[file] = self._num_complete(file)
            self._open_blank_pieces(file)

    def missing_spans(self) -> dict[int, list[tuple[int, int]]]:
        """Return the byte ranges of incomplete pieces, by file."""
        missing: dict[int, list[tuple[int, int]]] = {}
        for file, output in self._files.items():
            for number in range(self._num_complete(file), self.piece_count(file)):
                start = number * self._limits.piece_nbytes
                stop = min(output.size, start + self._limits.piece_nbytes)
                missing.setdefault(file, []).append((start, stop))
        return missing

    def piece_count(self, file: int) -> int:
        """Return the number of pieces of an object."""
        return max(1, -(-self._files[file].size // self._limits.piece_nbytes))

    def write(self, copies: Sequence[StridedCopy], data: ByteArray) -> None:
        """Write all runs of the copies from `data`, where they are packed one after another."""
        start = 0
        for copy in copies:
            packed = data[start : start + copy.nbytes]
            start += copy.nbytes
            if copy.file in self._files:
                self._write_copy(copy, packed)

    def wait(self) -> None:
        """Wait until all complete pieces are sent.

        Raises:
            PrepError: A piece could not be sent.
        """
        self._call(self._wait_until_sent)

    def _wait_until_sent(self) -> None:
        with self._lock:
            while self._in_flight and self._error is None:
                self._lock.wait(1.0)
            self._raise_error()

    def close(self) -> None:
        """End the threads after their current pieces."""
        self._error = self._error or RuntimeError("the assembler is closed")
        self._caller.stop()
        for _ in range(self._limits.num_threads):
            self._to_send.put(None)

    def _call(self, call: Callable[[], None]) -> None:
        """Run a call in a thread of its own, and raise its error, or the exception of a signal."""
        self._caller.submit(call)
        wait_for_threads([self._caller], self._set_error)
        if self._caller.errors:
            raise self._caller.errors.pop()

    def _set_error(self, error: BaseException) -> None:
        # Without the lock: the main thread calls it. A reader sees the old or the new value.
        self._error = self._error or error

    # Pieces

    def _num_complete(self, file: int) -> int:
        number = self._next_open[file]
        while number and (file, number - 1) not in self._complete:
            number -= 1
        return number

    def _write_copy(self, copy: StridedCopy, packed: ByteArray) -> None:
        run_nbytes = copy.run_nbytes
        last_offset = sum((count - 1) * stride for count, stride in copy.repeats)
        stop = copy.file_offset + last_offset + run_nbytes
        number = copy.file_offset // self._limits.piece_nbytes
        if (stop - 1) // self._limits.piece_nbytes == number:
            piece = self._find_piece(copy.file, number)
            if piece is not None:
                # All runs are in one piece: one strided view of it.
                counts = [count for count, _ in copy.repeats]
                strides = [stride for _, stride in copy.repeats]
                view = np.lib.stride_tricks.as_strided(
                    piece.data[copy.file_offset - piece.start :],
                    (*counts, run_nbytes),
                    (*strides, 1),
                )
                view[...] = packed.reshape(view.shape)
                self._count_bytes(piece, copy.nbytes)
            return
        for position, offset in enumerate(copy.run_offsets()):
            run = packed[position * run_nbytes : (position + 1) * run_nbytes]
            self._write_run(copy.file, offset, run)

    def _write_run(self, file: int, offset: int, run: ByteArray) -> None:
        """Write a run into one or several pieces."""
        done = 0
        while done < run.size:
            number, start = divmod(offset + done, self._limits.piece_nbytes)
            nbytes = min(run.size - done, self._limits.piece_nbytes - start)
            piece = self._find_piece(file, number)
            if piece is not None:
                piece.data[start : start + nbytes] = run[done : done + nbytes]
                self._count_bytes(piece, nbytes)
            done += nbytes

    def _find_piece(self, file: int, number: int) -> Piece | None:
        """Return an open piece, or open it. Return None for a complete piece and for one without memory."""
        key = (file, number)
        if key in self._open:
            return self._open[key]
        if key in self._complete or key in self._missed:
            return None
        if not self._open_piece(file, number):
            return None
        self._open_blank_pieces(file)
        return self._open.get(key)

    def _open_piece(self, file: int, number: int) -> bool:
        """Allocate a piece. If there is no memory for it, mark it as missed."""
        size = self._files[file].size
        start = number * self._limits.piece_nbytes
        nbytes = min(size - start, self._limits.piece_nbytes)
        is_split = self.piece_count(file) > 1
        # The pieces of an object are sent in order. One that is opened too early would hold its
        # memory until the pieces before it are assembled in a later pass.
        is_next = number == self._next_open[file]
        has_slot = (
            not is_split
            or file in self._split_files
            or len(self._split_files) < self._limits.split_files
        )
        if not is_next or not has_slot or not self._acquire(nbytes):
            self._missed.add((file, number))
            return False
        if is_split:
            with self._lock:
                self._split_files.add(file)
        data = allocate_buffer(max(1, nbytes))[:nbytes]
        for offset, constant in ((0, self._files[file].header), *self._files[file].constant_ranges):
            # The common bytes of the constant and the piece
            low = max(start, offset)
            high = min(start + nbytes, offset + len(constant))
            if low < high:
                common = constant[low - offset : high - offset]
                data[low - start : high - start] = np.frombuffer(common, np.uint8)
        missing_nbytes = sum(_overlaps(self._spans.get(file, ()), start, start + nbytes))
        piece = Piece(file, number, start, data, missing_nbytes)
        self._open[file, number] = piece
        self._next_open[file] = number + 1
        self._count_bytes(piece, 0)
        return True

    def _open_blank_pieces(self, file: int) -> None:
        """Open the next pieces of an object without bytes of streams, e.g. the end of a long header."""
        while (number := self._next_open[file]) < self.piece_count(file):
            start = number * self._limits.piece_nbytes
            spans = self._spans.get(file, ())
            if any(_overlaps(spans, start, start + self._limits.piece_nbytes)):
                return
            if (file, number) in self._missed or not self._open_piece(file, number):
                return

    def _count_bytes(self, piece: Piece, nbytes: int) -> None:
        """Count written bytes of a piece, and send the piece if it is complete."""
        piece.missing_nbytes -= nbytes
        if piece.missing_nbytes:
            return
        key = (piece.file, piece.number)
        del self._open[key]
        self._complete.add(key)
        with self._lock:
            self._waiting[key] = piece
            self._submit_next(piece.file)

    # Sending

    def _acquire(self, nbytes: int) -> bool:
        """Wait for memory while pieces are in flight. Return whether there is enough."""
        with self._lock:
            while True:
                self._raise_error()
                if self._used_nbytes + nbytes <= self._limits.total_nbytes:
                    self._used_nbytes += nbytes
                    return True
                if not self._in_flight:
                    return False
                # A time limit, because the main thread sets an error without notifying.
                self._lock.wait(1.0)

    def _submit_next(self, file: int) -> None:
        """Submit the next piece of an object if it is complete. The lock is held."""
        piece = self._waiting.pop((file, self._next_send[file]), None)
        if piece is None:
            return
        self._on_complete(piece)
        self._in_flight += 1
        self._to_send.put(piece)

    def _send_pieces(self) -> None:
        while (piece := self._to_send.get()) is not None:
            self._send_piece(piece)

    def _send_piece(self, piece: Piece) -> None:
        error = self._error
        try:
            # After an error, pieces in the queue only release their memory.
            if error is None:
                self._send(piece)
        except BaseException as raised:
            error = raised
        nbytes = piece.data.size
        piece.data = np.empty(0, np.uint8)
        with self._lock:
            self._error = self._error or error
            self._in_flight -= 1
            self._used_nbytes -= nbytes
            self._next_send[piece.file] = piece.number + 1
            if piece.number + 1 == self.piece_count(piece.file):
                self._split_files.discard(piece.file)
            elif self._error is None:
                self._submit_next(piece.file)
            self._lock.notify_all()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error


def _overlaps(spans: Spans, start: int, stop: int) -> Iterator[int]:
    """Yield the number of bytes of each span inside a range."""
    first = max(0, bisect.bisect_right(spans, (start, start)) - 1)
    for low, high in spans[first:]:
        if low >= stop:
            return
        nbytes = min(high, stop) - max(low, start)
        if nbytes > 0:
            yield nbytes


def make_object_budget(
    nbytes: int,
    *,
    min_buffer_nbytes: int,
    kept_nbytes: int,
    object_nbytes: int,
    largest_nbytes: int,
    part_nbytes: int,
    num_compressing: int = 0,
) -> tuple[Budget, PieceLimits]:
    """Divide a memory limit.

    Args:
        nbytes: The limit.
        min_buffer_nbytes: Preferred minimum size of a slab.
        kept_nbytes: Memory for data of the whole run. See `make_budget`.
        object_nbytes: Usual size of an object. If possible, a piece is not smaller.
        largest_nbytes: Size of the largest object.
        part_nbytes: Size of a part of its multipart upload.
        num_compressing: Number of threads with a compressor each. 0 without compression. Each piece then has a
            compressed copy while it is sent, and each split object keeps a compressor.

    Returns:
        The budget of the pipeline, and the limits of the pieces.

    Raises:
        UsageError: The limit is too small.
    """
    # This also checks that the limit is large enough for the kept data.
    make_budget(nbytes, kept_nbytes=kept_nbytes)
    reserved_nbytes = bookkeeping_nbytes(nbytes)
    usable_nbytes = nbytes - reserved_nbytes - max(0, kept_nbytes - reserved_nbytes // 4)
    # Two thirds for objects: 512 MiB have 298 MiB of pieces and 4 buffers of 32 MiB, 32 MiB have 16 MiB
    # of pieces and 4 buffers of 2 MiB.
    pieces_nbytes = usable_nbytes * 2 // 3
    buffers_nbytes = usable_nbytes - pieces_nbytes
    slab_nbytes = _slab_nbytes(buffers_nbytes // MIN_BUFFERS)
    if slab_nbytes < min_buffer_nbytes <= _slab_nbytes(buffers_nbytes // 2):
        slab_nbytes = -(-min_buffer_nbytes // PAGE) * PAGE
    buffer_count = min(MAX_BUFFERS, buffers_nbytes // (slab_nbytes + 2 * PAGE))
    budget = Budget(nbytes - pieces_nbytes, slab_nbytes, buffer_count)
    if num_compressing:
        # The other half is for the copies.
        pieces_nbytes //= 2
    piece_nbytes = min(MAX_PIECE_NBYTES, max(object_nbytes, pieces_nbytes // 4))
    if piece_nbytes <= pieces_nbytes and largest_nbytes <= piece_nbytes:
        return budget, PieceLimits(pieces_nbytes, piece_nbytes, num_threads=MAX_SENDING_THREADS)
    # A multipart upload has one part in memory that is filled, and the parts that are sent.
    max_parts = pieces_nbytes // 4 // part_nbytes
    parts_in_flight = max(1, min(MAX_PARTS_IN_FLIGHT, max_parts - 1))
    split_files = max(1, max_parts // (1 + parts_in_flight))
    if num_compressing:
        split_files = min(split_files, num_compressing)
    pieces_nbytes -= split_files * (1 + parts_in_flight) * part_nbytes
    # At least two pieces, so that one is assembled while another one is sent.
    piece_nbytes = max(MIN_PIECE_NBYTES, min(piece_nbytes, pieces_nbytes // 2))
    limits = PieceLimits(
        max(pieces_nbytes, piece_nbytes), piece_nbytes, split_files, parts_in_flight
    )
    return budget, limits


def _slab_nbytes(buffer_nbytes: int) -> int:
    """Return the largest slab for a buffer. A buffer is two pages longer."""
    return min(MAX_SLAB_NBYTES, (buffer_nbytes - 2 * PAGE) // PAGE * PAGE)
