"""Reads of boxes of stored arrays into NumPy arrays, by several threads with a buffer each.

A job reads a window: a box of a tensor that is read without the rest of it. The bytes of a window are buffered in C
order of the window's own shape, or read straight into the array that takes them.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from prepcli.algebra.axis_map import AxisMap
from prepcli.algebra.boxes import Box, full_box, strides, volume
from prepcli.algebra.strided_copies import LeafBoxPart, StridedCopy, part_copies
from prepcli.core.worker_thread import run_in_threads
from prepcli.engine.blobs import FilesAndBlobs
from prepcli.engine.budget import Budget, BufferPool
from prepcli.engine.files import PAGE, Files
from prepcli.engine.fills import numpy_dtype
from prepcli.engine.permute import assign_tiled
from prepcli.planning.arrays import Location, Locations, location_copies
from prepcli.planning.tensors import itemsize
from prepcli.stores.buffers import ByteArray, ClosedAfterBlock

Job = TypeVar("Job")
# Arrays to fill, by their boxes of a leaf
BoxArrays = Mapping[Box, np.ndarray]
# Upper limit of a window, and of one read. Half for a tensor with duplicates.
PIECE_NBYTES = 4 << 20
# Buffer of a thread. One half is for bytes as stored, the other for bytes in the window's order.
BUFFER_NBYTES = 2 * (PIECE_NBYTES + 2 * PAGE)
# Bytes of shorter gaps between runs are read too, which is faster.
MIN_GAP_NBYTES = 32 << 10


class StoppedReadsError(Exception):
    """Reads were stopped before their end, so their arrays must not be used."""


class UnequalDuplicateError(Exception):
    """A window of a tensor differs from the same window of its duplicate number `number`."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@dataclass(frozen=True, slots=True)
class Target:
    """An array, partly filled by a tensor.

    Attributes:
        axis_map: Maps the tensor's elements to the leaf's.
        part: The tensor's part of the array's box of the leaf.
        array: The array, in C order.
    """

    axis_map: AxisMap
    part: LeafBoxPart
    array: np.ndarray

    def fill(self, window: Box, values: np.ndarray) -> None:
        """Copy the elements of a window, given in C order, to the array."""
        flat_array = self.array.reshape(-1)
        for copy in part_copies(self.axis_map, self.part, window=window):
            counts, tensor_steps, array_steps = _copy_loops(copy, copy.width, 1)
            source = _strided_view(values, copy.tensor_offset, counts, tensor_steps)
            target = _strided_view(flat_array, copy.file_offset, counts, array_steps)
            assign_tiled(target, source)


@dataclass(frozen=True, slots=True)
class WindowRead:
    """A window of a tensor to read.

    Attributes:
        name: Name of the tensor.
        dtype: Its dtype.
        locations: Where it is stored.
        window: The box to read.
        targets: The arrays to fill.
        min_gap_nbytes: Shorter gaps between two runs of the window are read too.
        duplicates: Where tensors with equal bytes are stored.
    """

    name: str
    dtype: str
    locations: Locations
    window: Box
    targets: Sequence[Target]
    min_gap_nbytes: int
    duplicates: Sequence[Locations] = ()

    @property
    def nbytes(self) -> int:
        """Size of the window in bytes."""
        return volume(self.window) * itemsize(self.dtype)

    def fill(self, data: ByteArray) -> None:
        """Copy the bytes of the window to all targets."""
        values = data.view(numpy_dtype(self.dtype))
        for target in self.targets:
            target.fill(self.window, values)


