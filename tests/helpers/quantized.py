"""Stored tensors of quantised weights in memory, and decoding of them in parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from prepcli.algebra.boxes import Range
from prepcli.engine.blobs import StoredMatrix
from prepcli.engine.fills import numpy_dtype
from prepcli.planning.arrays import Array, whole_array
from prepcli.quantized.decoder import Decoder, MatrixReader


def stored(name: str, array: np.ndarray) -> Array:
    return whole_array(name, array.dtype.name, array.shape, (0, 0))


def reader_of(arrays: Mapping[str, np.ndarray]) -> MatrixReader:
    """Return a reader of arrays by the names of the stored tensors."""

    def read(matrix: StoredMatrix, rows: Range, columns: Range | None = None) -> np.ndarray:
        flat = arrays[matrix.tensor.name].reshape(-1)
        array = flat.view(numpy_dtype(matrix.tensor.dtype)).reshape(matrix.rows, matrix.columns)
        assert 0 <= rows[0] <= rows[1] <= matrix.rows
        if columns is None:
            return array[slice(*rows)]
        assert 0 <= columns[0] <= columns[1] <= matrix.columns
        return np.ascontiguousarray(array[slice(*rows), slice(*columns)])

    return read


def decode_all(
    decoder: Decoder, arrays: Mapping[str, np.ndarray], rows_per_part: int | None = None
) -> np.ndarray:
    """Return all values of a decoder, in parts of some rows, in its shape."""
    read = reader_of(arrays)
    step = rows_per_part or decoder.rows
    parts = []
    for start in range(0, decoder.rows, step):
        parts.append(decoder.decode((start, min(start + step, decoder.rows)), read))
    return np.concatenate(parts).reshape(decoder.shape)


def assert_equal_bits(values: np.ndarray, expected: np.ndarray) -> None:
    """Assert that arrays of floats are equal bit for bit, except for the payloads of NaN."""
    assert values.dtype == expected.dtype
    assert values.shape == expected.shape
    is_nan = np.isnan(expected.astype(np.float32))
    unsigned = f"u{values.dtype.itemsize}"
    differs = (values.view(unsigned) != expected.view(unsigned)) & ~is_nan
    assert not differs.any()
    assert np.isnan(values[is_nan].astype(np.float32)).all()


def to_torch(array: np.ndarray) -> Any:
    """Return a torch tensor of the same bytes and dtype."""
    import torch

    dtype = getattr(torch, array.dtype.name)
    return torch.from_numpy(array.view(np.uint8).copy()).view(dtype).reshape(array.shape)


def to_numpy(tensor: Any) -> np.ndarray:
    """Return a NumPy array of the same bytes and dtype."""
    import ml_dtypes
    import torch

    dtype = str(tensor.dtype).removeprefix("torch.")
    octets = tensor.contiguous().view(torch.uint8).numpy()
    return octets.view(getattr(ml_dtypes, dtype, dtype)).reshape(tensor.shape)
