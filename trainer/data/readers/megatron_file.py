"""Indexed datasets of Megatron-LM: token ids in a `.bin` file, and their documents in an `.idx` file.

The format is the one of `megatron/core/datasets/indexed_dataset.py` (version 1), little-endian:

- magic `MMIDIDX` and two zero bytes, version (uint64), code of the dtype of the ids (uint8)
- number S of sequences and number D + 1 of document bounds (uint64)
- tokens of each sequence (S x int32), and its first byte in the `.bin` file (S x int64)
- first sequence of each document, and S (D + 1 x int64)
- for multimodal data the mode of each sequence (not read)

A document is all of its sequences. It does not end at end-of-sequence tokens within it.
"""

from __future__ import annotations

import itertools
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from prepcli.core.errors import PrepError
from prepcli.core.formatting import count_text
from prepcli.stores.files import open_regular_file
from trainer.data.files import DataFile, changed_file_error, io_error
from trainer.data.readers.reader import IdsChunk, Reader, ReadOptions, read_seekable, read_stream

INDEX_SUFFIX = ".idx"
IDS_SUFFIX = ".bin"
MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
# Codes of Megatron's `DType` that can be token ids.
DTYPE_NAMES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
DTYPE_CODES = {name: code for code, name in DTYPE_NAMES.items()}
# Documents per read of bounds, and bytes per read of ids.
BLOCK_DOCUMENTS = 1 << 12
CHUNK_NBYTES = 1 << 20
LENGTH_DTYPE = np.dtype("<i4")
OFFSET_DTYPE = np.dtype("<i8")


@dataclass(frozen=True, slots=True)
class MegatronIndex:
    """The header of an `.idx` file.

    Attributes:
        dtype: Dtype of the ids.
        n_sequences: Number of sequences.
        n_bounds: Number of document bounds, one more than there are documents.
    """

    dtype: np.dtype[Any]
    n_sequences: int
    n_bounds: int

    @property
    def offsets_at(self) -> int:
        """First byte of the offsets of the sequences."""
        return HEADER.size + self.n_sequences * LENGTH_DTYPE.itemsize

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
        return read_stream(file, _parse_nothing)
    if file.open_remote is not None:
        raise PrepError(
            f"cannot read {file.path}",
            "datasets of Megatron are read from local files only",
            "download the .idx and the .bin file",
        )
    return read_seekable(file, lambda stream: _read_documents(file, stream))


def _parse_nothing(stream: BinaryIO) -> Iterator[IdsChunk]:
    """Yield nothing: the documents of a stream of ids are in another file."""
    yield from ()


def _read_documents(file: DataFile, stream: BinaryIO) -> Iterator[IdsChunk]:
    """Yield the ids of each document.

    Raises:
        PrepError: The index is malformed, or has only a part of the ids.
    """
    index = _read_header(file, stream)
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
                    yield from _read_ids(path, ids, index.dtype, start=start, end=end)
            nbytes = ids.seek(0, os.SEEK_END)
    except OSError as error:
        raise io_error(path, error) from error
    if nbytes != end:
        why = f"its documents end at byte {end:,} of {path.name}, which has {nbytes:,}"
        raise _malformed_error(file, why)


def _read_header(file: DataFile, stream: BinaryIO) -> MegatronIndex:
    """Return the header of an `.idx` file. Raise PrepError if it is invalid."""
    data = stream.read(HEADER.size)
    if len(data) < HEADER.size or not data.startswith(MAGIC):
        hint = "name the .idx file. Its .bin file must be in the same folder"
        raise PrepError(f"{file.path} is not an index of Megatron", "its magic is missing", hint)
    _, version, code, n_sequences, n_bounds = HEADER.unpack(data)
    if version != VERSION or code not in DTYPE_NAMES:
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
    """Return the first byte of each sequence of a block of documents, and the end of the last one.

    Args:
        file: The index.
        stream: Its content.
        index: Its header.
        bounds: Bounds of the documents.
        first_byte: End of the sequences before the block.
    """
    first = int(bounds[0])
    count = int(bounds[-1]) - first
    lengths_at = HEADER.size + first * LENGTH_DTYPE.itemsize
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


def _read_ids(
    path: Path, stream: BinaryIO, dtype: np.dtype[Any], *, start: int, end: int
) -> Iterator[IdsChunk]:
    """Yield the ids of a document in chunks. The last chunk ends it."""
    stream.seek(start)
    # An empty document is one chunk without ids.
    for low in range(start, max(end, start + 1), CHUNK_NBYTES):
        high = min(low + CHUNK_NBYTES, end)
        data = stream.read(high - low)
        if len(data) < high - low:
            why = f"its index has ids up to byte {end:,}"
            raise PrepError(f"{path} is cut short", why, "get the file again")
        yield IdsChunk(
            np.frombuffer(data, dtype),
            str(path),
            low // dtype.itemsize,
            nbytes=len(data),
            ends_document=high == end,
            ends_at_eos=False,
        )


def _malformed_error(file: DataFile, why: str) -> PrepError:
    return PrepError(f"{file.path} is malformed", why, "write the dataset again with Megatron-LM")


MEGATRON_READER = Reader((INDEX_SUFFIX,), _read_dataset, has_ids=True, companion_suffix=IDS_SUFFIX)
