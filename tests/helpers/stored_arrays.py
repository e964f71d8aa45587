"""Bytes of tensors in files, read one element at a time through their copies."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import numpy as np

from prepcli.algebra.boxes import Box, full_box
from prepcli.algebra.strided_copies import StridedCopy
from prepcli.engine.files import RunReader
from prepcli.engine.stream_values import read_values
from prepcli.planning.arrays import Location
from prepcli.planning.plan import Stream
from prepcli.sources.source import SourceTensor


def tensor_bytes(files: RunReader, tensor: SourceTensor) -> bytes:
    """Return the bytes of a tensor in C order."""
    rows = (0, tensor.shape[0] if tensor.shape else 1)
    stream = Stream(tensor.name, tensor.dtype, tensor.shape, rows, tensor.placement, ())
    return b"".join(run.tobytes() for _, run in read_values(files, stream))


def copy_bytes(copies: Iterable[StridedCopy], files: Sequence[bytes], out: np.ndarray) -> None:
    """Copy bytes of files to the tensor offsets of copies. A byte that is written twice is an error."""
    written = np.zeros(out.size, bool)
    for copy in copies:
        for index in itertools.product(*(range(count) for count, _, _ in copy.dims)):
            target = copy.tensor_offset
            start = copy.file_offset
            for i, (_, tensor_stride, file_stride) in zip(index, copy.dims):
                target += i * tensor_stride
                start += i * file_stride
            assert not written[target : target + copy.width].any()
            written[target : target + copy.width] = True
            data = files[copy.file][start : start + copy.width]
            out[target : target + copy.width] = np.frombuffer(data, np.uint8)


def read_tensor(
    location: Location, values: np.ndarray, files: Sequence[bytes], box: Box | None = None
) -> np.ndarray:
    """Return a box of a tensor of the shape and dtype of `values`, with zeros for elements in no copy."""
    box = box or full_box(values.shape)
    out = np.zeros([stop - start for start, stop in box], values.dtype)
    copy_bytes(location.copies(box, box), files, out.reshape(-1).view(np.uint8))
    return out
