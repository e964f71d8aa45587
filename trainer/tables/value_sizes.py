"""Estimate the memory of the values of Arrow arrays as Python objects.

A few bytes of a file can encode a large value: a list of 2^31 nulls has no bytes at all, and each element of a list can
refer to the same long text of a dictionary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from pyarrow import Array, RecordBatch

ELEMENT_NBYTES = 8  # of the pointer to an element of a Python list


class UnsupportedTypeError(ValueError):
    """A column has values of an unsupported type."""


def row_nbytes(batch: RecordBatch) -> int:
    """Return the estimated bytes of all values of a valid record batch.

    Raises:
        UnsupportedTypeError: A column has an unsupported type.
    """
    return sum(values_nbytes(column) for column in batch.columns)


def values_nbytes(array: Array[Any]) -> int:
    """Return the estimated bytes of the values of a valid array: at least 8 for each element at any depth.

    Raises:
        UnsupportedTypeError: The array has an unsupported type.
    """
    from pyarrow import types

    kind = array.type
    pointers = len(array) * ELEMENT_NBYTES
    if hasattr(kind, "storage_type"):  # an extension type
        return values_nbytes(array.storage)
    if types.is_dictionary(kind):
        return pointers + len(array) * _largest_value_nbytes(array.dictionary)
    if _is_text_or_bytes(kind):
        return pointers + int(_text_lengths(array).sum())
    if types.is_struct(kind):
        return pointers + sum(values_nbytes(child) for child in array.flatten())
    if types.is_map(kind):
        return pointers + values_nbytes(_list_of_map(array))
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return pointers + values_nbytes(array.flatten())
    if types.is_nested(kind) or types.is_run_end_encoded(kind):
        raise UnsupportedTypeError(f"values of the Arrow type {kind!s:.60} are not supported")
    return max(pointers, array.nbytes)


def is_view(kind: Any) -> bool:
    """Return whether an Arrow type has views of texts or bytes."""
    from pyarrow import types

    return types.is_string_view(kind) or types.is_binary_view(kind)


def _is_text_or_bytes(kind: Any) -> bool:
    from pyarrow import types

    is_text = types.is_string(kind) or types.is_large_string(kind)
    return is_text or types.is_binary(kind) or types.is_large_binary(kind) or is_view(kind)


def _text_lengths(array: Array[Any]) -> npt.NDArray[np.int64]:
    """Return the bytes of each text of an array, 0 for nulls. Texts that share bytes count each."""
    from pyarrow import compute

    if not is_view(array.type):
        return (
            compute.fill_null(compute.call_function("binary_length", [array]), 0)
            .to_numpy(zero_copy_only=False)
            .astype(np.int64)
        )
    # pyarrow has no function for the lengths of views. A view has 16 bytes, the first 4 are the length of its text.
    views = np.frombuffer(array.buffers()[1] or b"", "<i4").reshape(-1, 4)
    lengths = views[array.offset : array.offset + len(array), 0].astype(np.int64)
    return np.where(array.is_valid().to_numpy(zero_copy_only=False), lengths, 0)


def _largest_value_nbytes(dictionary: Array[Any]) -> int:
    """Return an upper bound of the bytes of each value of a dictionary."""
    if _is_text_or_bytes(dictionary.type):
        return int(_text_lengths(dictionary).max(initial=0))
    return values_nbytes(dictionary)


def _list_of_map(array: Array[Any]) -> Array[Any]:
    """Return the entries of a map array as structs, without the entries outside of its slice."""
    from pyarrow import list_, struct

    kind = array.type
    return array.cast(list_(struct([kind.key_field, kind.item_field]))).flatten()
