"""Read the headers of GGUF files, versions 2 and 3: metadata and the table of tensors.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. A file has, in little-endian order:

    magic "GGUF", version u32, number of tensors u64, number of metadata entries u64
    entries: key, type u32, value. A string is its length u64 and its bytes, an array its type u32, length u64 and items
    tensors: name, number of dims u32, dims u64 (the last axis first), type u32, offset u64
    padding to `general.alignment`, then the data, each tensor at a multiple of the alignment

Files are untrusted: counts and lengths are compared with limits and with the rest of the file before memory is
allocated for them. Arrays stay bytes until they are used.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, BinaryIO

import numpy as np
import xxhash

from prepcli.core.errors import GET_AGAIN_HINT, DamagedError, PrepError
from prepcli.core.json_values import quote_name
from prepcli.formats.model_files import damage_hint, download_again_hint
from prepcli.stores.files import CutShortError, open_regular_file, stat_file, unreadable_error
from prepcli.stores.paths import AnyPath

SUFFIX = "gguf"
MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT_KEY = "general.alignment"
DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 1 << 20
# The largest tokenizers have 500,000 entries, and take 20 MB.
MAX_HEADER_NBYTES = 128 << 20
MAX_ENTRIES = 1 << 16
MAX_TENSORS = 1 << 20
MAX_ARRAY_ITEMS = 1 << 22
MAX_STRING_NBYTES = 16 << 20
# Limits of the specification, and of ggml.
MAX_KEY_NBYTES = (1 << 16) - 1
MAX_DIMS = 4
READ_BLOCK_NBYTES = 1 << 20

# Each part of a model is an open file.
MAX_PARTS = 200
_PART_NAME = re.compile(r"(?P<stem>.+)-\d{5}-of-(?P<count>\d{5})\.gguf")

# Values of metadata by type number. 8 is a string, and 9 an array.
NUMBER_FORMATS = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 10: "<Q", 11: "<q", 12: "<d",
}  # fmt: skip
BOOL_TYPE = 7
STRING_TYPE = 8
ARRAY_TYPE = 9


@dataclass(frozen=True, slots=True)
class GgmlType:
    """A type of tensors: its name, the values per block, and the bytes per block."""

    name: str
    values: int
    nbytes: int


GGML_TYPES: Mapping[int, GgmlType] = {
    0: GgmlType("F32", 1, 4),
    1: GgmlType("F16", 1, 2),
    2: GgmlType("Q4_0", 32, 18),
    3: GgmlType("Q4_1", 32, 20),
    6: GgmlType("Q5_0", 32, 22),
    7: GgmlType("Q5_1", 32, 24),
    8: GgmlType("Q8_0", 32, 34),
    9: GgmlType("Q8_1", 32, 40),
    10: GgmlType("Q2_K", 256, 84),
    11: GgmlType("Q3_K", 256, 110),
    12: GgmlType("Q4_K", 256, 144),
    13: GgmlType("Q5_K", 256, 176),
    14: GgmlType("Q6_K", 256, 210),
    15: GgmlType("Q8_K", 256, 292),
    16: GgmlType("IQ2_XXS", 256, 66),
    17: GgmlType("IQ2_XS", 256, 74),
    18: GgmlType("IQ3_XXS", 256, 98),
    19: GgmlType("IQ1_S", 256, 50),
    20: GgmlType("IQ4_NL", 32, 18),
    21: GgmlType("IQ3_S", 256, 110),
    22: GgmlType("IQ2_S", 256, 82),
    23: GgmlType("IQ4_XS", 256, 136),
    24: GgmlType("I8", 1, 1),
    25: GgmlType("I16", 1, 2),
    26: GgmlType("I32", 1, 4),
    27: GgmlType("I64", 1, 8),
    28: GgmlType("F64", 1, 8),
    29: GgmlType("IQ1_M", 256, 56),
    30: GgmlType("BF16", 1, 2),
    34: GgmlType("TQ1_0", 256, 54),
    35: GgmlType("TQ2_0", 256, 66),
    39: GgmlType("MXFP4", 32, 17),
    40: GgmlType("NVFP4", 64, 36),
    41: GgmlType("Q1_0", 128, 18),
}


@dataclass(frozen=True, slots=True)
class GgufArray:
    """An array of metadata as its bytes.

    Attributes:
        type: Number of the type of the items.
        count: Number of items.
        data: Bytes of the items.
    """

    type: int
    count: int
    data: bytes

    def strings(self) -> list[str]:
        """Return the items of an array of strings. Raise ValueError for another type, and for invalid UTF-8."""
        if self.type != STRING_TYPE:
            raise ValueError("it is not an array of strings")
        items: list[str] = []
        offset = 0
        for _ in range(self.count):
            start = offset + 8
            offset = start + int.from_bytes(self.data[offset:start], "little")
            items.append(self.data[start:offset].decode())
        return items

    def numbers(self) -> np.ndarray:
        """Return the items of an array of numbers. Raise ValueError for another type."""
        if self.type not in NUMBER_FORMATS:
            raise ValueError("it is not an array of numbers")
        return np.frombuffer(self.data, NUMBER_FORMATS[self.type])


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """An entry of the table of tensors.

    Attributes:
        name: Name in the file.
        type: Type of the blocks.
        shape: Shape in C order.
        offset: Offset from the start of the file.
        nbytes: Size in bytes.
    """

    name: str
    type: GgmlType
    shape: tuple[int, ...]
    offset: int
    nbytes: int


GgufValue = int | float | bool | str | GgufArray
GgufMetadata = Mapping[str, GgufValue]


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Header of a GGUF file.

    Attributes:
        file_name: Name of the file.
        size: Size of the whole file in bytes.
        mtime_ns: Time of the last change.
        digest: Hexadecimal XXH3-128 of the bytes before the data.
        metadata: Numbers, booleans, strings and arrays, by key.
        tensors: Tensors, in the order of their data.
    """

    file_name: str
    size: int
    mtime_ns: int
    digest: str
    metadata: GgufMetadata
    tensors: tuple[GgufTensor, ...]


