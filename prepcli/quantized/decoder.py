"""`Decoder`: the values of a quantised tensor, computed by rows from the stored tensors."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from prepcli.algebra.boxes import Range
from prepcli.core.errors import GET_AGAIN_HINT, DamagedError
from prepcli.core.json_values import quote_name
from prepcli.engine.fills import numpy_dtype, round_to_dtype
from prepcli.planning.arrays import Array

FloatArray = npt.NDArray[np.float32]
CodeArray = npt.NDArray[np.uint8]
# Two float32 values in 8 bytes.
PairTable = npt.NDArray[np.uint64]
# Dtypes of decoded values, and of scales in floats.
VALUE_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """A stored tensor as a matrix in C order. Formats group its dims into rows and columns."""

    tensor: Array
    rows: int
    columns: int


class MatrixReader(Protocol):
    """A reader of parts of stored matrices."""

    def __call__(
        self, matrix: StoredMatrix, rows: Range, columns: Range | None = None
    ) -> np.ndarray:
        """Return rows of a matrix in its dtype, or only some of their columns."""
        ...


class Decoder(ABC):
    """A quantised tensor with the shape and the dtype of its decoded values.

    Subclasses compute in float32, and each value is then rounded once to `dtype`, as in the reference implementation
    of the format.

    Attributes:
        name: Name of the decoded tensor.
        shape: Shape of the decoded tensor.
        dtype: Dtype of the decoded values.
        stored: The stored tensors that the values are computed from. The first one has the codes.
        block_values: Number of values to decode at a time.
        row_multiple: Number of rows that are decoded together, so that a block should have a multiple of it.
    """

    # The float32 values of a block and their temporary arrays fit a core's L2 cache.
    block_values = 1 << 17
    row_multiple = 1

    def __init__(
        self, name: str, shape: tuple[int, ...], dtype: str, stored: Sequence[Array]
    ) -> None:
        if dtype not in VALUE_DTYPES:
            raise ValueError(f"dtype={dtype!r} of {name!r} is not {', '.join(VALUE_DTYPES)}")
        self.name = name
        self.shape = shape
        self.dtype = dtype
        self.stored = tuple(stored)
        self._numpy_dtype = numpy_dtype(dtype)

    @property
    def rows(self) -> int:
        """Number of rows: the product of all dims except the last."""
        return math.prod(self.shape[:-1])

    @property
    def columns(self) -> int:
        """Number of values in a row."""
        return self.shape[-1]

    def decode(self, rows: Range, read: MatrixReader) -> np.ndarray:
        """Return decoded rows as an array [rows, columns] of `dtype`.

        Args:
            rows: Range of rows.
            read: Reads the stored tensors.
        """
        # Hostile scales overflow to infinity, or multiply it by 0. Such values are counted with the casts.
        with np.errstate(all="ignore"):
            values = self._decode(rows, read)
            return round_to_dtype(np.ascontiguousarray(values), self._numpy_dtype)

    @abstractmethod
    def _decode(self, rows: Range, read: MatrixReader) -> FloatArray:
        """Return decoded rows in float32."""


def code_pairs(table: FloatArray) -> PairTable:
    """Return the values of each pair of 8-bit codes as 8 bytes, for `lookup`.

    Args:
        table: Value of each of the 256 codes.
    """
    first = np.tile(table, 256)
    second = np.repeat(table, 256)
    return np.stack([first, second], axis=-1).view(np.uint64)[:, 0]


def lookup(pairs: PairTable, codes: CodeArray) -> FloatArray:
    """Return the values of 8-bit codes [R, C].

    Args:
        pairs: Result of `code_pairs`.
        codes: Codes, contiguous.
    """
    # Two codes at a time: an index of 16 bits takes half of the time of two indices of 8 bits.
    flat = codes.reshape(-1)
    if flat.size % 2:
        flat = np.append(flat, np.uint8(0))
    values = np.take(pairs, flat.view(np.uint16), mode="clip").view(np.float32)
    return values[: codes.size].reshape(codes.shape)


def lookup_nibbles(pairs: PairTable, codes: CodeArray) -> FloatArray:
    """Return the values of 4-bit codes, two per byte. The last dim becomes twice as long.

    Args:
        pairs: Result of `nibble_pairs`.
        codes: Bytes, contiguous.
    """
    return np.take(pairs, codes, mode="clip").view(np.float32)


def nibble_pairs(values: Sequence[float] | FloatArray, *, high_first: bool = False) -> PairTable:
    """Return a table of 256 entries: both float32 values of a byte as one uint64, from the values of 16 codes."""
    table = np.array(values, np.float32)
    bytes_ = np.arange(256)
    pair = [table[bytes_ & 15], table[bytes_ >> 4]]
    if high_first:
        pair.reverse()
    return np.ascontiguousarray(np.stack(pair, axis=-1)).view(np.uint64)[:, 0]


def unpack_bits(packed: np.ndarray, bits: int, count: int) -> CodeArray:
    """Return the unsigned codes of dense little-endian bit fields along the last axis.

    Value i has the bits from bit i * bits on, e.g. with 3 bits value 10 has bits 30 and 31 of word 0 and bit 0 of
    word 1.

    Args:
        packed: Rows of words [R, W], contiguous.
        bits: Bits per value, 1 to 8.
        count: Number of values per row.
    """
    octets = packed.view(np.uint8)
    if bits == 8:
        return octets[:, :count]
    if bits == 4:
        codes = np.empty((*octets.shape, 2), np.uint8)
        np.bitwise_and(octets, 15, out=codes[..., 0])
        np.right_shift(octets, 4, out=codes[..., 1])
        return codes.reshape(len(octets), -1)[:, :count]
    flags = np.unpackbits(octets, axis=1, count=count * bits, bitorder="little")
    fields = flags.reshape(len(octets), count, bits)
    return np.packbits(fields, axis=2, bitorder="little")[..., 0]


def check_shape(tensor: Array, shapes: Sequence[tuple[int, ...]], owner: str) -> None:
    """Raise DamagedError if a stored tensor has none of the shapes.

    Args:
        tensor: The stored tensor.
        shapes: Shapes that fit.
        owner: Name of the tensor that the stored one belongs to.
    """
    if tensor.shape in shapes:
        return
    expected = " or ".join(str([*shape]) for shape in dict.fromkeys(shapes))
    raise DamagedError(
        f"{quote_name(tensor.name)} has shape {[*tensor.shape]}",
        f"{quote_name(owner)} needs {expected}",
        GET_AGAIN_HINT,
    )


def check_dims(tensor: Array, least: int) -> None:
    """Raise DamagedError if stored codes have fewer than `least` dims, or no elements."""
    if len(tensor.shape) >= least and 0 not in tensor.shape:
        return
    raise DamagedError(
        f"{quote_name(tensor.name)} has shape {[*tensor.shape]}",
        f"such a tensor has {least} dims or more, and none of size 0",
        GET_AGAIN_HINT,
    )


def check_dtype(tensor: Array, dtypes: Sequence[str], owner: str) -> None:
    """Raise DamagedError if a stored tensor has none of the dtypes. See `check_shape` for the arguments."""
    if tensor.dtype in dtypes:
        return
    raise DamagedError(
        f"{quote_name(tensor.name)} is {tensor.dtype}",
        f"{quote_name(owner)} needs {' or '.join(dtypes)}",
        GET_AGAIN_HINT,
    )
