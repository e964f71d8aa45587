"""Permute the bytes of a slab between the tensor's order and the file's order.

Strided copies are NumPy assignments, tiled for the caches and split over threads.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor

import numpy as np

from prepcli.algebra.strided_copies import StridedCopy
from prepcli.planning.slabs import Slab
from prepcli.stores.buffers import ByteArray

# About the size of an L2 cache. Smaller tiles are faster in one thread, but several threads wait for the interpreter
# lock between tiles.
TILE_NBYTES = 1 << 20
# The cache lines of a column of a tile fit the L1 cache.
MAX_COLUMN_LENGTH = 128
# Elements of this size use whole cache lines in any order.
CACHE_LINE = 64  # bytes
# The L1 cache has a place for each line of so many consecutive bytes, 8 times (x86-64 and most ARM processors).
L1_WAY_NBYTES = 4096
L1_WAYS = 8
# Smaller parts are not worth a thread.
MIN_PART_NBYTES = 2 << 20
# A few threads saturate the memory bandwidth.
MAX_THREADS = 4
UNSIGNED_DTYPES = {1: "u1", 2: "u2", 4: "u4", 8: "u8"}
Assignment = tuple[np.ndarray, np.ndarray]  # target, source


def gather(
    slab: Slab, tensor: ByteArray, *, out: ByteArray, pool: Executor | None = None
) -> ByteArray:
    """Permute values from the order of their tensor to the order of the output.

    The runs of bytes for one place of the output become contiguous.

    Args:
        slab: A part of a tensor, copied at once, and its places in the output.
        tensor: Its bytes in the tensor's order, in the written dtype.
        out: Buffer of at least the same size.
        pool: Threads for the work, or None to use the calling thread.

    Returns:
        The filled part of `out`.
    """
    assignments: list[Assignment] = []
    filled = 0
    for copy in slab.writes:
        packed, spread = _copy_views(copy, out[filled:], tensor, slab.written_start)
        assignments.append((packed, spread))
        filled += copy.nbytes
    _assign_all(assignments, pool)
    return out[:filled]


def scatter(
    slab: Slab, runs: ByteArray, *, out: ByteArray, pool: Executor | None = None
) -> ByteArray:
    """Permute a slab from the packed runs of its read copies to the tensor's order.

    Args:
        slab: The slab.
        runs: The runs of its read copies, one after another.
        out: Buffer of the same size.
        pool: Threads for the work, or None to use the calling thread.

    Returns:
        `out`.
    """
    assignments: list[Assignment] = []
    consumed = 0
    for copy in slab.reads:
        packed, spread = _copy_views(copy, runs[consumed:], out, slab.start)
        assignments.append((spread, packed))
        consumed += copy.nbytes
    _assign_all(assignments, pool)
    return out


def threads() -> int:
    """Return the best number of threads for a `pool` on this machine."""
    return min(MAX_THREADS, len(os.sched_getaffinity(0)))


def _copy_views(copy: StridedCopy, packed: ByteArray, tensor: ByteArray, start: int) -> Assignment:
    """Return a copy's elements as two arrays of the same shape: a view of the packed runs, and a view of the tensor."""
    # The copy of the module `strided_copies`, width 4 and dims (3, 4, 8), (2, 12, 4), has elements of
    # 4 bytes in shape [3, 2]: contiguous in the packed runs, with strides (4, 12) in the tensor.
    width = copy.width
    dims = copy.dims
    if not dims:
        width = 1
        dims = ((copy.width, 1, 1),)
    element_dtype = np.dtype(UNSIGNED_DTYPES.get(width, f"V{width}"))
    shape, tensor_strides, _ = zip(*dims)
    offset = copy.tensor_offset - start
    strided = np.ndarray(shape, element_dtype, tensor, offset, tensor_strides)
    return packed[: copy.nbytes].view(element_dtype).reshape(shape), strided


def _assign_all(assignments: list[Assignment], pool: Executor | None) -> None:
    """Carry out assignments, split over the threads of the pool."""
    parts: list[Assignment] = []
    for target, source in assignments:
        parts += _parts_for_threads(target, source)
    if pool is None or len(parts) < 2:
        for target, source in parts:
            assign_tiled(target, source)
    else:
        targets, sources = zip(*parts)
        # The loop raises the error of a failed assignment.
        for _ in pool.map(assign_tiled, targets, sources):
            pass