def part_names(name: str) -> list[str]:
    """Return the names of all part files of a model, or the name of its only file.

    >>> part_names("m-00002-of-00002.gguf")
    ['m-00001-of-00002.gguf', 'm-00002-of-00002.gguf']
    """
    match = _PART_NAME.fullmatch(name)
    if match is None or not 1 <= int(match["count"]) <= MAX_PARTS:
        return [name]
    stem = match["stem"]
    count = int(match["count"])
    return [f"{stem}-{number:05}-of-{count:05}.gguf" for number in range(1, count + 1)]


def read_gguf_header(path: AnyPath) -> GgufHeader:
    """Read the header of a GGUF file.

    Raises:
        PrepError: The file is unreadable, or its version is not supported.
        DamagedError: The header is broken. The error names the key or the tensor.
    """
    file_stat = stat_file(path)
    try:
        with open_regular_file(path, buffering=0) as file:
            cursor = _Cursor(file, file_stat.st_size)
            metadata, tensors = _read_header(path, cursor)
    except OSError as error:
        raise unreadable_error(path, error) from error
    except ValueError as error:
        raise DamagedError(
            f"{path.name} has a broken header", str(error), damage_hint(path, error)
        ) from error
    end = cursor.offset
    if tensors:
        end = tensors[-1].offset + tensors[-1].nbytes
    # The last tensor is padded too, to at most MAX_ALIGNMENT.
    if not end <= file_stat.st_size < end + MAX_ALIGNMENT:
        why = f"its tensors end at byte {end:,}, the file has {file_stat.st_size:,}"
        if file_stat.st_size > end:
            raise DamagedError(f"{path.name} is too long", why, GET_AGAIN_HINT)
        raise DamagedError(f"{path.name} is cut short", why, download_again_hint(path))
    digest = xxhash.xxh3_128_hexdigest(cursor.header)
    return GgufHeader(
        path.name, file_stat.st_size, file_stat.st_mtime_ns, digest, metadata, tensors
    )


