"""Permute the bytes of a slab between the tensor's order and the file's order.

Strided copies are NumPy assignments, tiled for the caches and split over threads.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator
from concurrent.futures import Executor

import numpy as np

from prepcli.algebra.strided_copies import StridedCopy
from prepcli.planning.slabs import PAGE, Slab
from prepcli.stores.buffers import ByteArray

# A source tile and a target tile fit the L2 cache together.
TILE_NBYTES = 128 << 10
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

    A transpose is copied in square tiles. Arrays with the same contiguous axis are copied in one assignment.
    """
    # Row by row, a transpose touches a new cache line for every element of one side. A square tile of
    # both sides stays in the L2 cache until all elements of its lines are used.
    axes = (_contiguous_axis(target), _contiguous_axis(source))
    if None in axes or axes[0] == axes[1] or target.itemsize >= PAGE:
        target[...] = source
        return
    side = max(1, math.isqrt(TILE_NBYTES // target.itemsize))
    steps = list(target.shape)
    for axis in axes:
        if axis is not None:
            steps[axis] = side
    tile_ranges = [range(0, length, step) for length, step in zip(target.shape, steps)]
    for starts in itertools.product(*tile_ranges):
        tile = tuple(slice(start, start + step) for start, step in zip(starts, steps))
        target[tile] = source[tile]


def _contiguous_axis(array: np.ndarray) -> int | None:
    """Return the axis along which elements are contiguous, or None if there is none."""
    for axis, stride in enumerate(array.strides):
        if stride == array.itemsize:
            return axis
    return None


def needs_permute(copies: tuple[StridedCopy, ...]) -> bool:
    """Whether the packed runs of copies differ from the tensor's byte order."""
    return len(copies) > 1 or any(copy.dims for copy in copies)
