"""Compare two tensors value by value: count the differences and locate the first one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from prepcli.engine.blobs import open_blobs
from prepcli.engine.fills import numpy_dtype
from prepcli.engine.stream_values import allocate_run_buffers, read_values
from prepcli.planning.plan import Stream
from prepcli.planning.tensors import itemsize
from prepcli.stores.buffers import Blob, ByteArray


@dataclass(frozen=True, slots=True)
class Difference:
    """The difference between two tensors.

    Attributes:
        count: Number of unequal values.
        index: Index of the first difference in the tensor.
        value_a: The first tensor's value there, as text.
        value_b: The second tensor's value there, as text.
    """

    count: int
    index: tuple[int, ...] = ()
    value_a: str = ""
    value_b: str = ""

    @property
    def row(self) -> int:
        """Row of the first difference."""
        return self.index[0] if self.index else 0


def compare_streams(
    blobs_a: Sequence[Path | Blob],
    stream_a: Stream,
    *,
    blobs_b: Sequence[Path | Blob],
    stream_b: Stream,
) -> Difference:
    """Compare the values of two streams (row ranges of tensors) bit by bit.

    Args:
        blobs_a: Files and blobs of the first stream.
        stream_a: The first stream.
        blobs_b: Files and blobs of the second stream.
        stream_b: The second stream, with the same rows, shape and dtype.

    Returns:
        The difference. Its count is 0 if the values are equal.
    """
    count = 0
    first = Difference(0)
    item_nbytes = itemsize(stream_a.dtype)
    with open_blobs(blobs_a) as reader_a, open_blobs(blobs_b) as reader_b:
        values_a = read_values(reader_a, stream_a, buffers=allocate_run_buffers())
        values_b = read_values(reader_b, stream_b, buffers=allocate_run_buffers())
        for (start, data_a), (_, data_b) in zip(values_a, values_b, strict=True):
            # As bytes: NaN differs from itself as a value, and -0.0 equals 0.0.
            items_a = data_a.reshape(-1, item_nbytes)
            items_b = data_b.reshape(-1, item_nbytes)
            differs = np.flatnonzero((items_a != items_b).any(axis=1))
            if differs.size and not count:
                position = int(differs[0])
                index = np.unravel_index(start // item_nbytes + position, stream_a.shape)
                first = Difference(
                    0,
                    tuple(map(int, index)),
                    _value_text(items_a[position], stream_a.dtype),
                    _value_text(items_b[position], stream_a.dtype),
                )
            count += int(differs.size)
    return Difference(count, first.index, first.value_a, first.value_b)


def _value_text(item: ByteArray, dtype: str) -> str:
    """Return the text of a value, given its bytes."""
    return str(item.copy().view(numpy_dtype(dtype))[0])
