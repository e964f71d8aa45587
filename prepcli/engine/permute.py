"""Bytes of a slab from the order of one side into that of the other: one strided copy each, by NumPy."""

from __future__ import annotations

import numpy as np

from prepcli.engine.files import Bytes
from prepcli.planning.moves import Copy
from prepcli.planning.slabs import Slab

LINE = 64  # bytes of a transpose's target at a time: whole cache lines are written, and none is left before it is full
PLAIN = {1: "u1", 2: "u2", 4: "u4", 8: "u8"}


def gather(slab: Slab, tensor: Bytes, out: Bytes) -> Bytes:
    """The runs of the slab's right side one after another, taken from the tensor's bytes."""
    at = 0
    for copy in slab.right:
        packed, spread = _views(copy, out[at:], tensor, slab.written_start)
        _assign(packed, spread)
        at += copy.nbytes
    return out[:at]


def scatter(slab: Slab, runs: Bytes, out: Bytes) -> Bytes:
    """The tensor's bytes, taken from the runs of the slab's left side one after another."""
    at = 0
    for copy in slab.left:
        packed, spread = _views(copy, runs[at:], out, slab.start)
        _assign(spread, packed)
        at += copy.nbytes
    return out


def _views(copy: Copy, packed: Bytes, tensor: Bytes, start: int) -> tuple[np.ndarray, np.ndarray]:
    """The same elements on both sides, one run of `width` bytes an element, as arrays of one shape."""
    kind = np.dtype(PLAIN.get(copy.width, f"V{copy.width}"))
    shape = [count for count, _, _ in copy.dims]
    steps = [step for _, step, _ in copy.dims]
    spread = np.ndarray(shape, kind, tensor, copy.at - start, steps)
    return packed[: copy.nbytes].view(kind).reshape(shape), spread


def _assign(target: np.ndarray, source: np.ndarray) -> None:
    """Copy; where what is adjacent on one side is not on the other, in strips of a cache line of the target."""
    axis, length = _adjacent(target), max(1, LINE // target.itemsize)
    if axis is None or _adjacent(source) in (None, axis):
        target[...] = source
        return
    for low in range(0, target.shape[axis], length):
        strip = (*[slice(None)] * axis, slice(low, low + length))
        target[strip] = source[strip]


def _adjacent(values: np.ndarray) -> int | None:
    """The axis along which elements lie side by side."""
    return next((axis for axis, step in enumerate(values.strides) if step == values.itemsize), None)
