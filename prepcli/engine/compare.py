"""Two streams of tensors compared value by value: where they differ first, and in how many places."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from prepcli.engine.blobs import Blob, open_blobs
from prepcli.engine.fills import numpy_dtype
from prepcli.engine.stream_values import allocate_run_buffers, read_values
from prepcli.planning.plan import Stream
from prepcli.planning.tensors import itemsize


@dataclass(frozen=True, slots=True)
class Difference:
    """How many values differ, and the first that does: its index in the tensor, and both values as text."""

    count: int
    index: tuple[int, ...] = ()
    value_a: str = ""
    value_b: str = ""

    @property
    def row(self) -> int:
        return self.index[0] if self.index else 0


def compare_streams(
    blobs_a: Sequence[Path | Blob], stream_a: Stream, blobs_b: Sequence[Path | Blob], stream_b: Stream
) -> Difference:
    """Compare the left sides of two streams of the same rows, shape and dtype, bit by bit."""
    count, first, item = 0, Difference(0), itemsize(stream_a.dtype)
    with open_blobs(blobs_a) as left, open_blobs(blobs_b) as right:
        for (start, x), (_, y) in zip(
            read_values(left, stream_a, allocate_run_buffers()),
            read_values(right, stream_b, allocate_run_buffers()),
            strict=True,
        ):
            differs = np.flatnonzero((x.reshape(-1, item) != y.reshape(-1, item)).any(axis=1))
            if differs.size and not count:
                at = int(differs[0])
                index = tuple(int(i) for i in np.unravel_index(start // item + at, stream_a.shape))
                shown = [
                    str(v[at * item : (at + 1) * item].copy().view(numpy_dtype(stream_a.dtype))[0]) for v in (x, y)
                ]
                first = Difference(0, index, *shown)
            count += int(differs.size)
    return Difference(count, first.index, first.value_a, first.value_b)
