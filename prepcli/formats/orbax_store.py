"""Read the key-value store of an Orbax item: one OCDBT database, or one folder per array with one file per chunk.

Both are read into the same form: the metadata document of each array, and its stored values by key.
"""

from __future__ import annotations

import itertools
import math
import operator
import re
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np

from prepcli.algebra.grids import ChunkGrid
from prepcli.core.errors import GET_AGAIN_HINT, DamagedError, PrepError
from prepcli.formats.codecs import CRC32C_NBYTES
from prepcli.formats.ocdbt import ValueLocation
from prepcli.formats.ocdbt_read import BeforeRead, ignore_read, read_ocdbt_index
from prepcli.formats.orbax import ZARRAY
from prepcli.formats.untrusted import (
    list_folder,
    quote_name,
    read_bytes,
    stat_file,
    stat_indexed_file,
)
from prepcli.formats.zarr import (
    ZARR_JSON,
    ChunkIndex,
    ZarrArray,
    ZarrSharding,
    broken_document_error,
)
from prepcli.stores.reading import resolve_named_path

# Values of an item: far above any model. A small malicious index may claim more.
MAX_VALUES = 1 << 21
MAX_DOCUMENT_NBYTES = 1 << 20
# Size of a shard's index with 2^20 chunks of 16 bytes.
MAX_SHARD_INDEX_NBYTES = 16 << 20
# In zarr's codec `sharding_indexed`, the offset and the size of a chunk not stored.
_ABSENT_CHUNK = 2**64 - 1


@dataclass(frozen=True, slots=True)
class StoredRange:
    """Byte range of a value in file number `file` of the item."""

    file: int
    offset: int
    nbytes: int


StoredValue = StoredRange | bytes  # a location, or the bytes themselves
ChunkTable = dict[ChunkIndex, StoredValue]  # by index in the array's grid


