"""Read PyTorch files from bytes for tests."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from prepcli.core.errors import FAILED, PrepError
from prepcli.formats.model_files import FileHeader
from prepcli.formats.torch_files import read_torch_header
from prepcli.planning.arrays import Array
from prepcli.planning.tensors import itemsize


def read_content(folder: Path, content: bytes) -> FileHeader:
    """Write a file of torch, and read its header."""
    path = folder / "x.bin"
    path.write_bytes(content)
    return read_torch_header(path, 0)


def read_error(folder: Path, content: bytes) -> PrepError:
    """Return the error for a file of torch with this content."""
    with pytest.raises(PrepError) as caught:
        read_content(folder, content)
    assert caught.value.code == FAILED
    return caught.value


def tensor_bytes(found: Array, content: bytes) -> bytes:
    """Return the tensor's bytes in C order, from its offset and strides."""
    if 0 in found.shape:
        return b""
    size = itemsize(found.dtype)
    plain = np.ndarray((*found.shape, size), np.uint8).strides[:-1]
    steps = (*(found.strides or plain), 1)
    return np.ndarray((*found.shape, size), np.uint8, content, found.offset, steps).tobytes()