def _parts_for_threads(target: np.ndarray, source: np.ndarray) -> Iterator[Assignment]:
    """Split an assignment along its longest axis into about one part per thread."""
    count = min(threads(), target.nbytes // MIN_PART_NBYTES)
    if count < 2:
        yield target, source
        return
    axis = max(range(target.ndim), key=lambda axis: target.shape[axis])
    length = -(-target.shape[axis] // count)
    for start in range(0, target.shape[axis], length):
        index = (*[slice(None)] * axis, slice(start, start + length))
        yield target[index], source[index]


def assign_tiled(target: np.ndarray, source: np.ndarray) -> None:
    """Copy `source` to `target`, an array of the same shape. Values are cast to the target's dtype.

    A transpose is copied in tiles. Arrays with the same contiguous axis are copied in one assignment.
    """
    # Row by row, a transpose touches a new cache line of the source for every element. The lines of a tile stay in
    # the L1 and L2 caches until all of their elements are used.
    target_axis = _contiguous_axis(target)
    source_axis = _contiguous_axis(source)
    is_transpose = target_axis != source_axis and None not in (target_axis, source_axis)
    if target_axis is None or not is_transpose or source.itemsize >= CACHE_LINE:
        target[...] = source
        return
    lengths = _tile_lengths(target, source, target_axis)
    spread: np.ndarray | None = None
    if _share_cache_sets(source.strides[target_axis], lengths[target_axis]):
        spread = _allocate_spread_tile(source, lengths, target_axis)
    tile_ranges = [range(0, length, step) for length, step in zip(source.shape, lengths)]
    for starts in itertools.product(*tile_ranges):
        tile = tuple(slice(start, start + step) for start, step in zip(starts, lengths))
        values = source[tile]
        if spread is not None:
            spread_values = spread[tuple(map(slice, values.shape))]
            spread_values[...] = values
            values = spread_values
        target[tile] = values


def _tile_lengths(target: np.ndarray, source: np.ndarray, target_axis: int) -> list[int]:
    """Return the shape of a tile with long runs in both arrays. Columns are along `target_axis`."""
    # E.g. 4-byte elements, target [64, 4, 32, 512] with strides in this order, source with the order (1, 3, 0, 2). The
    # target's last axis gets 128 indices. The source's axes 2 and 0 get 32 and 64: 64 * 32 * 128 * 4 = 1 MiB.
    lengths = [1] * source.ndim
    for axis in _axes_inside_out(target):
        lengths[axis] = min(target.shape[axis], max(1, MAX_COLUMN_LENGTH // math.prod(lengths)))
    max_count = TILE_NBYTES // source.itemsize
    for axis in _axes_inside_out(source):
        if axis != target_axis:
            most = lengths[axis] * max(1, max_count // math.prod(lengths))
            lengths[axis] = min(source.shape[axis], most)
    return lengths


def _share_cache_sets(stride: int, count: int) -> bool:
    """Return whether `count` cache lines, `stride` bytes apart, evict each other from the L1 cache."""
    # Lines 8,192 bytes apart belong to the same set, which has 8 places. Lines 8,256 bytes apart are spread over all
    # sets.
    set_count = L1_WAY_NBYTES // math.gcd(L1_WAY_NBYTES, stride)
    return count > set_count * L1_WAYS


def _allocate_spread_tile(
    source: np.ndarray, lengths: Sequence[int], column_axis: int
) -> np.ndarray:
    """Allocate a tile in the axis order of the source. The lines of each column are spread over all cache sets."""
    # About TILE_NBYTES for each thread, from the reserve of the memory limit
    strides = [0] * source.ndim
    stride = source.itemsize
    for axis in _axes_inside_out(source):
        if axis == column_axis:
            # An odd number of lines has no common divisor with the number of sets.
            stride = (-(-stride // CACHE_LINE) | 1) * CACHE_LINE
        strides[axis] = stride
        stride *= lengths[axis]
    return np.ndarray(lengths, source.dtype, np.empty(stride, np.uint8), 0, strides)


def _axes_inside_out(array: np.ndarray) -> list[int]:
    """Return the axes of an array by ascending stride."""
    return sorted(range(array.ndim), key=array.strides.__getitem__)


def _contiguous_axis(array: np.ndarray) -> int | None:
    """Return the axis along which elements are contiguous, or None if there is none."""
    for axis, stride in enumerate(array.strides):
        if stride == array.itemsize:
            return axis
    return None


def needs_permute(copies: tuple[StridedCopy, ...]) -> bool:
    """Whether the packed runs of copies differ from the tensor's byte order."""
    return len(copies) > 1 or any(copy.dims for copy in copies)