class _Cursor:
    """The bytes of a file from its start, read as far as they are parsed."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file = file
        self._size = min(size, MAX_HEADER_NBYTES)
        self._buffer = bytearray()
        self.offset = 0

    @property
    def header(self) -> memoryview:
        return memoryview(self._buffer)[: self.offset]

    @property
    def remaining_nbytes(self) -> int:
        """Number of bytes after the current offset, up to the end of the file or the limit of headers."""
        return self._size - self.offset

    def take(self, nbytes: int) -> bytes:
        """Return the next bytes. Raise ValueError if they are beyond the end of the file or the limit."""
        self.skip(nbytes)
        return bytes(self._buffer[self.offset - nbytes : self.offset])

    def skip(self, nbytes: int) -> None:
        """Move past the next bytes. See `take`."""
        if nbytes > self.remaining_nbytes:
            if self._size == MAX_HEADER_NBYTES:
                raise ValueError(f"it has more than {MAX_HEADER_NBYTES:,} bytes")
            raise CutShortError(f"the file ends within the header, at byte {self._size:,}")
        self.offset += nbytes
        while len(self._buffer) < self.offset:
            block = self._file.read(READ_BLOCK_NBYTES)
            if not block:
                raise CutShortError(
                    f"the file ends within the header, at byte {len(self._buffer):,}"
                )
            self._buffer += block

    def skip_strings(self, count: int) -> None:
        """Move past the next strings."""
        for _ in range(count):
            start = self.offset + 8
            if start > len(self._buffer):
                self.skip(8)
                self.offset -= 8
            nbytes = int.from_bytes(self._buffer[start - 8 : start], "little")
            if start + nbytes > len(self._buffer):
                self.skip(8 + nbytes)
            else:
                self.offset = start + nbytes

    def number(self, number_format: str) -> Any:
        return struct.unpack(number_format, self.take(struct.calcsize(number_format)))[0]

    def string(self, max_nbytes: int) -> str:
        """Return the next string."""
        nbytes = self.number("<Q")
        if nbytes > max_nbytes:
            raise ValueError(f"a string has {nbytes:,} bytes, the limit is {max_nbytes:,}")
        try:
            return self.take(nbytes).decode()
        except UnicodeError as error:
            raise ValueError("a string is not UTF-8") from error


def _read_header(path: AnyPath, cursor: _Cursor) -> tuple[GgufMetadata, tuple[GgufTensor, ...]]:
    """Return metadata and tensors. Raise ValueError if they are broken."""
    if cursor.remaining_nbytes < len(MAGIC) or cursor.take(len(MAGIC)) != MAGIC:
        raise DamagedError(
            f"{path.name} is not a GGUF file",
            "it does not begin with GGUF",
            GET_AGAIN_HINT,
        )
    version = cursor.number("<I")
    if version not in VERSIONS:
        is_big_endian = version & 0xFFFF == 0 and version != 0
        why = "it is in big-endian order" if is_big_endian else f"it has version {version:,}"
        raise PrepError(
            f"{path.name} is not supported",
            f"{why}; versions 2 and 3 in little-endian order are read",
            "convert the model with a current llama.cpp",
        )
    tensor_count = cursor.number("<Q")
    entry_count = cursor.number("<Q")
    if tensor_count > MAX_TENSORS:
        raise ValueError(f"it has {tensor_count:,} tensors, the limit is {MAX_TENSORS:,}")
    if entry_count > MAX_ENTRIES:
        raise ValueError(f"it has {entry_count:,} metadata entries, the limit is {MAX_ENTRIES:,}")
    metadata: dict[str, GgufValue] = {}
    for _ in range(entry_count):
        key = cursor.string(MAX_KEY_NBYTES)
        if key in metadata:
            raise ValueError(f"it has the key {quote_name(key)} twice")
        try:
            metadata[key] = _read_value(cursor)
        except ValueError as error:
            raise ValueError(f"the key {quote_name(key)}: {error}") from error
    alignment = metadata.get(ALIGNMENT_KEY, DEFAULT_ALIGNMENT)
    # `type`, because True is an int for `isinstance`.
    is_power = type(alignment) is int and alignment > 0 and not alignment & (alignment - 1)
    if type(alignment) is not int or not is_power or alignment > MAX_ALIGNMENT:
        what = f"the key `{ALIGNMENT_KEY}` is {alignment!r:.40}"
        raise ValueError(f"{what}, not a power of two up to {MAX_ALIGNMENT:,}")
    tensors = _read_tensors(cursor, tensor_count, alignment)
    return metadata, tensors


def _read_value(cursor: _Cursor) -> GgufValue:
    """Return the next value of metadata."""
    value_type = cursor.number("<I")
    if value_type in NUMBER_FORMATS:
        return cursor.number(NUMBER_FORMATS[value_type])
    if value_type == BOOL_TYPE:
        value = cursor.number("<B")
        if value > 1:
            raise ValueError(f"a boolean is {value}")
        return bool(value)
    if value_type == STRING_TYPE:
        return cursor.string(MAX_STRING_NBYTES)
    if value_type == ARRAY_TYPE:
        item_type = cursor.number("<I")
        count = cursor.number("<Q")
        if count > MAX_ARRAY_ITEMS:
            raise ValueError(f"an array has {count:,} items, the limit is {MAX_ARRAY_ITEMS:,}")
        start = cursor.offset
        if item_type == STRING_TYPE:
            cursor.skip_strings(count)
        elif item_type in NUMBER_FORMATS:
            cursor.skip(count * struct.calcsize(NUMBER_FORMATS[item_type]))
        elif item_type == BOOL_TYPE:
            cursor.skip(count)
        else:
            raise ValueError(f"an array of type {item_type:,} is not supported")
        return GgufArray(item_type, count, bytes(cursor.header[start:]))
    raise ValueError(f"unknown type {value_type:,}")


def _read_tensors(cursor: _Cursor, count: int, alignment: int) -> tuple[GgufTensor, ...]:
    """Return the tensors of the table, and move past the padding after it."""
    tensors: list[GgufTensor] = []
    names: set[str] = set()
    end = 0
    for _ in range(count):
        name = cursor.string(MAX_KEY_NBYTES)
        if name in names:
            raise ValueError(f"it has the tensor {quote_name(name)} twice")
        names.add(name)
        try:
            num_dims = cursor.number("<I")
            if num_dims > MAX_DIMS:
                raise ValueError(f"it has {num_dims:,} dims, the limit is {MAX_DIMS}")
            dims = [cursor.number("<Q") for _ in range(num_dims)]
            type_number = cursor.number("<I")
            offset = cursor.number("<Q")
            if type_number not in GGML_TYPES:
                raise ValueError(f"unknown type {type_number:,}")
            ggml_type = GGML_TYPES[type_number]
            # A product next to a 0 would hide an overflow.
            if math.prod(size or 1 for size in dims) * ggml_type.nbytes >= 1 << 62:
                raise ValueError(f"its shape {dims[::-1]} has too many values")
            row_values = dims[0] if dims else 1
            if row_values % ggml_type.values:
                raise ValueError(
                    f"rows of {row_values:,} values are not blocks of {ggml_type.values} of type {ggml_type.name}"
                )
            nbytes = math.prod(dims) // ggml_type.values * ggml_type.nbytes
            tensor = GgufTensor(name, ggml_type, tuple(dims[::-1]), offset, nbytes)
            # Tensors follow each other, as ggml requires.
            expected = -(-end // alignment) * alignment
            if tensor.offset != expected:
                raise ValueError(f"its offset is {tensor.offset:,}, not {expected:,}")
        except ValueError as error:
            raise ValueError(f"the tensor {quote_name(name)}: {error}") from error
        end = tensor.offset + tensor.nbytes
        tensors.append(tensor)
    padding = -cursor.offset % alignment
    if not tensors:
        # A file without tensors may end without padding.
        padding = min(padding, cursor.remaining_nbytes)
    cursor.skip(padding)
    data_start = cursor.offset
    return tuple(replace(tensor, offset=data_start + tensor.offset) for tensor in tensors)
