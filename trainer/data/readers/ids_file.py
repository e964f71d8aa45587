"""Files of token ids: `.npy` arrays, and headerless `.bin` files of little-endian integers."""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Iterator
from typing import Any, BinaryIO

import numpy as np

from prepcli.core.errors import Key, PrepError, Text
from prepcli.core.formatting import count_text
from trainer.data.files import DataFile
from trainer.data.readers.reader import IdsChunk, Reader, ReadOptions, read_stream

# First bytes of an .npy file: 6 of the magic and 2 of the version.
MAGIC_NBYTES = 8
# Limit of NumPy for headers, which it parses as Python literals.
MAX_HEADER_NBYTES = 10_000
# Maximum bytes of ids that are read at once.
READ_NBYTES = 1 << 20
MAX_DIMS = 2
ARRAY_HINT = "pass an array of integers with one dimension, or with two and one document per row"


def _read_ids(file: DataFile, options: ReadOptions) -> Iterator[IdsChunk]:
    """Yield the ids of a file in chunks."""
    if str(file.path).endswith(".npy"):
        return read_stream(file, lambda stream: _parse_npy(file, stream))
    dtype = np.dtype(options.ids_dtype).newbyteorder("<")
    return read_stream(
        file, lambda stream: _read_chunks(file, stream, dtype, n_ids=_count_ids(file, dtype))
    )


def _count_ids(file: DataFile, dtype: np.dtype[Any]) -> int:
    """Return the number of ids in a file without a header."""
    if file.nbytes % dtype.itemsize:
        why = f"it has {count_text(file.nbytes, 'byte')}, and each {dtype.name} id has {dtype.itemsize}"
        hint = Text(Key("data.ids_dtype"), " sets the dtype")
        raise PrepError(f"{file.path} ends with an incomplete id", why, hint)
    return file.nbytes // dtype.itemsize


def _parse_npy(file: DataFile, stream: BinaryIO) -> Iterator[IdsChunk]:
    """Yield the ids of an array, row by row if it has two dimensions."""
    shape, dtype = _read_npy_header(file, stream)
    n_ids = math.prod(shape)
    if n_ids * dtype.itemsize > file.nbytes:
        why = f"it has {count_text(file.nbytes, 'byte')}, and its header declares the shape {shape!r:.60}"
        raise PrepError(f"{file.path} is cut short", why, "get the file again")
    if not n_ids:
        # An array of shape [N, 0] declares N rows without ids, for any N.
        return
    if len(shape) == 1:
        yield from _read_chunks(file, stream, dtype, n_ids=shape[0])
    else:
        for row in range(shape[0]):
            yield from _read_chunks(file, stream, dtype, n_ids=shape[1], first=row * shape[1])


def _read_npy_header(file: DataFile, stream: BinaryIO) -> tuple[tuple[int, ...], np.dtype[Any]]:
    formats = np.lib.format
    try:
        header = io.BytesIO(_read_npy_prefix(stream))
        version = formats.read_magic(header)
        read_header = formats.read_array_header_2_0
        if version == (1, 0):
            read_header = formats.read_array_header_1_0
        with warnings.catch_warnings():
            # NumPy warns of headers that Python 2 wrote.
            warnings.simplefilter("ignore")
            shape, is_fortran, dtype = read_header(header)
    except Exception as error:
        # NumPy parses the header as a Python expression, so the error may come from Python's parser.
        why = str(error).partition("\n")[0] or type(error).__name__
        raise PrepError(f"{file.path} is not a NumPy array", f"{why:.200}", ARRAY_HINT) from error
    if any(type(extent) is not int or extent < 0 for extent in shape):
        raise PrepError(
            f"{file.path} is not a NumPy array", f"its shape is {shape!r:.60}", ARRAY_HINT
        )
    if dtype.kind not in "iu" or not 1 <= len(shape) <= MAX_DIMS or (is_fortran and len(shape) > 1):
        order = " in Fortran order" if is_fortran else ""
        raise PrepError(
            f"{file.path} has no token ids", f"it is {dtype.name} {list(shape)}{order}", ARRAY_HINT
        )
    return shape, dtype


def _read_npy_prefix(stream: BinaryIO) -> bytes:
    """Read the bytes before the values: magic, version, length of the header, header.

    Raises:
        ValueError: The header is too long.
    """
    start = stream.read(MAGIC_NBYTES)
    # Version 1 stores the length of the header in 2 bytes, later versions in 4.
    length_nbytes = 2 if start[-2:-1] == b"\x01" else 4
    length = stream.read(length_nbytes)
    nbytes = int.from_bytes(length, "little")
    if nbytes > MAX_HEADER_NBYTES:
        raise ValueError(
            f"its header has {count_text(nbytes, 'byte')}, the limit is {MAX_HEADER_NBYTES:,}"
        )
    return start + length + stream.read(nbytes)


def _read_chunks(
    file: DataFile, stream: BinaryIO, dtype: np.dtype[Any], *, n_ids: int, first: int = 0
) -> Iterator[IdsChunk]:
    """Yield ids in chunks. The last chunk ends a document."""
    chunk_ids = READ_NBYTES // dtype.itemsize
    for start in range(0, n_ids, chunk_ids):
        count = min(chunk_ids, n_ids - start)
        data = stream.read(count * dtype.itemsize)
        if len(data) < count * dtype.itemsize:
            raise PrepError(
                f"{file.path} is cut short",
                f"it should hold {count_text(n_ids, 'id')} and ends earlier",
                "get the file again",
            )
        ids = np.frombuffer(data, dtype)
        ends_document = start + count == n_ids
        yield IdsChunk(
            ids, str(file.path), first + start, nbytes=len(data), ends_document=ends_document
        )


IDS_READER = Reader((".npy", ".bin"), _read_ids, is_divisible=True, has_ids=True)
