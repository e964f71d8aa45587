"""What the quantised formats share: a decoder of rows, the stored tensors of a weight, and fields of a few bits.

A format is a module with a subclass of `Decoder` and a function that finds the weights of a model, and one row in
`prepcli.quantized.formats`.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from prepcli.algebra.boxes import Range
from prepcli.core.errors import GET_AGAIN_HINT, DamagedError, PrepError
from prepcli.core.formatting import count_text
from prepcli.core.json_values import quote_name
from prepcli.engine.blobs import DerivedReader, RowOperation, StoredMatrix
from prepcli.engine.fills import numpy_dtype, round_to_dtype
from prepcli.planning.arrays import Array

FloatArray = npt.NDArray[np.float32]
CodeArray = npt.NDArray[np.uint8]
# Two float32 values in 8 bytes.
PairTable = npt.NDArray[np.uint64]
# Dtypes of decoded values, and of scales in floats.
VALUE_DTYPES = ("float32", "bfloat16", "float16")
# Memory per decoded value: codes, scales and zero points in float32, and the value itself.
DECODING_NBYTES = 24
WORD_BITS = 32
USE_ORIGINAL_HINT = "use the model that it was quantised from"
MAX_PAYLOAD_NBYTES = 1 << 20


class MatrixReader(Protocol):
    """A reader of parts of stored matrices."""

    def __call__(
        self, matrix: StoredMatrix, rows: Range, columns: Range | None = None
    ) -> np.ndarray:
        """Return rows of a matrix in its dtype, or only some of their columns."""
        ...


class Decoder(RowOperation):
    """A quantised tensor with the shape and the dtype of its decoded values.

    Subclasses compute in float32, and each value is then rounded once to `dtype`, as in the reference implementation
    of the format. Their constructors raise DamagedError if the dtype or the shape of a stored tensor does not fit.

    Attributes:
        name: Name of the decoded tensor.
        stored: The stored tensors that the values are computed from. The first one has the codes.
        block_values: Number of values to decode at a time.
        row_multiple: Number of rows that are decoded together, so that a block should have a multiple of it.
    """

    # The float32 values of a block and their temporary arrays fit a core's L2 cache.
    block_values = 1 << 17
    row_multiple = 1

    def __init__(
        self, name: str, shape: tuple[int, ...], dtype: str, stored: Iterable[Array | None]
    ) -> None:
        if dtype not in VALUE_DTYPES:
            raise ValueError(f"dtype={dtype!r} of {name!r} is not {', '.join(VALUE_DTYPES)}")
        self.name = name
        self.shape = shape
        self.dtype = dtype
        self.stored = tuple(tensor for tensor in stored if tensor is not None)

    def block_rows(self, memory_nbytes: int) -> int:
        """Return the number of rows to decode at a time."""
        max_values = memory_nbytes // (2 * DECODING_NBYTES)
        rows = min(self.block_values, max_values) // self.columns
        multiple = self.row_multiple
        if rows < multiple and multiple * self.columns <= max_values:
            return multiple
        if rows > multiple:
            rows -= rows % multiple
        return max(rows, 1)

    def read_rows(self, rows: Range, reader: DerivedReader) -> np.ndarray:
        """Return decoded rows."""
        needed = (rows[1] - rows[0]) * self.columns * DECODING_NBYTES
        reader.cache.make_room(min(needed, reader.cache.most_nbytes))
        return self.decode(rows, reader.read_matrix)

    def decode(self, rows: Range, read: MatrixReader) -> np.ndarray:
        """Return decoded rows as an array [rows, columns] of `dtype`."""
        # Hostile scales overflow to infinity, or multiply it by 0. Such values are counted with the casts.
        with np.errstate(all="ignore"):
            values = self._decode(rows, read)
            return round_to_dtype(np.ascontiguousarray(values), numpy_dtype(self.dtype))

    @abstractmethod
    def _decode(self, rows: Range, read: MatrixReader) -> FloatArray:
        """Return decoded rows in float32."""


class StoredWeights:
    """The tensors of the files by name, and which of them belong to decoded weights.

    Attributes:
        tensors: All tensors by name.
        used_names: Names of the tensors that belong to weights.
        settings_file: Name of the file with the quantisation config, for messages.
    """

    def __init__(
        self,
        tensors: Iterable[Array],
        read_payload: Callable[[Array], bytes],
        settings_file: str = "config.json",
    ) -> None:
        self.settings_file = settings_file
        self.tensors = {tensor.name: tensor for tensor in tensors}
        self.used_names: set[str] = set()
        self._read_payload = read_payload

    def names_ending(self, suffix: str) -> Iterator[tuple[str, str]]:
        """Yield each name with a suffix, and the name without it."""
        for name in self.tensors:
            if name.endswith(suffix):
                yield name, name.removesuffix(suffix)

    def tensors_of(self, dtypes: Sequence[str]) -> Iterator[Array]:
        """Yield the tensors that have one of the dtypes and are not taken yet."""
        for tensor in self.tensors.values():
            if tensor.dtype in dtypes and tensor.name not in self.used_names:
                yield tensor

    def take(self, name: str, owner: str) -> Array:
        """Return a tensor that belongs to the weight `owner`. Raise DamagedError if it is missing."""
        tensor = self.take_optional(name)
        if tensor is None:
            what = f"{quote_name(name)} is missing"
            raise DamagedError(what, f"{quote_name(owner)} is quantised", GET_AGAIN_HINT)
        return tensor

    def take_optional(self, name: str) -> Array | None:
        """Return a tensor that belongs to a weight, or None if there is none."""
        if name in self.tensors:
            self.used_names.add(name)
        return self.tensors.get(name)

    def payload(self, tensor: Array) -> bytes:
        """Return the bytes of a small tensor. Raise DamagedError if it is too large."""
        if tensor.nbytes > MAX_PAYLOAD_NBYTES:
            raise DamagedError(
                f"{quote_name(tensor.name)} has {count_text(tensor.nbytes, 'byte')}",
                f"such a tensor has at most {MAX_PAYLOAD_NBYTES:,}",
                GET_AGAIN_HINT,
            )
        return self._read_payload(tensor)


def setting(settings: Mapping[str, Any], key: str, choices: Iterable[Any], default: Any) -> Any:
    """Return a value of a quantisation config, or the default if it is missing or null.

    Raises:
        PrepError: The value is none of the choices.
    """
    value = settings.get(key)
    if value is None:
        return default
    # `True == 1`, and lists have no hash: compare type and value one by one.
    for choice in choices:
        if type(value) is type(choice) and value == choice:
            return value
    supported = ", ".join(str(choice) for choice in choices)
    raise PrepError(
        f"{key}={value!r:.60} is not supported",
        f"supported in a quantisation config: {supported}",
        USE_ORIGINAL_HINT,
    )


def shape_error(tensor: Array, why: str) -> DamagedError:
    """Return the error for a stored tensor of the wrong shape."""
    what = f"{quote_name(tensor.name)} has shape {[*tensor.shape]}"
    return DamagedError(what, why, GET_AGAIN_HINT)


def check_dims(tensor: Array, least: int) -> None:
    """Raise DamagedError if stored codes have fewer than `least` dims, or no elements."""
    if len(tensor.shape) < least or 0 in tensor.shape:
        why = f"such a tensor has {least} dims or more, and none of size 0"
        raise shape_error(tensor, why)


def checked_matrix(
    tensor: Array,
    owner: str,
    dtypes: Sequence[str],
    shapes: Sequence[tuple[int, ...]],
    columns: int | None = None,
) -> StoredMatrix:
    """Return a stored tensor of the weight `owner` as a matrix.

    Args:
        tensor: The stored tensor.
        owner: Name of the weight.
        dtypes: Dtypes that fit.
        shapes: Shapes that fit.
        columns: Columns of the matrix. The last dim by default.

    Raises:
        DamagedError: Its dtype or its shape does not fit.
    """
    if tensor.dtype not in dtypes:
        what = f"{quote_name(tensor.name)} is {tensor.dtype}"
        why = f"{quote_name(owner)} needs {' or '.join(dtypes)}"
        raise DamagedError(what, why, GET_AGAIN_HINT)
    if tensor.shape not in shapes:
        expected = " or ".join(str([*shape]) for shape in dict.fromkeys(shapes))
        raise shape_error(tensor, f"{quote_name(owner)} needs {expected}")
    if columns is None:
        columns = math.prod(tensor.shape[-1:])
    return StoredMatrix(tensor, math.prod(tensor.shape) // max(columns, 1), columns)


# Codes of 8 and 4 bits


def code_pairs(table: FloatArray) -> PairTable:
    """Return the values of each pair of 8-bit codes as 8 bytes, for `lookup`, from the values of the 256 codes."""
    first = np.tile(table, 256)
    second = np.repeat(table, 256)
    return np.stack([first, second], axis=-1).view(np.uint64)[:, 0]


def lookup(pairs: PairTable, codes: CodeArray) -> FloatArray:
    """Return the values of contiguous 8-bit codes [R, C], from a result of `code_pairs`."""
    # Two codes at a time: an index of 16 bits takes half of the time of two indices of 8 bits.
    flat = codes.reshape(-1)
    if flat.size % 2:
        flat = np.append(flat, np.uint8(0))
    values = np.take(pairs, flat.view(np.uint16), mode="clip").view(np.float32)
    return values[: codes.size].reshape(codes.shape)


def nibble_pairs(values: Sequence[float] | FloatArray, *, high_first: bool = False) -> PairTable:
    """Return a table of 256 entries: both float32 values of a byte as one uint64, from the values of 16 codes."""
    table = np.array(values, np.float32)
    bytes_ = np.arange(256)
    pair = [table[bytes_ & 15], table[bytes_ >> 4]]
    if high_first:
        pair.reverse()
    return np.ascontiguousarray(np.stack(pair, axis=-1)).view(np.uint64)[:, 0]


def lookup_nibbles(pairs: PairTable, codes: CodeArray) -> FloatArray:
    """Return the values of 4-bit codes, two per byte, from a result of `nibble_pairs`. The last dim doubles."""
    return np.take(pairs, codes, mode="clip").view(np.float32)


# Dense bit fields in int32 words, with scales of groups


def word_count(values: int, bits: int) -> int:
    """Return the number of int32 words of dense bit fields."""
    return -(-values * bits // WORD_BITS)


def bit_field_words(values: Range, bits: int) -> tuple[Range, int]:
    """Return the range of words that contain some values, and the number of values before them in these words.

    The range begins at a multiple of 32 values, where a value begins at the first bit of a word.
    """
    first = values[0] // WORD_BITS * WORD_BITS
    return (first * bits // WORD_BITS, word_count(values[1], bits)), values[0] - first


def unpack_bits(packed: np.ndarray, bits: int, count: int) -> CodeArray:
    """Return `count` unsigned codes of 1 to 8 bits of dense little-endian bit fields in contiguous words [R, W].

    Value i has the bits from bit i * bits on, e.g. with 3 bits value 10 has bits 30 and 31 of word 0 and bit 0 of
    word 1.
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


