"""Reads of tensors into boxes of leaves. A box has one range of indices per dim.

A job reads a window (a box of a tensor), or a whole tensor with a check of its digests.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from prepcli.algebra.axis_map import AxisMap
from prepcli.algebra.boxes import Box, Range, full_box, split_merged_range, volume
from prepcli.algebra.strided_copies import LeafBoxPart, StridedCopy, part_copies, tensor_box
from prepcli.engine.blobs import FilesAndBlobs
from prepcli.engine.files import PAGE, Files
from prepcli.engine.fills import numpy_dtype
from prepcli.engine.permute import assign_tiled
from prepcli.engine.stream_values import read_values
from prepcli.formats.manifest import RECREATE_HINT
from prepcli.planning.arrays import location_copies
from prepcli.planning.plan import Stream
from prepcli.planning.tensors import itemsize
from prepcli.planning.windows import (
    file_strides,
    merge_windows,
    span_nbytes,
    split_into_spans,
    split_window,
)
from prepcli.restore.digest_checks import damaged_error
from prepcli.sources.source import Source, SourceTensor
from prepcli.stores.buffers import ByteArray

# Upper limit of a window, and of one read. Half for a tensor with duplicates.
PIECE_NBYTES = 4 << 20
# Buffer of a thread. One half is for bytes as stored, the other for bytes in the tensor's order.
BUFFER_NBYTES = 2 * (PIECE_NBYTES + 2 * PAGE)


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


def _copy_loops(
    copy: StridedCopy, count: int, step: int
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Return the nested loops of a copy as (counts, tensor steps, file steps), outermost loop first.

    Args:
        copy: The copy. Its `dims` are the outer loops.
        count: Number of iterations of the innermost loop. It copies the contiguous run.
        step: Its step, in the tensor and in the file.
    """
    counts, tensor_steps, file_steps = zip(*copy.dims, (count, step, step))
    return counts, tensor_steps, file_steps


@dataclass(frozen=True, slots=True)
class TensorRead:
    """A read of a tensor.

    Attributes:
        tensor: The tensor.
        targets: Its arrays to fill.
        window: The box to read. None reads the whole tensor and compares it with its digests.
        duplicates: Tensors with equal bytes in the window.
    """

    tensor: SourceTensor
    targets: Sequence[Target]
    window: Box | None = None
    duplicates: Sequence[SourceTensor] = ()


class UnequalDuplicateError(Exception):
    """A window of a tensor differs from the same window of a duplicate tensor.

    Attributes:
        duplicate_tensor: The duplicate tensor.
    """

    def __init__(self, duplicate_tensor: SourceTensor) -> None:
        super().__init__(duplicate_tensor.name)
        self.duplicate_tensor = duplicate_tensor


