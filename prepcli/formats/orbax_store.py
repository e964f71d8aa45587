"""Where an Orbax item keeps its values: in one OCDBT database, or in a folder an array and a file a chunk.

Either is read into one form: of each array its document, and what is stored of it by key.
"""

from __future__ import annotations

import itertools
import math
import re
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np

from prepcli.errors import PrepError
from prepcli.formats.codecs import CRC32C_NBYTES
from prepcli.formats.ocdbt import ValueLocation
from prepcli.formats.ocdbt_read import read_ocdbt_index
from prepcli.formats.untrusted import list_folder, quote_name, read_bytes, stat_file
from prepcli.formats.zarr import ZARR_JSON, ZARRAY, ChunkIndex, ZarrArray, ZarrSharding, broken_document_error

MAX_VALUES = 1 << 21  # of an item: far above any model; a small hostile index may stand for more
MAX_DOCUMENT_NBYTES = 1 << 20
MAX_SHARD_INDEX_NBYTES = 16 << 20  # of a shard
_ABSENT = 2**64 - 1


@dataclass(frozen=True, slots=True)
class StoredRange:
    """`nbytes` bytes from `offset` of file number `file` of the item."""

    file: int
    offset: int
    nbytes: int


StoredValue = StoredRange | bytes  # a place, or the bytes themselves
ChunkTable = dict[ChunkIndex, StoredValue]  # by the index in the array's grid


class OrbaxStore:
    """What an item holds by array and key; `files` are those that places number."""

    def __init__(self, folder: Path, names: Iterable[str], uses_ocdbt: bool, uses_zarr3: bool) -> None:
        """Read the index, or the folders of the arrays `names`. PrepError for what is broken or beyond measure."""
        self.folder, self._document = folder, ZARR_JSON if uses_zarr3 else ZARRAY
        self._paths: list[str] = []
        self._numbers: dict[str, int] = {}  # of the paths
        self._chunks = 0
        self.values: dict[str, dict[str, StoredValue]] = {}
        found = self._in_database() if uses_ocdbt else self._in_folders(names)
        for name, key, value in found:
            self.count_chunks(1)
            self.values.setdefault(name, {})[key] = value
        self.files = tuple(folder / path for path in self._paths)

    def count_chunks(self, chunks: int) -> None:
        """Count values, and chunks that are parts of one; PrepError for more than any model has."""
        self._chunks += chunks
        if self._chunks > MAX_VALUES:
            what = f"{self.folder} says that it holds more than {MAX_VALUES:,} chunks"
            raise PrepError(what, "prep takes no more")

    def _in_database(self) -> Iterator[tuple[str, str, StoredValue]]:
        for key, value in read_ocdbt_index(self.folder):
            name, rest = self._parted(key.decode(errors="replace"))
            if isinstance(value, ValueLocation):
                value = StoredRange(self._number(value.path), value.offset, value.nbytes)
            yield name, rest, value

    def _parted(self, key: str) -> tuple[str, str]:
        """The name of an array, which may hold slashes, and what it has there."""
        if self._document == ZARR_JSON and (found := _OF_A_CHUNK.fullmatch(key)):
            return found[1], found[2]
        name, _, rest = key.rpartition("/")
        return name, rest

    def _number(self, path: str) -> int:
        number = self._numbers.setdefault(path, len(self._paths))
        if number == len(self._paths):
            self._paths.append(path)
        return number

    def _in_folders(self, names: Iterable[str]) -> Iterator[tuple[str, str, StoredValue]]:
        for name in names:
            if not name or {"", ".", ".."} & {*name.split("/")} or "\0" in name:
                raise PrepError(f"{quote_name(name)} cannot name a folder of {self.folder}", "it would lie outside")
            folder = self.folder / name
            for key in _files_below(folder):
                nbytes = stat_file(folder / key).st_size
                yield name, key, StoredRange(self._number(f"{name}/{key}"), 0, nbytes)

    def pop_document(self, name: str) -> bytes:
        """The text of an array's document, which is taken out of its values."""
        value = self.values.get(name, {}).pop(self._document, None)
        if value is None:
            why = f"the tree lists it, but it has no {self._document}"
            raise PrepError(f"{quote_name(name)} is not in the index of {self.folder}", why)
        try:
            return self.read_value(value, MAX_DOCUMENT_NBYTES)
        except ValueError as error:
            raise broken_document_error(quote_name(name), self._document, str(error)) from error

    @property
    def document_name(self) -> str:
        return self._document

    def read_value(self, value: StoredValue, max_nbytes: int) -> bytes:
        """All of a small value. ValueError where it is no such, or not in its file."""
        if isinstance(value, bytes):
            return value
        path = self.folder / self._paths[value.file]
        if value.nbytes > max_nbytes or value.offset + value.nbytes > stat_file(path).st_size:
            raise ValueError(f"its {value.nbytes:,} bytes are not in {path}")
        return read_bytes(path, value.offset, value.nbytes)


_OF_A_CHUNK = re.compile(r"(.*)/(c(?:[/.][0-9]+)*)", re.DOTALL)


def _files_below(folder: Path) -> Iterator[str]:
    """Paths of all files of an array, `/` between parts."""
    waiting = [""]
    while waiting:
        below = waiting.pop()
        if below.count("/") > 40:
            raise PrepError(f"{folder} holds folders in folders", "chunks do not lie so deep")
        for name in list_folder(folder / below):
            path = f"{below}{name}"
            if (folder / path).is_dir() and not (folder / path).is_symlink():
                waiting.append(f"{path}/")
            else:
                yield path