class BoxReader(ClosedAfterBlock):
    """Open files, and threads with buffers for reads of windows. Several threads may read at once.

    Attributes:
        read_nbytes: Bytes read so far.
    """

    def __init__(
        self, files: Files | FilesAndBlobs, *, num_threads: int, is_remote: bool = False
    ) -> None:
        """Take the files, and allocate no buffer before the first read. The files are closed with the reader."""
        self.read_nbytes = 0
        self.is_remote = is_remote
        self._files = files
        self._num_threads = num_threads
        self._buffers = BufferPool(Budget(num_threads * BUFFER_NBYTES, BUFFER_NBYTES, num_threads))
        self._count_lock = threading.Lock()
        self._is_stopped = False
        # Closes the files also if a caller drops the reader without `close`.
        self._finalizer = weakref.finalize(self, files.close)

    def close(self) -> None:
        """Close the files."""
        self._finalizer()

    def stop_reads(self) -> None:
        """Drop the remaining requests of all reads. They raise StoppedReadsError, and so do later reads."""
        self._is_stopped = True

    def run_reads(
        self, jobs: Iterator[Job], run: Callable[[Job, ByteArray], int]
    ) -> list[BaseException]:
        """Run the jobs of a read in threads, and count the bytes that `run` returns. Return the errors: `run_jobs`."""

        def run_and_count(job: Job, buffer: ByteArray) -> None:
            nbytes = run(job, buffer)
            # `+=` of an attribute is not atomic between threads.
            with self._count_lock:
                self.read_nbytes += nbytes

        return run_jobs(
            jobs,
            run_and_count,
            self._buffers,
            self._num_threads,
            is_stopped=lambda: self._is_stopped,
        )

    def read_window(
        self,
        read: WindowRead,
        buffer: ByteArray,
        check: Callable[[WindowRead, ByteArray], None] | None = None,
    ) -> int:
        """Read a window of at most PIECE_NBYTES, compare it with its duplicates, and copy it to its targets.

        Raises:
            UnequalDuplicateError: A duplicate differs. The arrays must not be used then.
        """
        direct = self._direct_target(read)
        if direct is not None:
            run, target = direct
            self._files.read_at(run.file, run.file_offset, target)
            if check is not None:
                check(read, target)
            return run.width
        other_buffer = buffer
        if read.duplicates:
            # The window's bytes must survive the read of the duplicate.
            buffer, other_buffer = split_buffer(buffer)
        data, read_nbytes = self._read_box(read, read.locations, buffer)
        if check is not None:
            check(read, data)
        for number, locations in enumerate(read.duplicates):
            other, nbytes = self._read_box(read, locations, other_buffer)
            read_nbytes += nbytes
            if not np.array_equal(data, other):
                raise UnequalDuplicateError(number)
        read.fill(data)
        return read_nbytes

    def _direct_target(self, read: WindowRead) -> tuple[StridedCopy, ByteArray] | None:
        """Return the run of a window in a file and the bytes of its array, if it can be read without a copy.

        This is the common case: each chunk is one shard of the mesh.
        """
        target, *others = read.targets
        if others or read.duplicates or target.array.dtype != numpy_dtype(read.dtype):
            return None
        copies = part_copies(target.axis_map, target.part, window=read.window)
        first, *rest = [*itertools.islice(copies, 2)] or [None]
        # The elements of the window may be apart in the array, or not all in it.
        if first is None or rest or first.dims or first.width != volume(read.window):
            return None
        elements = target.array.reshape(-1)
        into = elements[first.file_offset : first.file_offset + first.width].view(np.uint8)
        run = next(location_copies(read.locations, read.window, read.window))
        # Direct I/O needs the address and the offset in the file to agree modulo PAGE.
        alignment = 1 if self.is_remote else PAGE
        is_aligned = (into.ctypes.data - run.file_offset) % alignment == 0
        return (run, into) if is_aligned and run.width == read.nbytes else None

    def _read_box(
        self, read: WindowRead, locations: Locations, buffer: ByteArray
    ) -> tuple[ByteArray, int]:
        """Return the bytes of a window in C order, within `buffer`, and the number of bytes read for it."""
        read_nbytes = 0
        read_buffer, ordered = split_buffer(buffer)
        data = ordered[: read.nbytes]
        # A run may start anywhere in its first page, so a page of the buffer is kept for alignment.
        max_nbytes = read_buffer.size - PAGE
        for copy in location_copies(locations, read.window, read.window):
            for span in split_into_spans(copy, max_nbytes, read.min_gap_nbytes):
                nbytes = span_nbytes(span)
                run = StridedCopy(0, span.file, span.file_offset, nbytes)
                stored = self._files.read_run(run, read_buffer)
                read_nbytes += nbytes
                # One contiguous run is the whole window: no copy to C order.
                if span.width == data.size:
                    data = stored
                else:
                    # Elements of equal bytes may be copied as unsigned integers, the widest that divide the span.
                    width = next((nbytes for nbytes in (8, 4, 2) if span.width % nbytes == 0), 1)
                    counts, tensor_strides, file_strides = _copy_loops(
                        span, span.width // width, width
                    )
                    source = np.ndarray(counts, f"u{width}", stored, 0, file_strides)
                    target = np.ndarray(
                        counts, f"u{width}", data, span.tensor_offset, tensor_strides
                    )
                    assign_tiled(target, source)
        return data, read_nbytes


