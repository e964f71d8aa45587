"""Bytes of a slab from the order of one side into that of the other: strided copies by NumPy, tiled for the caches."""

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

TILE_NBYTES = 128 << 10  # a tile of the source and one of the target fit the L2 cache together
PART_NBYTES = 2 << 20  # less is not worth a thread of its own
MAX_THREADS = 4  # a few saturate the memory
UNSIGNED_DTYPES = {1: "u1", 2: "u2", 4: "u4", 8: "u8"}
Assignment = tuple[np.ndarray, np.ndarray]  # target, source


def gather(slab: Slab, tensor: ByteArray, out: ByteArray, pool: Executor | None = None) -> ByteArray:
    """Copy the tensor's bytes to `out`, as the runs of the slab's right side one after another.

    Args:
        slab: The slab to bring into the order of its right side.
        tensor: Its bytes in the tensor's order.
        out: Room for as many bytes.
        pool: Threads that share the work; without one the caller does it.

    Returns:
        The part of `out` that was filled.
    """
    whole, at = [], 0
    for copy in slab.writes:
        packed, spread = _views(copy, out[at:], tensor, slab.written_start)
        whole.append((packed, spread))
        at += copy.nbytes
    _assign_all(whole, pool)
    return out[:at]


def scatter(slab: Slab, runs: ByteArray, out: ByteArray, pool: Executor | None = None) -> ByteArray:
    """Copy the runs of the slab's left side, which follow one another, to `out` in the tensor's order.

    Args:
        slab: The slab to bring into the tensor's order.
        runs: Bytes of the runs of its left side.
        out: Room for as many bytes.
        pool: Threads that share the work; without one the caller does it.

    Returns:
        `out`.
    """
    whole, at = [], 0
    for copy in slab.reads:
        packed, spread = _views(copy, runs[at:], out, slab.start)
        whole.append((spread, packed))
        at += copy.nbytes
    _assign_all(whole, pool)
    return out


def threads() -> int:
    """Return how many threads a `pool` should have on this machine."""
    return min(MAX_THREADS, len(os.sched_getaffinity(0)))


def _views(copy: StridedCopy, packed: ByteArray, tensor: ByteArray, start: int) -> Assignment:
    """The same elements on both sides as arrays of one shape: runs of `width` bytes, or the bytes of a single run."""
    width, dims = (copy.width, copy.dims) if copy.dims else (1, ((copy.width, 1, 1),))
    kind = np.dtype(UNSIGNED_DTYPES.get(width, f"V{width}"))
    shape = [count for count, _, _ in dims]
    spread = np.ndarray(shape, kind, tensor, copy.tensor_offset - start, [step for _, step, _ in dims])
    return packed[: copy.nbytes].view(kind).reshape(shape), spread


def _assign_all(assignments: list[Assignment], pool: Executor | None) -> None:
    parts = [part for target, source in assignments for part in _split_assignment(target, source)]
    if pool is None or len(parts) == 1:
        for part in parts:
            _assign(part)
    else:
        for _ in pool.map(_assign, parts):  # raises what an assignment raised
            pass


def _split_assignment(target: np.ndarray, source: np.ndarray) -> Iterator[Assignment]:
    """Split an assignment along its longest axis into about as many parts as there are threads."""
    count = min(threads(), target.nbytes // PART_NBYTES)
    if count < 2:
        yield target, source
        return
    axis = max(range(target.ndim), key=lambda axis: target.shape[axis])
    length = -(-target.shape[axis] // count)
    for low in range(0, target.shape[axis], length):
        part = (*[slice(None)] * axis, slice(low, low + length))
        yield target[part], source[part]


def _assign(part: Assignment) -> None:
    for target, source in _tile_assignment(*part):
        target[...] = source


def _tile_assignment(target: np.ndarray, source: np.ndarray) -> Iterator[Assignment]:
    """Cut a transpose into square tiles; an assignment whose sides have long runs in common stays whole."""
    axes = _contiguous_axis(target), _contiguous_axis(source)
    if None in axes or axes[0] == axes[1] or target.itemsize >= PAGE:
        yield target, source
        return
    side = max(1, math.isqrt(TILE_NBYTES // target.itemsize))
    cuts = [range(0, length, side if axis in axes else length) for axis, length in enumerate(target.shape)]
    for lows in itertools.product(*cuts):
        tile = tuple(slice(low, low + cut.step) for low, cut in zip(lows, cuts))
        yield target[tile], source[tile]


def _contiguous_axis(array: np.ndarray) -> int | None:
    """The axis along which elements lie side by side."""
    return next((axis for axis, step in enumerate(array.strides) if step == array.itemsize), None)