class OrbaxStore:
    """Stored values of an item by array and key. `files` lists the files that `StoredRange.file` refers to."""

    def __init__(
        self,
        folder: Path,
        names: Iterable[str],
        *,
        uses_ocdbt: bool,
        uses_zarr3: bool,
        before_read: BeforeRead = ignore_read,
    ) -> None:
        """Read the index of an item, or the folders of its arrays.

        Args:
            folder: Folder of the item.
            names: Names of the arrays, if they are folders.
            uses_ocdbt: Whether the values are in an OCDBT database.
            uses_zarr3: Whether the arrays are of zarr 3.
            before_read: Called with each location in a data file before it is read.

        Raises:
            PrepError: The index is invalid or too large.
        """
        self.folder = folder
        self._before_read = before_read
        self._document = ZARR_JSON if uses_zarr3 else ZARRAY
        self._paths: list[str] = []
        self._numbers: dict[str, int] = {}  # file number by path
        self._chunks = 0
        # Metadata document of each array, if arrays are folders. It is no data file.
        self._document_paths: dict[str, Path] = {}
        self.values: dict[str, dict[str, StoredValue]] = {}
        if uses_ocdbt:
            values_by_key = self._iter_database()
        else:
            values_by_key = self._iter_folders(names)
        for name, key, value in values_by_key:
            self.count_chunks(1)
            self.values.setdefault(name, {})[key] = value
        self.files = tuple(folder / path for path in self._paths)

    def count_chunks(self, chunks: int) -> None:
        """Add to the total of values and of chunks in shards. Raise PrepError if the total exceeds `MAX_VALUES`."""
        self._chunks += chunks
        if self._chunks > MAX_VALUES:
            what = f"{self.folder} claims more than {MAX_VALUES:,} chunks"
            raise PrepError(what, "that is the limit of prep", "save it again in larger chunks")

    def _iter_database(self) -> Iterator[tuple[str, str, StoredValue]]:
        for key, value in read_ocdbt_index(self.folder, self._before_read):
            name, array_key = self._split_key(key.decode(errors="replace"))
            if isinstance(value, ValueLocation):
                value = StoredRange(self._file_number(value.path), value.offset, value.nbytes)
            yield name, array_key, value

    def _split_key(self, key: str) -> tuple[str, str]:
        """Split a key into the name of an array (slashes are allowed) and the rest."""
        if self._document == ZARR_JSON and (match := _CHUNK_KEY.fullmatch(key)):
            return match[1], match[2]
        name, _, rest = key.rpartition("/")
        return name, rest

    def _file_number(self, path: str) -> int:
        number = self._numbers.setdefault(path, len(self._paths))
        if number == len(self._paths):
            self._paths.append(path)
        return number

    def _iter_folders(self, names: Iterable[str]) -> Iterator[tuple[str, str, StoredValue]]:
        for name in names:
            folder = resolve_named_path(self.folder, name, f"the tree of {self.folder}")
            self.values[name] = {}
            for key in _iter_files(folder):
                if key == self._document:
                    self._document_paths[name] = folder / key
                    continue
                nbytes = stat_file(folder / key).st_size
                yield name, key, StoredRange(self._file_number(f"{name}/{key}"), 0, nbytes)

    def pop_document(self, name: str) -> bytes:
        """Remove the metadata document of an array from its values and return its text."""
        path = self._document_paths.get(name)
        value = self.values.get(name, {}).pop(self._document, None)
        if path is None and value is None:
            why = f"the tree lists it, but it has no {self._document}"
            raise DamagedError(
                f"{quote_name(name)} is not in the index of {self.folder}", why, GET_AGAIN_HINT
            )
        try:
            if path is not None:
                return _read_document(path)
            assert value is not None
            return self.read_value(value, MAX_DOCUMENT_NBYTES)
        except ValueError as error:
            raise broken_document_error(quote_name(name), self._document, str(error)) from error

    @property
    def metadata_file_name(self) -> str:
        """File name of an array's metadata document: `zarr.json` or `.zarray`."""
        return self._document

    def read_value(self, value: StoredValue, max_nbytes: int) -> bytes:
        """Return the bytes of a value. Raise ValueError if it exceeds `max_nbytes` or its file."""
        if isinstance(value, bytes):
            return value
        path = self.folder / self._paths[value.file]
        if (
            value.nbytes > max_nbytes
            or value.offset + value.nbytes > stat_indexed_file(path).st_size
        ):
            raise ValueError(f"its {value.nbytes:,} bytes are not in {path}")
        self._before_read(ValueLocation(self._paths[value.file], value.offset, value.nbytes))
        return read_bytes(path, value.offset, value.nbytes)


def _read_document(path: Path) -> bytes:
    """Return the content of a metadata document. Raise ValueError if it is too large."""
    nbytes = stat_file(path).st_size
    if nbytes > MAX_DOCUMENT_NBYTES:
        raise ValueError(f"it has {nbytes:,} bytes, the limit is {MAX_DOCUMENT_NBYTES:,}")
    return read_bytes(path, 0, nbytes)


# A key of zarr 3 has slashes in both parts: `layers/attn/c/0/1` is chunk `c/0/1` of `layers/attn`.
_CHUNK_KEY = re.compile(r"(.*)/(c(?:[/.][0-9]+)*)", re.DOTALL)


def _iter_files(folder: Path) -> Iterator[str]:
    """Yield the relative paths of all files of an array. Links to folders are not followed."""
    pending = [""]
    while pending:
        prefix = pending.pop()
        if prefix.count("/") > 40:
            raise PrepError(
                f"{folder} has more than 40 nested folders",
                "zarr does not nest chunks that deep",
                GET_AGAIN_HINT,
            )
        for name in list_folder(folder / prefix):
            path = f"{prefix}{name}"
            if (folder / path).is_dir() and not (folder / path).is_symlink():
                pending.append(f"{path}/")
            else:
                yield path


