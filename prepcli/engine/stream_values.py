"""Values of streams in C order, however they are stored, within two small buffers: reading and comparing them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from prepcli.engine.blobs import open_blobs
from prepcli.engine.digest import TensorDigest
from prepcli.engine.files import RunReader
from prepcli.engine.fills import numpy_dtype
from prepcli.engine.permute import needs_permute, scatter
from prepcli.planning.plan import Stream
from prepcli.planning.slabs import split_stream_evenly
from prepcli.stores.buffers import Blob, ByteArray, allocate_buffer

RUN_NBYTES = 4 << 20


def allocate_run_buffers(run_nbytes: int = RUN_NBYTES) -> tuple[ByteArray, ByteArray]:
    """Allocate the buffers that `read_values` needs for runs of this length. They can be reused for other streams."""
    return allocate_buffer(run_nbytes), allocate_buffer(run_nbytes)


def read_values(
    files: RunReader, stream: Stream, *, buffers: tuple[ByteArray, ByteArray] | None = None
) -> Iterator[tuple[int, ByteArray]]:
    """Read a stream in runs of whole elements.

    Args:
        files: Reader of the source files.
        stream: The stream.
        buffers: Buffers from `allocate_run_buffers`. New ones by default.

    Yields:
        (offset of the run in the tensor, bytes). A run is overwritten by the next one. Run boundaries depend on the
        tensor's shape and the buffers alone.
    """
    read_buffer, ordered_buffer = buffers or allocate_run_buffers()
    for slab in split_stream_evenly(0, stream, max_nbytes=read_buffer.size):
        data = files.read_runs(slab.reads, read_buffer)
        if needs_permute(slab.reads):
            data = scatter(slab, data, out=ordered_buffer[: slab.nbytes])
        yield slab.start, data


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
    """Compare the values of two streams bit by bit. They have the same rows, shape and dtype.

    Args:
        blobs_a: Files and blobs of the first stream.
        stream_a: The first stream.
        blobs_b: Files and blobs of the second stream.
        stream_b: The second stream.

    Returns:
        The difference. Its count is 0 if the values are equal.
    """
    count = 0
    first = Difference(0)
    dtype = numpy_dtype(stream_a.dtype)
    with open_blobs(blobs_a) as reader_a, open_blobs(blobs_b) as reader_b:
        values_a = read_values(reader_a, stream_a)
        values_b = read_values(reader_b, stream_b)
        for (start, data_a), (_, data_b) in zip(values_a, values_b, strict=True):
            # As bytes: NaN differs from itself as a value, and -0.0 equals 0.0.
            items_a = data_a.reshape(-1, dtype.itemsize)
            items_b = data_b.reshape(-1, dtype.itemsize)
            differs = np.flatnonzero((items_a != items_b).any(axis=1))
            if differs.size and not count:
                position = int(differs[0])
                index = np.unravel_index(start // dtype.itemsize + position, stream_a.shape)
                texts = [str(items[position].copy().view(dtype)[0]) for items in (items_a, items_b)]
                first = Difference(0, tuple(map(int, index)), *texts)
            count += int(differs.size)
    return Difference(count, first.index, first.value_a, first.value_b)


@dataclass(frozen=True, slots=True)
class Distance:
    """The distance between the values a and b of two tensors, computed in float64.

    Attributes:
        max_abs: Largest |a - b|. Infinite if only one of two values is NaN.
        mean_abs: Mean of |a - b|.
        cosine: a.b / (|a| |b|), of the tensors as vectors. 1.0 for two zero vectors, 0.0 if one is zero,
            NaN if a value is not finite.
        digests: Digest of the bytes of each stream.
    """

    max_abs: float
    mean_abs: float
    cosine: float
    digests: tuple[str, str]


def measure_distance(
    reader_a: RunReader, stream_a: Stream, *, reader_b: RunReader, stream_b: Stream
) -> Distance:
    """Measure the distance between the values of two streams. They have the same rows and shape, and any dtypes."""
    count = 0
    max_abs = 0.0
    total_abs = 0.0
    dot = 0.0
    square_a = 0.0
    square_b = 0.0
    digest_a = TensorDigest(algorithm=stream_a.digest_algorithm)
    digest_b = TensorDigest(algorithm=stream_b.digest_algorithm)
    values_a = _read_arrays(reader_a, stream_a, digest_a)
    values_b = _read_arrays(reader_b, stream_b, digest_b)
    with np.errstate(invalid="ignore", over="ignore"):
        for a, b in _equally_long_pieces(values_a, values_b):
            difference = np.abs(a - b)
            # Infinities of one sign and two NaN are equal, although their difference is NaN.
            difference[(a == b) | (np.isnan(a) & np.isnan(b))] = 0.0
            difference[np.isnan(difference)] = math.inf
            count += a.size
            max_abs = max(max_abs, float(difference.max()))
            total_abs += float(difference.sum())
            dot += float(a @ b)
            square_a += float(a @ a)
            square_b += float(b @ b)
    if not math.isfinite(square_a) or not math.isfinite(square_b):
        cosine = math.nan
    elif square_a == 0.0 or square_b == 0.0:
        cosine = float(square_a == square_b)
    else:
        cosine = dot / (math.sqrt(square_a) * math.sqrt(square_b))
    digests = (digest_a.text(), digest_b.text())
    return Distance(max_abs, total_abs / max(count, 1), cosine, digests)


def _read_arrays(reader: RunReader, stream: Stream, digest: TensorDigest) -> Iterator[np.ndarray]:
    """Yield the values of a stream in C order, as float64, and add their bytes to a digest."""
    dtype = numpy_dtype(stream.dtype)
    for _, data in read_values(reader, stream):
        digest.update(data.data)
        yield data.view(dtype).astype(np.float64)


def _equally_long_pieces(
    values_a: Iterator[np.ndarray], values_b: Iterator[np.ndarray]
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Cut two sequences of arrays at the same elements, and yield the pieces in pairs.

    The arrays of the two sequences may differ in length: each has the same number of bytes, so that an array of
    bfloat16 has twice as many values as one of float32.

    >>> pieces = _equally_long_pieces(iter([np.arange(3)]), iter([np.arange(2), np.arange(1)]))
    >>> [(a.tolist(), b.tolist()) for a, b in pieces]
    [([0, 1], [0, 1]), ([2], [0])]
    """
    a = b = np.empty(0)
    while True:
        if not a.size:
            a = next(values_a, a)
        if not b.size:
            b = next(values_b, b)
        count = min(a.size, b.size)
        if not count:
            return
        yield a[:count], b[:count]
        a = a[count:]
        b = b[count:]
