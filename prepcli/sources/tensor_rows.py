"""Read rows of a tensor in C order, however it is stored."""

from __future__ import annotations

import math

import numpy as np

from prepcli.engine.files import ByteArray, RunReader, allocate_buffer
from prepcli.engine.permute import needs_permute, scatter
from prepcli.planning.plan import location_copies
from prepcli.planning.slabs import Slab
from prepcli.planning.tensors import itemsize
from prepcli.sources.source import SourceTensor
from trainer.models.boxes import Box, Range


def read_tensor(files: RunReader, tensor: SourceTensor) -> ByteArray:
    """Return the bytes of a tensor."""
    if not tensor.nbytes:
        return np.empty(0, np.uint8)
    rows = math.prod(tensor.shape[:-1])
    return read_rows(files, tensor, (0, rows)).reshape(-1)


def read_rows(files: RunReader, tensor: SourceTensor, rows: Range) -> ByteArray:
    """Return rows of a tensor as bytes [rows, bytes per row].

    Args:
        files: Reader of the files of the tensor.
        tensor: The tensor. All dims except the last are rows.
        rows: Range of rows.
    """
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
    item_nbytes = itemsize(tensor.dtype)
    copies = tuple(
        location_copies(tensor.placement, tensor.shape, item_nbytes=item_nbytes, box=box)
    )
    runs = files.read_runs(copies, allocate_buffer(into.size))
    if needs_permute(copies):
        scatter(Slab(0, start, into.size, copies, ()), runs, out=into)
    else:
        into[...] = runs