def consecutive_groups(columns: int, group_size: int) -> np.ndarray:
    """Return the group of each column. The last group may have fewer columns."""
    return np.arange(columns) // group_size


def read_group_numbers(
    column_groups: StoredMatrix, group_count: int, read: MatrixReader
) -> np.ndarray | None:
    """Return the stored group of each column, or None if it is negative: each group has consecutive columns.

    Raises:
        DamagedError: A group does not exist.
    """
    numbers = read(column_groups, (0, 1))[0]
    if (numbers < 0).any():
        return None
    largest = int(numbers.max(initial=0))
    if largest >= group_count:
        what = f"{quote_name(column_groups.tensor.name)} refers to group {largest}"
        raise DamagedError(what, f"the scales have only {group_count} groups", GET_AGAIN_HINT)
    return numbers


def scale_groups(
    values: FloatArray, offsets: FloatArray, scales: FloatArray, group_numbers: np.ndarray
) -> None:
    """Replace codes [R, C] by (codes - offset) * scale of the group of their column, in place.

    Args:
        values: Codes [R, C].
        offsets: Offset of each group, [R, G].
        scales: Scale of each group, [R, G].
        group_numbers: Group of each column.
    """
    columns = values.shape[1]
    num_groups = scales.shape[1]
    is_divided = columns % num_groups == 0
    if is_divided and np.array_equal(
        group_numbers, consecutive_groups(columns, columns // num_groups)
    ):
        blocks = values.reshape(len(values), num_groups, -1)
        blocks -= offsets[:, :, None]
        blocks *= scales[:, :, None]
        return
    values -= np.take(offsets, group_numbers, axis=1)
    values *= np.take(scales, group_numbers, axis=1)