def build_chunk_table(
    name: str, zarr: ZarrArray, values: Mapping[str, StoredValue], store: OrbaxStore, is_complete: bool
) -> ChunkTable:
    """The chunks that are stored of an array, those in shards one by one; `complete`: all should be.

    PrepError for a chunk that is missing, unless it then stands for zeros, and for keys that are none of its chunks.
    """
    missing = math.prod(zarr.stored_grid) - len(values)
    if missing > 0 and not is_complete and zarr.missing_is_zero:
        found = {index: values[key] for index, key in _keys_there(zarr, values)}
    else:
        found = _all_keys(name, zarr, values, is_complete)
    if len(values) > len(found):
        extra = next(iter(values.keys() - {zarr.chunk_key(index) for index in found}))
        raise PrepError(f"the index of {name} has chunk {quote_name(extra)}", f"its grid is {zarr.stored_grid}")
    return dict(_in_shards(name, zarr, zarr.sharding, found, store, is_complete)) if zarr.sharding else found


def _all_keys(name: str, zarr: ZarrArray, values: Mapping[str, StoredValue], complete: bool) -> ChunkTable:
    found: ChunkTable = {}
    for index in itertools.islice(_indices(zarr.stored_grid), len(values) + 1):  # a grid may claim to be endless
        if (value := values.get(zarr.chunk_key(index))) is None:
            raise _missing(name, zarr.chunk_key(index), complete)
        found[index] = value
    return found


def _indices(grid: Sequence[int]) -> Iterator[ChunkIndex]:
    """Every index of a grid in C order, none ahead of its time."""
    if not grid:
        yield ()
        return
    for outer in range(grid[0]):
        for inner in _indices(grid[1:]):
            yield (outer, *inner)


def _missing(name: str, key: str, complete: bool) -> PrepError:
    why = "" if complete else "it was left out, as chunks of the fill value are, which is not 0"
    return PrepError(f"the index of {name} misses chunk {key}", why)


def _keys_there(zarr: ZarrArray, values: Mapping[str, StoredValue]) -> Iterator[tuple[ChunkIndex, str]]:
    """The indices whose keys are there, found from the keys: the grid may be far larger."""
    for key in values:
        index = tuple(int(digits) for digits in re.findall("[0-9]+", key) if len(digits) < 19)
        index = index if zarr.shape else ()
        inside = len(index) == len(zarr.shape) and all(i < n for i, n in zip(index, zarr.stored_grid))
        if inside and zarr.chunk_key(index) == key:
            yield index, key


def _in_shards(
    name: str, zarr: ZarrArray, shards: ZarrSharding, values: ChunkTable, store: OrbaxStore, complete: bool
) -> Iterator[tuple[ChunkIndex, StoredValue]]:
    parts = tuple(whole // part for whole, part in zip(shards.shard_shape, zarr.chunk_shape))
    grid = tuple(-(-n // c) for n, c in zip(zarr.shape, zarr.chunk_shape))
    for outer, value in values.items():
        store.count_chunks(math.prod(parts))
        table = _table(name, zarr.chunk_key(outer), shards, math.prod(parts), value, store)
        for inner, (offset, nbytes) in zip(np.ndindex(parts), table):
            index = tuple(o * n + i for o, n, i in zip(outer, parts, inner))
            if all(i < n for i, n in zip(index, grid)):
                if offset >= 0:
                    yield index, _part(value, offset, nbytes)
                elif complete or not zarr.missing_is_zero:
                    raise _missing(name, f"{'.'.join(map(str, index))} of shard {zarr.chunk_key(outer)}", complete)


def _part(value: StoredValue, offset: int, nbytes: int) -> StoredValue:
    if isinstance(value, bytes):
        return value[offset : offset + nbytes]
    return StoredRange(value.file, value.offset + offset, nbytes)


def _table(
    name: str, key: str, shards: ZarrSharding, count: int, value: StoredValue, store: OrbaxStore
) -> list[tuple[int, int]]:
    """Offset and bytes of each chunk of a shard; offset -1: it has none."""
    total = len(value) if isinstance(value, bytes) else value.nbytes
    nbytes = 16 * count + CRC32C_NBYTES * shards.has_checksum
    what = f"shard {key} of {name}"
    if nbytes > min(total, MAX_SHARD_INDEX_NBYTES):
        raise PrepError(f"{what} is broken", f"its table takes {nbytes:,} bytes, it has {total:,}")
    try:
        text = store.read_value(_part(value, total - nbytes if shards.index_is_at_end else 0, nbytes), nbytes)
    except ValueError as error:
        raise PrepError(f"{what} is broken", str(error)) from error
    if shards.has_checksum and text[-CRC32C_NBYTES:] != struct.pack("<I", google_crc32c.value(text[:-CRC32C_NBYTES])):
        raise PrepError(f"{what} is broken", "the checksum of its table does not match", "copy the checkpoint again")
    table: list[Any] = np.frombuffer(text, "<u8", 2 * count).reshape(-1, 2).tolist()
    found = [(-1, 0) if offset == nbytes == _ABSENT else (offset, nbytes) for offset, nbytes in table]
    if max((offset + nbytes for offset, nbytes in found), default=0) > total or sum(n for _, n in found) > total:
        raise PrepError(f"{what} is broken", f"its table names bytes beyond its {total:,}")
    return found
