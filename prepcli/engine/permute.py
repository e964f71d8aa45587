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

from prepcli.engine.files import ByteArray
from prepcli.planning.slabs import PAGE, Slab
from prepcli.planning.strided_copies import StridedCopy

TILE_NBYTES = 128 << 10  # a source tile and a target tile fit the L2 cache together
MIN_PART_NBYTES = 2 << 20  # smaller parts are not worth a thread
MAX_THREADS = 4  # a few threads saturate the memory bandwidth
UNSIGNED_DTYPES = {1: "u1", 2: "u2", 4: "u4", 8: "u8"}
Assignment = tuple[np.ndarray, np.ndarray]  # target, source


def gather(slab: Slab, tensor: ByteArray, *, out: ByteArray, pool: Executor | None = None) -> ByteArray:
    """Permute a slab from the tensor's order to the packed runs of its write copies.

    Args:
        slab: The slab.
        tensor: Its bytes in the tensor's order, in the written dtype.
        out: Buffer of at least the same size.
        pool: Threads that share the work; None to use the calling thread.

    Returns:
        The filled part of `out`.
    """
    assignments, filled = [], 0
    for copy in slab.writes:
        packed, spread = _views(copy, out[filled:], tensor, slab.written_start)
        assignments.append((packed, spread))
        filled += copy.nbytes
    _assign_all(assignments, pool)
    return out[:filled]


def scatter(slab: Slab, runs: ByteArray, *, out: ByteArray, pool: Executor | None = None) -> ByteArray:
    """Permute a slab from the packed runs of its read copies to the tensor's order.

    Args:
        slab: The slab.
        runs: The runs of its read copies, one after another.
        out: Buffer of the same size.
        pool: Threads that share the work; None to use the calling thread.

    Returns:
        `out`.
    """
    assignments, consumed = [], 0
    for copy in slab.reads:
        packed, spread = _views(copy, runs[consumed:], out, slab.start)
        assignments.append((spread, packed))
        consumed += copy.nbytes
    _assign_all(assignments, pool)
    return out


def threads() -> int:
    """Return the best number of threads for a `pool` on this machine."""
    return min(MAX_THREADS, len(os.sched_getaffinity(0)))


def _views(copy: StridedCopy, packed: ByteArray, tensor: ByteArray, start: int) -> Assignment:
    """Return a copy's elements as two arrays of the same shape: a view of the packed runs, and a view of the tensor."""
    width, dims = (copy.width, copy.dims) if copy.dims else (1, ((copy.width, 1, 1),))
    element_dtype = np.dtype(UNSIGNED_DTYPES.get(width, f"V{width}"))
    shape = [count for count, _, _ in dims]
    strided = np.ndarray(
        shape, element_dtype, tensor, copy.tensor_offset - start, [tensor_stride for _, tensor_stride, _ in dims]
    )
    return packed[: copy.nbytes].view(element_dtype).reshape(shape), strided


def _assign_all(assignments: list[Assignment], pool: Executor | None) -> None:
    """Carry out assignments, split over the threads of the pool."""
    parts = [part for target, source in assignments for part in _split_assignment(target, source)]
    if pool is None or len(parts) == 1:
        for part in parts:
            _assign(part)
    else:
        for _ in pool.map(_assign, parts):  # raises the error of an assignment
            pass


def _split_assignment(target: np.ndarray, source: np.ndarray) -> Iterator[Assignment]:
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


def _assign(part: Assignment) -> None:
    """Carry out an assignment."""
    assign_tiled(*part)


def assign_tiled(target: np.ndarray, source: np.ndarray) -> None:
    """Assign an array to another one of the same shape, tile by tile; values are cast to the target's dtype."""
    for target_tile, source_tile in _tile_assignment(target, source):
        target_tile[...] = source_tile


def _tile_assignment(target: np.ndarray, source: np.ndarray) -> Iterator[Assignment]:
    """Split a transpose into square tiles. An assignment with the same contiguous axis on both sides is not split."""
    axes = _contiguous_axis(target), _contiguous_axis(source)
    if None in axes or axes[0] == axes[1] or target.itemsize >= PAGE:
        yield target, source
        return
    side = max(1, math.isqrt(TILE_NBYTES // target.itemsize))
    tile_ranges = [range(0, length, side if axis in axes else length) for axis, length in enumerate(target.shape)]
    for starts in itertools.product(*tile_ranges):
        tile = tuple(slice(start, start + tile_range.step) for start, tile_range in zip(starts, tile_ranges))
        yield target[tile], source[tile]


def _contiguous_axis(array: np.ndarray) -> int | None:
    """Return the axis along which elements are contiguous; None if there is none."""
    return next((axis for axis, stride in enumerate(array.strides) if stride == array.itemsize), None)
