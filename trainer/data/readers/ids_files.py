"""Readers of files of token ids: `.npy` arrays, `.bin` files without a header, and indexed datasets of Megatron-LM.

A `.bin` file has little-endian integers. A dataset of Megatron-LM has token ids in a `.bin` file, and their documents
in an `.idx` file. The format is the one of `megatron/core/datasets/indexed_dataset.py` (version 1), little-endian:

- magic `MMIDIDX` and two zero bytes, version (uint64), code of the dtype of the ids (uint8)
- number S of sequences and number D + 1 of document bounds (uint64)
- tokens of each sequence (S x int32), and its first byte in the `.bin` file (S x int64)
- first sequence of each document, and S (D + 1 x int64)
- for multimodal data the mode of each sequence (not read)

A document is all of its sequences. It does not end at end-of-sequence tokens within it.
"""

from __future__ import annotations

import io
import itertools
import math
import os
import struct
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from prepcli.core.errors import Key, PrepError, Text
from prepcli.core.formatting import count_text
from prepcli.stores.files import open_regular_file
from trainer.data.files import DataFile, changed_file_error, io_error
from trainer.data.readers.reader import IdsChunk, Reader, ReadOptions, read_seekable, read_stream

# First bytes of an .npy file: 6 of the magic and 2 of the version.
MAGIC_NBYTES = 8
# Limit of NumPy for headers, which it parses as Python literals.
MAX_HEADER_NBYTES = 10_000
# Maximum bytes of ids that are read at once.
CHUNK_NBYTES = 1 << 20
MAX_DIMS = 2
ARRAY_HINT = "pass an array of integers with one dimension, or with two and one document per row"


def _read_ids(file: DataFile, options: ReadOptions) -> Iterator[IdsChunk]:
    """Yield the ids of a file in chunks."""
    if str(file.path).endswith(".npy"):
        return read_stream(file, lambda stream: _parse_npy(file, stream))
    dtype = np.dtype(options.ids_dtype).newbyteorder("<")
    n_ids, rest = divmod(file.nbytes, dtype.itemsize)
    if rest:
        why = f"it has {count_text(file.nbytes, 'byte')}, and each {dtype.name} id has {dtype.itemsize}"
        hint = Text(Key("data.ids_dtype"), " sets the dtype")
        raise PrepError(f"{file.path} ends with an incomplete id", why, hint)
    return read_stream(file, lambda stream: _read_chunks(file.path, stream, dtype, n_ids=n_ids))


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
        yield from _read_chunks(file.path, stream, dtype, n_ids=shape[0])
    else:
        for row in range(shape[0]):
            yield from _read_chunks(file.path, stream, dtype, n_ids=shape[1], first=row * shape[1])


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
    """Read magic, version and header of an array. Raise ValueError if the header is too long."""
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
    path: Path | str,
    stream: BinaryIO,
    dtype: np.dtype[Any],
    *,
    n_ids: int,
    first: int = 0,
    why_short: str = "",
    ends_at_eos: bool = True,
) -> Iterator[IdsChunk]:
    """Yield ids in chunks. The last chunk ends a document. No ids are one chunk."""
    chunk_ids = CHUNK_NBYTES // dtype.itemsize
    for start in range(0, max(n_ids, 1), chunk_ids):
        count = min(chunk_ids, n_ids - start)
        data = stream.read(count * dtype.itemsize)
        if len(data) < count * dtype.itemsize:
            why = why_short or f"it should hold {count_text(n_ids, 'id')} and ends earlier"
            raise PrepError(f"{path} is cut short", why, "get the file again")
        yield IdsChunk(
            np.frombuffer(data, dtype),
            str(path),
            first + start,
            nbytes=len(data),
            ends_document=start + count == n_ids,
            ends_at_eos=ends_at_eos,
        )


IDS_READER = Reader((".npy", ".bin"), _read_ids, is_divisible=True, has_ids=True)

