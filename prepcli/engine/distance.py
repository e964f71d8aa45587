"""Measure how far the values of two tensors are apart."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import xxhash

from prepcli.engine.files import RunReader
from prepcli.engine.fills import numpy_dtype
from prepcli.engine.stream_values import allocate_run_buffers, read_values
from prepcli.planning.plan import Stream

Pair = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True, slots=True)
class Distance:
    """The distance between the values a and b of two tensors, computed in float64.

    Attributes:
        max_abs: Largest |a - b|. Infinite if only one of two values is NaN.
        mean_abs: Mean of |a - b|.
        cosine: a.b / (|a| |b|), of the tensors as vectors. 1.0 for two zero vectors, 0.0 if one is zero,
            NaN if a value is not finite.
        digests: XXH3-128 of the bytes of both streams.
    """

    max_abs: float
    mean_abs: float
    cosine: float
    digests: tuple[str, str]


def measure_distance(
    reader_a: RunReader, stream_a: Stream, *, reader_b: RunReader, stream_b: Stream
) -> Distance:
    """Measure the distance between the values of two streams (rows of tensors), in bounded memory.

    Args:
        reader_a: Reader of the files of the first stream.
        stream_a: The first stream.
        reader_b: Reader of the files of the second stream.
        stream_b: The second stream, with the same rows and shape. Its dtype may differ.
    """
    count = 0
    max_abs = 0.0
    total_abs = 0.0
    dot = 0.0
    square_a = 0.0
    square_b = 0.0
    state_a = xxhash.xxh3_128()
    state_b = xxhash.xxh3_128()
    values_a = _read_arrays(reader_a, stream_a, state_a)
    values_b = _read_arrays(reader_b, stream_b, state_b)
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
    return Distance(
        max_abs,
        total_abs / max(count, 1),
        _cosine(dot, square_a, square_b),
        digests=(state_a.hexdigest(), state_b.hexdigest()),
    )


def _cosine(dot: float, square_a: float, square_b: float) -> float:
    """Return the cosine of the angle between two vectors, from their products."""
    if not math.isfinite(square_a) or not math.isfinite(square_b):
        return math.nan
    if square_a == 0.0 and square_b == 0.0:
        return 1.0
    if square_a == 0.0 or square_b == 0.0:
        return 0.0
    return dot / (math.sqrt(square_a) * math.sqrt(square_b))


def _read_arrays(reader: RunReader, stream: Stream, state: xxhash.xxh3_128) -> Iterator[np.ndarray]:
    """Yield the values of a stream in C order, as float64, and add their bytes to a digest."""
    dtype = numpy_dtype(stream.dtype)
    for _, data in read_values(reader, stream, buffers=allocate_run_buffers()):
        state.update(data.data)
        yield data.view(dtype).astype(np.float64)


def _equally_long_pieces(
    values_a: Iterator[np.ndarray], values_b: Iterator[np.ndarray]
) -> Iterator[Pair]:
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