def build_chunk_table(
    name: str,
    zarr: ZarrArray,
    values: Mapping[str, StoredValue],
    store: OrbaxStore,
    is_complete: bool,
) -> ChunkTable:
    """Return the stored chunks of an array by index. Shards are split into their chunks.

    Args:
        name: Quoted name of the array for errors.
        zarr: Parsed metadata document of the array.
        values: Stored values of the array by key.
        store: Source of the values.
        is_complete: Whether every chunk must be stored.

    Raises:
        PrepError: A chunk is missing and does not read as zeros, or a key is not a chunk of the array.
    """
    # A grid of a malicious document may have 2^60 chunks. It is enumerated only as far as there
    # are stored values; otherwise the indices are parsed from the keys.
    missing = math.prod(zarr.stored_grid) - len(values)
    if missing > 0 and not is_complete and zarr.missing_is_zero:
        chunks = {index: values[key] for index, key in _iter_present_chunks(zarr, values)}
    else:
        chunks = _require_every_chunk(name, zarr, values, is_complete)
    if len(values) > len(chunks):
        extra_key = next(iter(values.keys() - {zarr.chunk_key(index) for index in chunks}))
        what = f"the index of {name} has chunk {quote_name(extra_key)}"
        why = f"its grid is {zarr.stored_grid}"
        raise DamagedError(what, why, GET_AGAIN_HINT)
    if zarr.sharding:
        return dict(_iter_shard_chunks(name, zarr, zarr.sharding, chunks, store, is_complete))
    return chunks


def _require_every_chunk(
    name: str, zarr: ZarrArray, values: Mapping[str, StoredValue], is_complete: bool
) -> ChunkTable:
    chunks: ChunkTable = {}
    # The grid of a malicious document may be huge: at most one index more than values is visited.
    for index in itertools.islice(_iter_indices(zarr.stored_grid), len(values) + 1):
        if (value := values.get(zarr.chunk_key(index))) is None:
            raise _missing_chunk_error(name, zarr.chunk_key(index), is_complete)
        chunks[index] = value
    return chunks


def _iter_indices(grid: Sequence[int]) -> Iterator[ChunkIndex]:
    """Yield every index of a grid in C order, lazily."""
    if not grid:
        yield ()
        return
    for outer in range(grid[0]):
        for inner in _iter_indices(grid[1:]):
            yield (outer, *inner)


def _missing_chunk_error(name: str, key: str, is_complete: bool) -> PrepError:
    if is_complete:
        why = "its metadata says that every chunk is stored"
    else:
        why = "chunks equal to the fill value are not stored, and the fill value is not 0"
    return DamagedError(f"chunk {key} of {name} is missing", why, GET_AGAIN_HINT)


def _iter_present_chunks(
    zarr: ZarrArray, values: Mapping[str, StoredValue]
) -> Iterator[tuple[ChunkIndex, str]]:
    """Yield the indices of the stored chunks, parsed from the keys because the grid may be far larger."""
    for key in values:
        # The key of the only chunk of a scalar is `0` or `c`, which is not an index.
        index: ChunkIndex = ()
        if zarr.shape:
            index = _numbers_in_key(key)
        # Other spellings of a key are ignored: chunk [0, 1] is stored under `0.1`, never under `00.1`.
        if _is_in_grid(index, zarr.stored_grid) and zarr.chunk_key(index) == key:
            yield index, key


def _numbers_in_key(key: str) -> ChunkIndex:
    """Return the numbers in a key, e.g. (1, 20) for `c/1/20`."""
    numbers: list[int] = []
    for digits in re.findall("[0-9]+", key):
        # Longer numbers exceed int64, and a hostile key may have millions of digits.
        if len(digits) < 19:
            numbers.append(int(digits))
    return tuple(numbers)


def _is_in_grid(index: Sequence[int], grid: Sequence[int]) -> bool:
    """Return whether an index of non-negative numbers is one of a grid."""
    return len(index) == len(grid) and all(map(operator.lt, index, grid))