# --- Indexed datasets of Megatron-LM
INDEX_SUFFIX = ".idx"
IDS_SUFFIX = ".bin"
INDEX_MAGIC = b"MMIDIDX\x00\x00"
INDEX_VERSION = 1
INDEX_HEADER = struct.Struct("<9sQBQQ")
# Codes of Megatron's `DType` that can be token ids.
DTYPE_NAMES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
DTYPE_CODES = {name: code for code, name in DTYPE_NAMES.items()}
# Documents per read of bounds.
BLOCK_DOCUMENTS = 1 << 12
LENGTH_DTYPE = np.dtype("<i4")
OFFSET_DTYPE = np.dtype("<i8")


@dataclass(frozen=True, slots=True)
class MegatronIndex:
    """The header of an `.idx` file."""

    dtype: np.dtype[Any]  # Dtype of the ids
    n_sequences: int  # Number of sequences
    n_bounds: int  # Number of document bounds, one more than there are documents

    @property
    def offsets_at(self) -> int:
        """First byte of the offsets of the sequences."""
        return INDEX_HEADER.size + self.n_sequences * LENGTH_DTYPE.itemsize

    @property
    def bounds_at(self) -> int:
        """First byte of the document bounds."""
        return self.offsets_at + self.n_sequences * OFFSET_DTYPE.itemsize

    @property
    def nbytes(self) -> int:
        """Size of the file without modes."""
        return self.bounds_at + self.n_bounds * OFFSET_DTYPE.itemsize


def ids_path(index: Path) -> Path:
    """Return the file with the ids of an `.idx` file."""
    return index.with_suffix(IDS_SUFFIX)


def _read_dataset(file: DataFile, options: ReadOptions) -> Iterator[IdsChunk]:
    """Yield the documents of an `.idx` file. A `.bin` file yields nothing, and only its digest is checked."""
    if str(file.path).endswith(IDS_SUFFIX):
        # Its digest is checked, and the documents are in the other file.
        return read_stream(file, _no_ids)
    if file.open_remote is not None:
        raise PrepError(
            f"cannot read {file.path}",
            "datasets of Megatron are read from local files only",
            "download the .idx and the .bin file",
        )
    return read_seekable(file, lambda stream: _read_documents(file, stream))


def _no_ids(stream: BinaryIO) -> Iterator[IdsChunk]:
    return iter(())


def _read_documents(file: DataFile, stream: BinaryIO) -> Iterator[IdsChunk]:
    """Yield the ids of each document. Raise PrepError if the index is malformed, or lacks ids."""
    index = _read_index(file, stream)
    path = ids_path(Path(file.path))
    # End of the documents so far, in the `.bin` file
    end = 0
    try:
        with open_regular_file(path) as ids:
            for first_bound in range(0, index.n_bounds - 1, BLOCK_DOCUMENTS):
                bounds = _read_bounds(file, stream, index, first_bound)
                edges = _sequence_edges(file, stream, index, bounds, first_byte=end)
                # The bounds count sequences from the start of the file, the edges from the first
                # one read here.
                starts = edges[bounds - bounds[0]].tolist()
                for start, end in itertools.pairwise(starts):
                    ids.seek(start)
                    yield from _read_chunks(
                        path,
                        ids,
                        index.dtype,
                        n_ids=(end - start) // index.dtype.itemsize,
                        first=start // index.dtype.itemsize,
                        why_short=f"its index has ids up to byte {end:,}",
                        ends_at_eos=False,
                    )
            nbytes = ids.seek(0, os.SEEK_END)
    except OSError as error:
        raise io_error(path, error) from error
    if nbytes != end:
        why = f"its documents end at byte {end:,} of {path.name}, which has {nbytes:,}"
        raise _malformed_error(file, why)


