"""Read rows of a tensor in C order, however it is stored."""

from __future__ import annotations

import bisect
import itertools
import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from prepcli.algebra.boxes import Box, Range
from prepcli.engine.blobs import open_blobs
from prepcli.engine.chunk_cache import ChunkCache
from prepcli.engine.files import RunReader
from prepcli.engine.permute import needs_permute, scatter
from prepcli.planning.arrays import location_copies
from prepcli.planning.slabs import Slab
from prepcli.planning.tensors import itemsize
from prepcli.sources.source import SourceTensor
from prepcli.stores.buffers import Blob, ByteArray, allocate_buffer
from prepcli.stores.paths import AnyPath

# Bytes of `TensorBytes` to read at a time. A read takes about twice its size.
STEP_NBYTES = 1 << 20


# Without slots: a cached property needs the dict of the instance.
@dataclass(frozen=True)
class TensorBytes:
    """The bytes of tensors in C order, one tensor after another.

    Attributes:
        name: Name in messages.
        tensors: The tensors. They may be stored in chunks.
        stored: Files and blobs of the tensors.
    """

    name: str
    tensors: tuple[SourceTensor, ...]
    stored: tuple[AnyPath | Blob, ...]

    @cached_property
    def offsets(self) -> list[int]:
        """Offset of each tensor, then the size of the blob."""
        return [*itertools.accumulate((tensor.nbytes for tensor in self.tensors), initial=0)]

    def open(self) -> TensorBytesReader:
        """Open the tensors for reading, with a small separate cache."""
        return self.open_with_cache(ChunkCache())

    def open_with_cache(self, cache: ChunkCache) -> TensorBytesReader:
        """Open the tensors for reading. Decoded chunks take half of the memory that the cache may take."""
        return TensorBytesReader(self, cache.most_nbytes // 2)


class TensorBytesReader:
    """Reader of the bytes of tensors, for one thread."""

    def __init__(self, blob: TensorBytes, cache_nbytes: int) -> None:
        self._tensors = blob.tensors
        self._offsets = blob.offsets
        self._files = open_blobs(blob.stored, cache_nbytes)

    def read_at(self, offset: int, into: ByteArray) -> None:
        """Fill `into` with the bytes from `offset` on."""
        done = 0
        while done < into.size:
            number = bisect.bisect_right(self._offsets, offset + done) - 1
            tensor = self._tensors[number]
            start = offset + done - self._offsets[number]
            count = min(into.size - done, tensor.nbytes - start, STEP_NBYTES)
            # E.g. bytes 5 to 14 of rows of 4 bytes are the rows 1 to 3 without their first and their last byte.
            row_nbytes = math.prod(tensor.shape[-1:]) * itemsize(tensor.dtype)
            rows = (start // row_nbytes, -(-(start + count) // row_nbytes))
            data = read_rows(self._files, tensor, rows).reshape(-1)
            first = start - rows[0] * row_nbytes
            into[done : done + count] = data[first : first + count]
            done += count

    def close(self) -> None:
        """Close the files."""
        self._files.close()


def read_tensor(files: RunReader, tensor: SourceTensor) -> ByteArray:
    """Return the bytes of a tensor."""
    if not tensor.nbytes:
        return np.empty(0, np.uint8)
    rows = math.prod(tensor.shape[:-1])
    return read_rows(files, tensor, (0, rows)).reshape(-1)


def read_rows(files: RunReader, tensor: SourceTensor, rows: Range) -> ByteArray:
    """Return rows of a tensor as bytes [rows, bytes per row]."""
    row_nbytes = math.prod(tensor.shape[-1:]) * itemsize(tensor.dtype)
    height = math.prod(tensor.shape[-2:-1])
    data = np.empty((rows[1] - rows[0], row_nbytes), np.uint8)
    row = rows[0]
    while row < rows[1]:
        # Rows of one matrix, of all leading dims.
        matrix, first = divmod(row, height)
        stop = min(height, first + rows[1] - row)
        part = data[row - rows[0] :][: stop - first].reshape(-1)
        _read_box(
            files,
            tensor,
            _matrix_rows_box(tensor.shape, matrix, (first, stop)),
            row * row_nbytes,
            part,
        )
        row += stop - first
    return data


def _matrix_rows_box(shape: tuple[int, ...], matrix: int, rows: Range) -> Box:
    """Return the box of rows of one matrix."""
    box: list[Range] = []
    for index in np.unravel_index(matrix, shape[:-2]) if len(shape) > 2 else ():
        box.append((int(index), int(index) + 1))
    if len(shape) > 1:
        box.append(rows)
    if shape:
        box.append((0, shape[-1]))
    return tuple(box)


def _read_box(
    files: RunReader, tensor: SourceTensor, box: Box, start: int, into: ByteArray
) -> None:
    """Fill `into` with a box. It begins at byte `start` of the tensor in C order."""
    copies = tuple(location_copies(tensor.placement, box))
    runs = files.read_runs(copies, allocate_buffer(into.size))
    if needs_permute(copies):
        scatter(Slab(0, start, into.size, copies, ()), runs, out=into)
    else:
        into[...] = runs
