"""Two streams of tensors compared value by value: where they differ first, and in how many places."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from prepcli.engine import scattered
from prepcli.files import Bytes, Files, buffer
from prepcli.fills import numpy_dtype
from prepcli.permute import scatter
from prepcli.plan import Stream
from prepcli.slabs import PAGE, even_slabs
from prepcli.tensors import itemsize

SLAB_NBYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Difference:
    """How many values differ, and the first that does: its index in the tensor, and both values as text."""

    count: int
    index: tuple[int, ...] = ()
    a: str = ""
    b: str = ""

    @property
    def row(self) -> int:
        return self.index[0] if self.index else 0


def first_difference(files_a: Sequence[Path], a: Stream, files_b: Sequence[Path], b: Stream) -> Difference:
    """Compare the left sides of two streams of the same rows, shape and dtype, bit by bit."""
    count, first, item = 0, Difference(0), itemsize(a.dtype)
    with Files(files_a) as left, Files(files_b) as right:
        for (start, x), (_, y) in zip(_values(left, a), _values(right, b), strict=True):
            differs = np.flatnonzero((x.reshape(-1, item) != y.reshape(-1, item)).any(axis=1))
            if differs.size and not count:
                at = int(differs[0])
                index = tuple(int(i) for i in np.unravel_index(start // item + at, a.shape))
                shown = [str(v[at * item : (at + 1) * item].copy().view(numpy_dtype(a.dtype))[0]) for v in (x, y)]
                first = Difference(0, index, *shown)
            count += int(differs.size)
    return Difference(count, first.index, first.a, first.b)


def _values(files: Files, stream: Stream) -> Iterator[tuple[int, Bytes]]:
    """The bytes of a stream in runs of a fixed length, with the byte of the tensor where each begins."""
    buffers = [buffer(SLAB_NBYTES + 2 * PAGE) for _ in range(2)]
    for slab in even_slabs(0, stream, SLAB_NBYTES):
        if scattered(slab.left):
            yield slab.start, scatter(slab, files.read_runs(slab.left, buffers[0]), buffers[1][: slab.nbytes])
        else:
            yield slab.start, files.read_runs(slab.left, buffers[0])