def _iter_shard_chunks(
    name: str,
    zarr: ZarrArray,
    sharding: ZarrSharding,
    values: ChunkTable,
    store: OrbaxStore,
    is_complete: bool,
) -> Iterator[tuple[ChunkIndex, StoredValue]]:
    """Yield the chunks of each shard."""
    # E.g. shape [5, 4], shards [4, 4] and chunks [2, 4]: a grid of [3, 1] chunks, [2, 1] per shard. Chunk
    # [1, 0] of shard [1, 0] is [1 * 2 + 1, 0] = [3, 0], beyond the grid: shards at the edge are padded.
    grid = ChunkGrid(zarr.shape, zarr.chunk_shape).chunk_counts
    chunks_per_shard = tuple(map(operator.floordiv, sharding.shard_shape, zarr.chunk_shape))
    count = math.prod(chunks_per_shard)
    for shard_index, value in values.items():
        store.count_chunks(count)
        shard_key = zarr.chunk_key(shard_index)
        first_index = tuple(map(operator.mul, shard_index, chunks_per_shard))
        ranges = _read_shard_index(name, shard_key, sharding, count, value, store)
        for inner_index, (offset, nbytes) in zip(np.ndindex(chunks_per_shard), ranges):
            index = tuple(map(operator.add, first_index, inner_index))
            if not _is_in_grid(index, grid):
                continue
            if offset >= 0:
                yield index, _slice_value(value, offset, nbytes)
            elif is_complete or not zarr.missing_is_zero:
                key = f"{'.'.join(map(str, index))} of shard {shard_key}"
                raise _missing_chunk_error(name, key, is_complete)


def _slice_value(value: StoredValue, offset: int, nbytes: int) -> StoredValue:
    if isinstance(value, bytes):
        return value[offset : offset + nbytes]
    return StoredRange(value.file, value.offset + offset, nbytes)


def _read_shard_index(
    name: str, key: str, sharding: ZarrSharding, count: int, value: StoredValue, store: OrbaxStore
) -> list[tuple[int, int]]:
    """Return the offset and size of each chunk of a shard. Offset -1 for a missing chunk."""
    if isinstance(value, bytes):
        shard_nbytes = len(value)
    else:
        shard_nbytes = value.nbytes
    nbytes = 16 * count + CRC32C_NBYTES * sharding.has_checksum
    shard = f"shard {key} of {name}"
    if nbytes > min(shard_nbytes, MAX_SHARD_INDEX_NBYTES):
        raise _broken_shard_error(
            shard, f"its index takes {nbytes:,} bytes, it has {shard_nbytes:,}"
        )
    try:
        index_bytes = store.read_value(
            _slice_value(value, shard_nbytes - nbytes if sharding.index_is_at_end else 0, nbytes),
            nbytes,
        )
    except ValueError as error:
        raise _broken_shard_error(shard, str(error)) from error
    if sharding.has_checksum and index_bytes[-CRC32C_NBYTES:] != struct.pack(
        "<I", google_crc32c.value(index_bytes[:-CRC32C_NBYTES])
    ):
        raise _broken_shard_error(shard, "the checksum of its index does not match")
    # The index has two uint64 per chunk of the shard, in C order: offset and size. A chunk that is
    # not stored has 2^64 - 1 twice. e.g. 2 chunks of 8 bytes, the second absent:
    #   00 00 .. 00  08 00 .. 00  ff ff .. ff  ff ff .. ff  <CRC-32C>
    entries: list[Any] = np.frombuffer(index_bytes, "<u8", 2 * count).reshape(-1, 2).tolist()
    ranges: list[tuple[int, int]] = []
    last_stop = 0
    total_nbytes = 0
    for offset, nbytes in entries:
        if offset == nbytes == _ABSENT_CHUNK:
            ranges.append((-1, 0))
            continue
        ranges.append((offset, nbytes))
        last_stop = max(last_stop, offset + nbytes)
        total_nbytes += nbytes
    # Many chunks that share the same bytes would decode to more than the file has.
    if max(last_stop, total_nbytes) > shard_nbytes:
        raise _broken_shard_error(
            shard, f"its index refers to bytes beyond its size of {shard_nbytes:,}"
        )
    return ranges


def _broken_shard_error(shard: str, why: str) -> DamagedError:
    return DamagedError(f"{shard} is broken", why, GET_AGAIN_HINT)
