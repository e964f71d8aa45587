"""Low-rank updates of streams: the product of two small matrices is added to a tensor while it passes.

The product is summed over the rank in order, in float32. The result therefore does not depend on the slabs. It is added
in float32 (float64 for a float64 tensor), and the sum is rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import xxhash

from prepcli.algebra.boxes import Range, split_merged_range
from prepcli.core.errors import GET_AGAIN_HINT, DamagedError
from prepcli.engine.casts import StreamCast, ValueTransform, count_changes
from prepcli.engine.files import RunReader
from prepcli.engine.fills import numpy_dtype, round_to_dtype
from prepcli.engine.scales import StreamScale
from prepcli.engine.stream_values import allocate_run_buffers, read_values
from prepcli.planning.plan import ExpertUpdate, Stream

# Values per step. The arrays of a step fit a core's cache.
BLOCK_VALUES = 1 << 15
RUN_NBYTES = 256 << 10  # bytes of one read of a matrix
FLOAT32_NBYTES = 4


def matrix_nbytes(streams: Sequence[Stream]) -> int:
    """Return the memory for the matrices of the largest update, and for reading them, or 0 without updates."""
    max_count = 0
    for stream in streams:
        if update := stream.update:
            count = math.prod(update.a.shape) + math.prod(update.b.shape)
            max_count = max(max_count, count)
    if not max_count:
        return 0
    return FLOAT32_NBYTES * max_count + 2 * RUN_NBYTES


def value_change(stream: Stream, source: RunReader) -> ValueTransform | None:
    """Return the change of a stream's values: an update, a scale, a cast, or None to keep them."""
    if stream.update:
        return StreamUpdate(stream, source)
    if stream.scale:
        return StreamScale(stream.dtype, stream.written_dtype, stream.scale)
    if stream.cast_to:
        return StreamCast(stream.dtype, stream.cast_to)
    return None


class StreamUpdate(ValueTransform):
    """The update of a stream's values by its `LowRankUpdate`."""

    def __init__(self, stream: Stream, source: RunReader) -> None:
        """Read the matrices.

        Args:
            stream: A stream of a matrix, with an update.
            source: Reader of the source files.

        Raises:
            DamagedError: A matrix differs from its recorded digest.
        """
        super().__init__(stream.dtype, stream.written_dtype)
        update = stream.update
        assert update is not None
        a = _read_matrix(update.a, source, update.digests[0])
        b = _read_matrix(update.b, source, update.digests[1])
        # W' = W + scale * B A (LoRA, Hu et al. 2021), with A [rank, in] and B [out, rank]. A transposed
        # tensor W [in, out] gets scale * A^T B^T.
        # One matrix per expert, or one: a: [experts, rank, in], b: [experts, out, rank]
        if isinstance(update, ExpertUpdate):
            a, b = _matrices_of_experts(a, b, update)
        else:
            a = a[None]
            b = b[None]
        # left: [experts, rows, rank], right: [experts, rank, columns]
        self._left = b
        self._right = a
        if update.is_transposed:
            self._left = a.swapaxes(1, 2)
            self._right = b.swapaxes(1, 2)
        self._scale = np.float32(update.scale)
        # A stack of matrices [experts, rows, columns] is one matrix with the rows of all experts.
        self._shape = (math.prod(stream.shape[:-1]), stream.shape[-1])
        self._next_value = stream.byte_range[0] // self._source.itemsize

    def _change_values(self, values: np.ndarray, out: np.ndarray) -> None:
        first = self._next_value
        self._next_value = first + values.size
        start = 0
        for rows, columns in _matrix_blocks((first, self._next_value), self._shape):
            stop = start + (rows[1] - rows[0]) * (columns[1] - columns[0])
            wide = values[start:stop].astype(self._wide)
            updated = wide + self._product(rows, columns).reshape(-1)
            out[start:stop] = round_to_dtype(updated, self._target)
            self.counts += count_changes(wide, out[start:stop].astype(self._wide))
            start = stop

    def _product(self, rows: Range, columns: Range) -> np.ndarray:
        """Compute a block of scale * left @ right."""
        # One outer product per step instead of a matmul, which sums in an order that depends on the
        # block's shape and the library.
        num_rows = self._left.shape[1]
        total = np.zeros((rows[1] - rows[0], columns[1] - columns[0]), np.float32)
        # E.g. rows 6 to 11 of experts with 4 rows each: rows 2 to 4 of expert 1, and rows 0 to 3 of expert 2.
        for expert in range(rows[0] // num_rows, -(-rows[1] // num_rows)):
            start = max(rows[0], expert * num_rows)
            stop = min(rows[1], (expert + 1) * num_rows)
            left = self._left[expert, start - expert * num_rows : stop - expert * num_rows]
            right = self._right[expert, :, slice(*columns)]
            part = total[start - rows[0] : stop - rows[0]]
            term = np.empty_like(part)
            for number in range(len(right)):
                np.multiply(left[:, number : number + 1], right[number], out=term)
                part += term
        total *= self._scale
        return total


def _matrices_of_experts(
    a: np.ndarray, b: np.ndarray, update: ExpertUpdate
) -> tuple[np.ndarray, np.ndarray]:
    """Return the matrices [experts, rank, in] and [experts, out, rank] of an update, of all experts or of one."""
    a = a.reshape(update.num_experts, -1, a.shape[1])
    b = b[slice(*update.outputs)]
    b = b.reshape(len(b), -1, update.num_experts).transpose(2, 0, 1)
    if update.expert is not None:
        experts = slice(update.expert, update.expert + 1)
        return a[experts], b[experts]
    return a, b


def _matrix_blocks(value_range: Range, shape: Sequence[int]) -> Iterator[tuple[Range, Range]]:
    """Yield (rows, columns) of blocks over a range of a matrix's values in C order."""
    step = max(1, BLOCK_VALUES // shape[1])
    for (first_row, last_row), (first_column, last_column) in split_merged_range(
        value_range, shape
    ):
        for row in range(first_row, last_row, step):
            for column in range(first_column, last_column, BLOCK_VALUES):
                yield (
                    (row, min(row + step, last_row)),
                    (column, min(column + BLOCK_VALUES, last_column)),
                )


def _read_matrix(stream: Stream, source: RunReader, recorded_digest: str) -> np.ndarray:
    """Read a matrix as float32, and compare its bytes with the recorded digest if there is one.

    The matrices are also streams of the plan, but a resumed run does not read finished streams again.
    """
    state = xxhash.xxh3_128()
    dtype = numpy_dtype(stream.dtype)
    matrix = np.empty(stream.nbytes // dtype.itemsize, np.float32)
    for start, data in read_values(source, stream, buffers=allocate_run_buffers(RUN_NBYTES)):
        state.update(data.data)
        first = start // dtype.itemsize
        matrix[first : first + data.size // dtype.itemsize] = data.view(dtype)
    if recorded_digest not in ("", state.hexdigest()):
        why = (
            f"its bytes have the digest {state.hexdigest()}, its manifest records {recorded_digest}"
        )
        raise DamagedError(f"{stream.name} of the adapter is damaged", why, GET_AGAIN_HINT)
    return matrix.reshape(stream.shape)
