"""Bytes of a slab from the order of one side into that of the other: one strided copy each, by NumPy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from prepcli.files import Bytes
from prepcli.moves import Copy
from prepcli.slabs import Slab

ROWS = 16  # of a transpose at a time: more and each row's cache line is gone before its next element is wanted
PLAIN = {1: "u1", 2: "u2", 4: "u4", 8: "u8"}


def gather(slab: Slab, tensor: Bytes, out: Bytes) -> Bytes:
    """The runs of the slab's right side one after another, taken from the tensor's bytes."""
    at = 0
    for copy in slab.right:
        packed, spread = _views(copy, out[at:], tensor, slab.start)
        _assign(packed, spread, copy)
        at += copy.nbytes
    return out[:at]


def scatter(slab: Slab, runs: Bytes, out: Bytes) -> Bytes:
    """The tensor's bytes, taken from the runs of the slab's left side one after another."""
    at = 0
    for copy in slab.left:
        packed, spread = _views(copy, runs[at:], out, slab.start)
        _assign(spread, packed, copy)
        at += copy.nbytes
    return out


def _views(copy: Copy, packed: Bytes, tensor: Bytes, start: int) -> tuple[np.ndarray, np.ndarray]:
    """The same elements on both sides, one run of `width` bytes an element, as arrays of one shape."""
    kind = np.dtype(PLAIN.get(copy.width, f"V{copy.width}"))
    shape = [count for count, _, _ in copy.dims]
    steps = [step for _, step, _ in copy.dims]
    spread = np.ndarray(shape, kind, tensor, copy.at - start, steps)
    return packed[: copy.nbytes].view(kind).reshape(shape), spread


def _assign(target: np.ndarray, source: np.ndarray, copy: Copy) -> None:
    if not _transposes(copy.dims, copy.width):
        target[...] = source
        return
    for low in range(0, copy.dims[-1][0], ROWS):
        target[..., low : low + ROWS] = source[..., low : low + ROWS]


def _transposes(dims: Sequence[tuple[int, int, int]], width: int) -> bool:
    """Whether what is adjacent on one side is not on the other, though both have something adjacent."""
    return len(dims) > 1 and dims[-1][1] != width and any(step == width for _, step, _ in dims[:-1])