def run_jobs(
    jobs: Iterator[Job],
    run: Callable[[Job, ByteArray], None],
    buffers: BufferPool,
    num_threads: int,
    *,
    is_stopped: Callable[[], bool] = lambda: False,
) -> list[BaseException]:
    """Run jobs in threads until there are none left. After an error the remaining jobs are dropped.

    `is_stopped` is asked before each job.

    Returns:
        The exceptions of signals, and then the exceptions of the jobs. Stopped jobs are an exception too.
    """
    # The read of a small leaf has one job. The start of a thread without a job would take longer than it.
    first_jobs = [*itertools.islice(jobs, num_threads)]
    jobs = itertools.chain(first_jobs, jobs)
    # A generator must not run in two threads at once.
    lock = threading.Lock()

    def next_job() -> Job | None:
        with lock:
            return next(jobs, None)

    def drop_jobs() -> None:
        nonlocal jobs
        with lock:
            jobs = iter(())

    def work() -> None:
        # A thread without a job must not wait for a buffer: other calls may hold all of them.
        job = next_job()
        if job is None:
            return
        (buffer,) = buffers.acquire(1)
        try:
            while job is not None and not is_stopped():
                run(job, buffer)
                job = next_job()
        except BaseException:
            # The arrays of a failed read are not used, so other jobs would be wasted.
            drop_jobs()
            raise
        finally:
            buffers.release([buffer])

    errors = run_in_threads(work, len(first_jobs), on_interruption=drop_jobs)
    if not errors and is_stopped():
        errors.append(StoppedReadsError())
    return errors


def split_buffer(buffer: ByteArray) -> tuple[ByteArray, ByteArray]:
    """Split a buffer into page-aligned halves."""
    half = buffer.size // 2 // PAGE * PAGE
    return buffer[:half], buffer[half : 2 * half]