def _read_index(file: DataFile, stream: BinaryIO) -> MegatronIndex:
    """Return the header of an `.idx` file. Raise PrepError if it is invalid."""
    data = stream.read(INDEX_HEADER.size)
    if len(data) < INDEX_HEADER.size or not data.startswith(INDEX_MAGIC):
        hint = "name the .idx file. Its .bin file must be in the same folder"
        raise PrepError(f"{file.path} is not an index of Megatron", "its magic is missing", hint)
    _, version, code, n_sequences, n_bounds = INDEX_HEADER.unpack(data)
    if version != INDEX_VERSION or code not in DTYPE_NAMES:
        why = f"it has version {version} and dtype code {code}"
        raise _malformed_error(file, why)
    index = MegatronIndex(np.dtype(DTYPE_NAMES[code]).newbyteorder("<"), n_sequences, n_bounds)
    if index.nbytes > file.nbytes:
        why = f"it has {count_text(file.nbytes, 'byte')}, and its header declares {index.nbytes:,}"
        raise _malformed_error(file, why)
    return index


def _read_bounds(
    file: DataFile, stream: BinaryIO, index: MegatronIndex, first_bound: int
) -> npt.NDArray[np.int64]:
    """Return the bounds of a block of documents. Raise PrepError if they leave out a sequence."""
    count = min(BLOCK_DOCUMENTS + 1, index.n_bounds - first_bound)
    offset = index.bounds_at + first_bound * OFFSET_DTYPE.itemsize
    bounds = _read_array(file, stream, offset, OFFSET_DTYPE, count=count)
    # The next block begins with the last bound of this one.
    is_first = first_bound == 0
    is_last = first_bound + count == index.n_bounds
    if (
        (np.diff(bounds) < 0).any()
        or not 0 <= bounds[0] <= bounds[-1] <= index.n_sequences
        or (is_first and bounds[0] != 0)
        or (is_last and bounds[-1] != index.n_sequences)
    ):
        why = f"its document bounds are not ascending from 0 to its {count_text(index.n_sequences, 'sequence')}"
        raise _malformed_error(file, why)
    return bounds


def _sequence_edges(
    file: DataFile,
    stream: BinaryIO,
    index: MegatronIndex,
    bounds: npt.NDArray[np.int64],
    *,
    first_byte: int,
) -> npt.NDArray[np.int64]:
    """Return the first byte of each sequence of a block of documents from `first_byte` on, and the end of the last."""
    first = int(bounds[0])
    count = int(bounds[-1]) - first
    lengths_at = INDEX_HEADER.size + first * LENGTH_DTYPE.itemsize
    lengths = _read_array(file, stream, lengths_at, LENGTH_DTYPE, count=count)
    offsets_at = index.offsets_at + first * OFFSET_DTYPE.itemsize
    offsets = _read_array(file, stream, offsets_at, OFFSET_DTYPE, count=count)
    # Lengths have 32 bits, and their sum needs 64.
    ends = first_byte + np.cumsum(lengths, dtype=np.int64) * index.dtype.itemsize
    edges = np.concatenate([[first_byte], ends])
    if (lengths < 0).any() or (offsets != edges[:-1]).any():
        raise _malformed_error(file, "its sequences are not one after the other")
    return edges


def _read_array(
    file: DataFile, stream: BinaryIO, offset: int, dtype: np.dtype[Any], *, count: int
) -> npt.NDArray[Any]:
    """Return items at an offset of a file. Raise PrepError if the file is too short."""
    stream.seek(offset)
    data = stream.read(count * dtype.itemsize)
    if len(data) < count * dtype.itemsize:
        raise changed_file_error(file.path)
    return np.frombuffer(data, dtype)


def _malformed_error(file: DataFile, why: str) -> PrepError:
    return PrepError(f"{file.path} is malformed", why, "write the dataset again with Megatron-LM")


MEGATRON_READER = Reader((INDEX_SUFFIX,), _read_dataset, has_ids=True, companion_suffix=IDS_SUFFIX)