def tensor_jobs(
    tensor: SourceTensor,
    targets: Sequence[Target],
    *,
    duplicates: Sequence[SourceTensor] = (),
    is_checked: bool,
    min_skipped_gap_nbytes: int,
) -> Iterator[TensorRead]:
    """Yield the jobs of copying a tensor's elements to the targets.

    Each job reads one window (a box of the tensor). Together the windows cover the elements that the targets
    need. With a check there is one job for the whole tensor.

    Args:
        tensor: The tensor.
        targets: The arrays to fill.
        duplicates: Other tensors with equal values. Each job compares their bytes in its window.
        is_checked: Read the whole tensor and compare it with its digests, if it has any.
        min_skipped_gap_nbytes: Shorter gaps between two runs (contiguous byte ranges) of a window are read too.
    """
    if is_checked and tensor.digests:
        yield TensorRead(tensor, targets)
        return
    item_nbytes = itemsize(tensor.dtype)
    axis_strides = file_strides(tensor.placement, tensor.shape, item_nbytes)
    # With duplicates, a window and the same window of the duplicate share one buffer.
    piece_nbytes = PIECE_NBYTES // 2 if duplicates else PIECE_NBYTES
    boxes = [tensor_box(target.axis_map, target.part.atom_ranges) for target in targets]
    for window in merge_windows(boxes, axis_strides, min_skipped_gap_nbytes):
        for piece in split_window(window, axis_strides, piece_nbytes // item_nbytes):
            yield TensorRead(tensor, targets, piece, duplicates)


def read_window(
    job: TensorRead,
    window: Box,
    files: Files | FilesAndBlobs,
    buffer: ByteArray,
    *,
    min_skipped_gap_nbytes: int,
) -> int:
    """Read a window of at most PIECE_NBYTES, compare it with its duplicates, and copy it to the targets.

    Args:
        job: The job.
        window: Its window.
        files: Reader of the source's files.
        buffer: Page-aligned buffer of BUFFER_NBYTES.
        min_skipped_gap_nbytes: Shorter gaps between two runs of the window are read too.

    Returns:
        The number of bytes read.

    Raises:
        UnequalDuplicateError: A duplicate differs. The arrays must not be used then.
    """
    other_buffer = buffer
    if job.duplicates:
        # The window's bytes must survive the read of the duplicate.
        buffer, other_buffer = _split_buffer(buffer)
    data, read_nbytes = _read_box(
        job.tensor, window, files, buffer=buffer, min_skipped_gap_nbytes=min_skipped_gap_nbytes
    )
    for duplicate in job.duplicates:
        other, nbytes = _read_box(
            duplicate,
            window,
            files,
            buffer=other_buffer,
            min_skipped_gap_nbytes=min_skipped_gap_nbytes,
        )
        read_nbytes += nbytes
        if not np.array_equal(data, other):
            raise UnequalDuplicateError(duplicate)
    for target in job.targets:
        target.fill(window, data.view(numpy_dtype(job.tensor.dtype)))
    return read_nbytes


def _read_box(
    tensor: SourceTensor,
    window: Box,
    files: Files | FilesAndBlobs,
    *,
    buffer: ByteArray,
    min_skipped_gap_nbytes: int,
) -> tuple[ByteArray, int]:
    """Return the bytes of a window of a tensor in C order, within `buffer`, and the number of bytes read for it."""
    read_nbytes = 0
    item_nbytes = itemsize(tensor.dtype)
    read_buffer, ordered = _split_buffer(buffer)
    data = ordered[: volume(window) * item_nbytes]
    # A run may start anywhere in its first page, so a page of the buffer is kept for alignment.
    max_nbytes = read_buffer.size - PAGE
    copies = location_copies(tensor.placement, window, window)
    for copy in copies:
        for span in split_into_spans(
            copy, max_nbytes=max_nbytes, min_skipped_gap_nbytes=min_skipped_gap_nbytes
        ):
            nbytes = span_nbytes(span)
            run = StridedCopy(0, span.file, span.file_offset, nbytes)
            stored = files.read_run(run, read_buffer)
            read_nbytes += nbytes
            # One contiguous run is the whole window: no copy to C order.
            if span.width == data.size:
                data = stored
            else:
                _copy_span(span, stored, data)
    return data, read_nbytes


def read_checked(
    job: TensorRead, source: Source, files: Files | FilesAndBlobs, buffer: ByteArray
) -> int:
    """Read a whole tensor in C order, copy its parts to the targets, and compare it with its digests.

    Args:
        job: The job.
        source: The checkpoint, for the error.
        files: Reader of the source's files.
        buffer: Page-aligned buffer of BUFFER_NBYTES.

    Returns:
        The number of bytes read.

    Raises:
        DamagedError: The bytes differ from a digest. The arrays must not be used then.
    """
    tensor = job.tensor
    dtype = numpy_dtype(tensor.dtype)
    read_half, ordered_half = _split_buffer(buffer)
    buffers = (read_half[:PIECE_NBYTES], ordered_half[:PIECE_NBYTES])
    for rows, digest in _digested_rows(tensor):
        state = xxhash.xxh3_128()
        stream = Stream(tensor.name, tensor.dtype, tensor.shape, rows, tensor.placement, ())
        for start, run in read_values(files, stream, buffers=buffers):
            state.update(run.data)
            # The run is a range of the flat tensor. The windows are the boxes of this range, in C order.
            values = run.view(dtype)
            first = start // dtype.itemsize
            windows: Iterable[Box] = ((),)
            if tensor.shape:
                windows = split_merged_range((first, first + values.size), tensor.shape)
            filled = 0
            for window in windows:
                count = volume(window)
                for target in job.targets:
                    target.fill(window, values[filled : filled + count])
                filled += count
        if digest and state.hexdigest() != digest:
            raise damaged_error(source, tensor, RECREATE_HINT)
    return tensor.nbytes


def _digested_rows(tensor: SourceTensor) -> Iterator[tuple[Range, str]]:
    """Yield consecutive row ranges of a tensor, each with its digest, or an empty text without one."""
    (row, stop), *_ = full_box(tensor.shape) or ((0, 1),)
    for low, high, digest in sorted(tensor.digests):
        if row < low:
            yield (row, low), ""
        yield (low, high), digest
        row = high
    if row < stop:
        yield (row, stop), ""


def _split_buffer(buffer: ByteArray) -> tuple[ByteArray, ByteArray]:
    """Split a buffer into page-aligned halves."""
    half = buffer.size // 2 // PAGE * PAGE
    return buffer[:half], buffer[half : 2 * half]


def _copy_span(span: StridedCopy, stored: ByteArray, window: ByteArray) -> None:
    """Copy the elements of a span from its bytes in the file to the bytes of a window."""
    # Elements of equal bytes may be copied as unsigned integers, the widest that divide the span.
    width = next((nbytes for nbytes in (8, 4, 2) if span.width % nbytes == 0), 1)
    counts, tensor_strides, file_strides = _copy_loops(span, span.width // width, width)
    source = np.ndarray(counts, f"u{width}", stored, 0, file_strides)
    target = np.ndarray(counts, f"u{width}", window, span.tensor_offset, tensor_strides)
    assign_tiled(target, source)


def _strided_view(
    flat: np.ndarray, start: int, shape: tuple[int, ...], steps: tuple[int, ...]
) -> np.ndarray:
    item_nbytes = flat.itemsize
    byte_steps = [step * item_nbytes for step in steps]
    return np.ndarray(shape, flat.dtype, flat, start * item_nbytes, byte_steps)