def _copy_loops(
    copy: StridedCopy, count: int, step: int
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Return the nested loops of a copy as (counts, tensor steps, file steps), outermost loop first.

    The innermost loop copies the contiguous run: `count` times `step`, in the tensor and in the file.
    """
    counts, tensor_steps, file_steps = zip(*copy.dims, (count, step, step))
    return counts, tensor_steps, file_steps


def _strided_view(
    flat: np.ndarray, start: int, shape: tuple[int, ...], steps: tuple[int, ...]
) -> np.ndarray:
    byte_steps = [step * flat.itemsize for step in steps]
    return np.ndarray(shape, flat.dtype, flat, start * flat.itemsize, byte_steps)


def file_strides(
    locations: Sequence[Location], shape: Sequence[int], item_nbytes: int
) -> tuple[int, ...]:
    """Return the bytes in the file from one index to the next, along each axis of a tensor.

    A float32 tensor [2, 3] in C order has (12, 4). If an axis has several distances, e.g. within a chunk and between
    chunks, the largest one is returned.
    """
    copies = location_copies(locations, full_box(shape))
    first = next(copies, StridedCopy(0, 0, 0, item_nbytes))
    tensor_strides = strides(shape, item_nbytes)
    result = list(tensor_strides)
    for axis, tensor_stride in enumerate(tensor_strides):
        # A loop belongs to this axis if its steps stay inside one index of the axis before it.
        stop_stride = tensor_stride * max(2, shape[axis])
        largest_stride = 0
        for _, loop_stride, file_stride in first.dims:
            if tensor_stride <= loop_stride < stop_stride:
                largest_stride = max(largest_stride, file_stride)
        if largest_stride:
            result[axis] = largest_stride
    return tuple(result)


def merge_windows(
    windows: Sequence[Box], axis_strides: Sequence[int], min_gap_nbytes: int
) -> list[Box]:
    """Merge windows if the box around them has no other elements, or only elements in short gaps of the file.

    Windows of rows 0 to 2 and 2 to 5 become rows 0 to 5.

    Returns:
        Boxes that cover the windows.
    """
    merged: list[Box] = []
    for window in windows:
        box = window
        # The joined box may touch boxes before it.
        others = iter(merged)
        while (other := next(others, None)) is not None:
            if _is_mergeable(box, other, axis_strides, min_gap_nbytes):
                merged.remove(other)
                box = _union_box(box, other)
                others = iter(merged)
        merged.append(box)
    return merged


def _union_box(a: Box, b: Box) -> Box:
    return tuple((min(x[0], y[0]), max(x[1], y[1])) for x, y in zip(a, b))


def _is_mergeable(a: Box, b: Box, axis_strides: Sequence[int], min_gap_nbytes: int) -> bool:
    if volume(_union_box(a, b)) <= max(volume(a), volume(b)):
        return True  # one contains the other
    # The union of two boxes that differ along only one axis is a box, apart from the gap between them.
    different = [axis for axis in range(len(a)) if a[axis] != b[axis]]
    if len(different) != 1:
        return False
    (axis,) = different
    gap = max(a[axis][0], b[axis][0]) - min(a[axis][1], b[axis][1])
    return gap <= 0 or gap * axis_strides[axis] < min_gap_nbytes


def split_window(window: Box, axis_strides: Sequence[int], max_volume: int) -> Iterator[Box]:
    """Split a window into windows of at most `max_volume` elements, in the order of their bytes in the file."""
    # The axes closest together in the file are kept whole first, so that each part has few long runs of bytes.
    # E.g. window [4, 6] in C order and 8 elements: lengths 1 and 6, as 8 // 6 leaves 1 for axis 0.
    axes = sorted(range(len(window)), key=lambda axis: -axis_strides[axis])
    lengths = [stop - start for start, stop in window]
    remaining = max_volume
    for axis in reversed(axes):
        lengths[axis] = max(1, min(lengths[axis], remaining))
        remaining //= lengths[axis]
    ranges = [range(*window[axis], lengths[axis]) for axis in axes]
    for starts in itertools.product(*ranges):
        box = list(window)
        for axis, start in zip(axes, starts):
            box[axis] = (start, min(start + lengths[axis], window[axis][1]))
        yield tuple(box)


def span_nbytes(copy: StridedCopy) -> int:
    """Return the number of bytes in the file from a copy's first byte to its last, gaps included."""
    return copy.width + sum((count - 1) * file_stride for count, _, file_stride in copy.dims)


def split_into_spans(
    copy: StridedCopy, max_nbytes: int, min_gap_nbytes: int
) -> Iterator[StridedCopy]:
    """Split a copy into copies with one read each. A read includes short gaps of the file."""
    # `inner` is the span of the loops from `number` on. They are read at once, with their gaps.
    inner = copy.width
    number = len(copy.dims)
    while number and copy.dims[number - 1][2] - inner < min_gap_nbytes:
        count, _, file_stride = copy.dims[number - 1]
        span = (count - 1) * file_stride + inner
        if span > max_nbytes:
            break
        inner = span
        number -= 1
    if not number:
        yield copy
        return
    # The next loop is too long to read at once, or has long gaps. `group` of its steps are read together.
    *outer_dims, (count, tensor_stride, file_stride) = copy.dims[:number]
    inner_dims = copy.dims[number:]
    group = 1
    if file_stride - inner < min_gap_nbytes:
        group = max(1, (max_nbytes - inner) // file_stride + 1)
    index_ranges = [range(outer_count) for outer_count, _, _ in outer_dims]
    for *outer_indices, first in itertools.product(*index_ranges, range(0, count, group)):
        tensor_offset = copy.tensor_offset + first * tensor_stride
        file_offset = copy.file_offset + first * file_stride
        for index, (_, outer_tensor_stride, outer_file_stride) in zip(outer_indices, outer_dims):
            tensor_offset += index * outer_tensor_stride
            file_offset += index * outer_file_stride
        dims = inner_dims
        num_steps = min(group, count - first)
        if num_steps > 1:
            dims = ((num_steps, tensor_stride, file_stride), *inner_dims)
        yield replace(copy, tensor_offset=tensor_offset, file_offset=file_offset, dims=dims)
