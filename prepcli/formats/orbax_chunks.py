"""Chunks of the arrays of an Orbax item: where each is stored, read from an item's index and written to it.

An item has one OCDBT database, or one folder per array with one file per chunk. Both hold the metadata document of each
array, and its chunks by key, e.g. `params.embed/.zarray` and `params.embed/0.3`. Items are untrusted.
"""

from __future__ import annotations

import itertools
import math
import operator
import re
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from prepcli.algebra.grids import (
    ABSENT,
    ChunkGrid,
    ChunkIndex,
    ChunkTable,
    StoredRange,
    StoredValue,
    StridedChunks,
)
from prepcli.core.errors import GET_AGAIN_HINT, DamagedError, PrepError
from prepcli.core.json_values import quote_name
from prepcli.formats.codecs import CODECS, CRC32C_NBYTES
from prepcli.formats.ocdbt import (
    OcdbtEntry,
    ValueLocation,
    read_ocdbt_index,
)
from prepcli.formats.zarr import (
    MAX_SHARD_INDEX_NBYTES,
    ZarrArray,
    ZarrSharding,
    broken_document_error,
    encode_zarr_document,
)
from prepcli.planning.arrays import Array
from prepcli.planning.item_storage import ZARR2, ZARR3, Compression, ItemStorage
from prepcli.stores.files import (
    list_folder,
    read_bytes,
    read_small_file,
    resolve_named_path,
    stat_file,
    stat_indexed_file,
)
from prepcli.stores.paths import AnyPath, fetch_copies

# Values of an item: far above any model. A small malicious index may claim more.
MAX_VALUES = 1 << 21
MAX_DOCUMENT_NBYTES = 1 << 20
MAX_NESTED_FOLDERS = 40
# Limit of chunks without a stored value, which read as zeros.
_MAX_ABSENT_CHUNKS = 1 << 18
# Hint of errors in the arguments, which a correct plan cannot cause.
BUG_HINT = "this is a bug in prep: the checkpoint was not written"
# A key of zarr 3 has slashes in both parts: `layers/attn/c/0/1` is chunk `c/0/1` of `layers/attn`.
_ZARR3_CHUNK_KEY = re.compile(r"(.*)/(c(?:[/.][0-9]+)*)", re.DOTALL)

# Path of a leaf in the tree. A str is the key of a dict, an int the index of a list or tuple.
TreePath = tuple[str | int, ...]


StoredChunks = dict[ChunkIndex, StoredValue]  # by index in the array's grid
WrittenArray = tuple[Array, ChunkTable]  # an array to write, and the places of its chunks


class WrittenChunk(NamedTuple):
    """Location of the chunk `chunk_index` of array number `array`: `nbytes` bytes at `offset` of file number `file`."""

    array: int
    chunk_index: ChunkIndex
    file: int
    offset: int
    nbytes: int


def unplaced_array(
    path: TreePath, shape: tuple[int, ...], dtype: str, chunk_shape: tuple[int, ...]
) -> Array:
    """Return an array of an item before its chunks have places.

    Args:
        path: Path of the leaf.
        shape: Shape of the array.
        dtype: Dtype of the elements, a key of ZARR_TYPESTRS.
        chunk_shape: One extent >= 1 per axis. It need not divide the shape: the last chunk is then partly unused.
    """
    zeros = (0,) * len(shape)
    chunks = StridedChunks(0, 0, zeros, zeros)
    return Array(dotted_name(path), dtype, shape, chunk_shape, chunks, path=path)


def dotted_name(path: TreePath) -> str:
    """Return a path joined by dots. Ambiguous if a part contains a dot."""
    return ".".join(map(str, path))


def chunk_label(index: ChunkIndex) -> str:
    """Return the name of a chunk in messages, e.g. `0.3`."""
    return ZARR2.chunk_keys.key(index)


def unravel_chunk_index(grid: tuple[int, ...], chunk_number: int) -> ChunkIndex:
    """Return the index of a chunk from its number in C order, like `np.unravel_index`."""
    index: list[int] = []
    for extent in reversed(grid):
        # E.g. chunk 5 of a [2, 3] grid: divmod(5, 3) = 1, 2 -> (1, 2).
        chunk_number, i = divmod(chunk_number, extent)
        index.append(i)
    return tuple(reversed(index))


class ItemValues:
    """Stored values of an item by array and key. `files` lists the files that `StoredRange.file` refers to."""

    def __init__(
        self,
        folder: AnyPath,
        names: Iterable[str],
        storage: ItemStorage,
    ) -> None:
        """Read the index of an item, or the folders of the arrays `names`. Raise PrepError if it is invalid."""
        self.folder = folder
        self.storage = storage
        self._file_numbers: dict[str, int] = {}  # by path
        self._num_chunks = 0
        # Metadata document of each array, if arrays are folders. It is no data file.
        self._document_paths: dict[str, AnyPath] = {}
        self.by_name: dict[str, dict[str, StoredValue]] = {}
        if storage.has_chunk_files:
            values_by_key = self._iter_folders(names)
        else:
            values_by_key = self._iter_database()
        for name, key, value in values_by_key:
            self.count_chunks(1)
            self.by_name.setdefault(name, {})[key] = value
        self.files = tuple(folder / path for path in self._file_numbers)
        fetch_copies(self._document_paths.values())

    def count_chunks(self, num_chunks: int) -> None:
        """Add to the total of values and of chunks in shards. Raise PrepError if the total exceeds `MAX_VALUES`."""
        self._num_chunks += num_chunks
        if self._num_chunks > MAX_VALUES:
            what = f"{self.folder} claims more than {MAX_VALUES:,} chunks"
            raise PrepError(what, "that is the limit of prep", "save it again in larger chunks")

    def _iter_database(self) -> Iterator[tuple[str, str, StoredValue]]:
        is_zarr3 = self.storage.zarr == ZARR3
        for key, value in read_ocdbt_index(self.folder):
            # The name of an array may have slashes.
            text = key.decode(errors="replace")
            if is_zarr3 and (match := _ZARR3_CHUNK_KEY.fullmatch(text)):
                name, array_key = match[1], match[2]
            else:
                name, _, array_key = text.rpartition("/")
            if isinstance(value, ValueLocation):
                value = StoredRange(self._file_number(value.path), value.offset, value.nbytes)
            yield name, array_key, value

    def _file_number(self, path: str) -> int:
        return self._file_numbers.setdefault(path, len(self._file_numbers))

    def _iter_folders(self, names: Iterable[str]) -> Iterator[tuple[str, str, StoredValue]]:
        for name in names:
            folder = resolve_named_path(self.folder, name, f"the tree of {self.folder}")
            self.by_name[name] = {}
            for key in _iter_files(folder):
                if key == self.storage.zarr.document:
                    self._document_paths[name] = folder / key
                    continue
                nbytes = stat_file(folder / key).st_size
                yield name, key, StoredRange(self._file_number(f"{name}/{key}"), 0, nbytes)

    def pop_document(self, name: str) -> bytes:
        """Remove the metadata document of an array from its values and return its text."""
        document = self.storage.zarr.document
        path = self._document_paths.get(name)
        value = self.by_name.get(name, {}).pop(document, None)
        if path is None and value is None:
            why = f"the tree lists it, but it has no {document}"
            raise DamagedError(
                f"{quote_name(name)} is not in the index of {self.folder}", why, GET_AGAIN_HINT
            )
        try:
            if path is None:
                assert value is not None
                return self.read_value(value, MAX_DOCUMENT_NBYTES)
            nbytes = stat_file(path).st_size
            if nbytes > MAX_DOCUMENT_NBYTES:
                raise ValueError(f"it has {nbytes:,} bytes, the limit is {MAX_DOCUMENT_NBYTES:,}")
            return read_small_file(path)
        except ValueError as error:
            raise broken_document_error(quote_name(name), self.storage.zarr, str(error)) from error

    def read_value(self, value: StoredValue, max_nbytes: int) -> bytes:
        """Return the bytes of a value. Raise ValueError if it exceeds `max_nbytes` or its file."""
        if isinstance(value, bytes):
            return value
        path = self.files[value.file]
        end = value.offset + value.nbytes
        if value.nbytes > max_nbytes or end > stat_indexed_file(path).st_size:
            raise ValueError(f"its {value.nbytes:,} bytes are not in {path}")
        return read_bytes(path, value.offset, value.nbytes)


def _iter_files(folder: AnyPath) -> Iterator[str]:
    """Yield the relative paths of all files of an array. Links to folders are not followed."""
    pending = [""]
    while pending:
        prefix = pending.pop()
        if prefix.count("/") > MAX_NESTED_FOLDERS:
            raise PrepError(
                f"{folder} has more than {MAX_NESTED_FOLDERS} nested folders",
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
    chunks_by_key: Mapping[str, StoredValue],
    values: ItemValues,
    is_complete: bool,
) -> StoredChunks:
    """Return the stored chunks of an array by index. Shards are split into their chunks.

    Raise PrepError if a chunk is missing that must be stored, or if a key is not a chunk of the array.
    """
    # A grid of a malicious document may have 2^60 chunks. It is enumerated only as far as there
    # are stored values; otherwise the indices are parsed from the keys.
    missing = math.prod(zarr.stored_grid) - len(chunks_by_key)
    chunks: StoredChunks = {}
    if missing > 0 and not is_complete and zarr.missing_is_zero:
        for key, value in chunks_by_key.items():
            index: ChunkIndex = ()
            # The key of the only chunk of a scalar is `0` or `c`, which is not an index.
            if zarr.shape:
                # Longer numbers exceed int64, and a hostile key may have millions of digits.
                numbers = re.findall("[0-9]+", key)
                index = tuple(int(digits) for digits in numbers if len(digits) < 19)
            # Other spellings of a key are ignored: chunk [0, 1] is stored under `0.1`, never under `00.1`.
            if _is_in_grid(index, zarr.stored_grid) and zarr.chunk_keys.key(index) == key:
                chunks[index] = value
    else:
        # The grid of a malicious document may be huge: at most one index more than values is visited.
        for index in itertools.islice(_iter_indices(zarr.stored_grid), len(chunks_by_key) + 1):
            key = zarr.chunk_keys.key(index)
            value = chunks_by_key.get(key)
            if value is None:
                raise _missing_chunk_error(name, key, is_complete)
            chunks[index] = value
    if len(chunks_by_key) > len(chunks):
        extra_key = next(iter(chunks_by_key.keys() - set(map(zarr.chunk_keys.key, chunks))))
        what = f"the index of {name} has chunk {quote_name(extra_key)}"
        raise DamagedError(what, f"its grid is {zarr.stored_grid}", GET_AGAIN_HINT)
    if zarr.sharding:
        return dict(_iter_shard_chunks(name, zarr, zarr.sharding, chunks, values, is_complete))
    return chunks


def _iter_indices(grid: Sequence[int]) -> Iterator[ChunkIndex]:
    """Yield every index of a grid in C order, lazily."""
    if not grid:
        yield ()
    # A hostile grid of [10^18, 0] chunks would never end, although it has none.
    elif 0 not in grid:
        for outer in _iter_indices(grid[:-1]):
            for inner in range(grid[-1]):
                yield (*outer, inner)


def _missing_chunk_error(name: str, key: str, is_complete: bool) -> PrepError:
    if is_complete:
        why = "its metadata says that every chunk is stored"
    else:
        why = "chunks equal to the fill value are not stored, and the fill value is not 0"
    return DamagedError(f"chunk {key} of {name} is missing", why, GET_AGAIN_HINT)


def _is_in_grid(index: Sequence[int], grid: Sequence[int]) -> bool:
    """Return whether an index of non-negative numbers is one of a grid."""
    return len(index) == len(grid) and all(map(operator.lt, index, grid))


def _iter_shard_chunks(
    name: str,
    zarr: ZarrArray,
    sharding: ZarrSharding,
    shards: StoredChunks,
    values: ItemValues,
    is_complete: bool,
) -> Iterator[tuple[ChunkIndex, StoredValue]]:
    """Yield the chunks of each shard."""
    # E.g. shape [5, 4], shards [4, 4] and chunks [2, 4]: a grid of [3, 1] chunks, [2, 1] per shard. Chunk
    # [1, 0] of shard [1, 0] is [1 * 2 + 1, 0] = [3, 0], beyond the grid: shards at the edge are padded.
    grid = ChunkGrid(zarr.shape, zarr.chunk_shape).chunk_counts
    chunks_per_shard = sharding.chunks_per_shard
    for shard_index, shard in shards.items():
        values.count_chunks(math.prod(chunks_per_shard))
        key = zarr.chunk_keys.key(shard_index)
        try:
            shard_nbytes = stored_nbytes(shard)
            nbytes = sharding.index_nbytes
            if nbytes > min(shard_nbytes, MAX_SHARD_INDEX_NBYTES):
                raise ValueError(f"its index takes {nbytes:,} bytes, it has {shard_nbytes:,}")
            offset = shard_nbytes - nbytes if sharding.index_is_at_end else 0
            index = values.read_value(_slice_value(shard, offset, nbytes), nbytes)
            ranges = sharding.parse_index(index, shard_nbytes)
        except ValueError as error:
            what = f"shard {key} of {name} is broken"
            raise DamagedError(what, str(error), GET_AGAIN_HINT) from error
        first_index = tuple(map(operator.mul, shard_index, chunks_per_shard))
        for inner_index, (offset, nbytes) in zip(np.ndindex(chunks_per_shard), ranges):
            index = tuple(map(operator.add, first_index, inner_index))
            if not _is_in_grid(index, grid):
                continue
            if offset >= 0:
                yield index, _slice_value(shard, offset, nbytes)
            elif is_complete or not zarr.missing_is_zero:
                chunk = f"{'.'.join(map(str, index))} of shard {key}"
                raise _missing_chunk_error(name, chunk, is_complete)


def stored_nbytes(value: StoredValue) -> int:
    """Return the size of a stored value."""
    if isinstance(value, bytes):
        return len(value)
    return value.nbytes


def _slice_value(value: StoredValue, offset: int, nbytes: int) -> StoredValue:
    if isinstance(value, bytes):
        return value[offset : offset + nbytes]
    return StoredRange(value.file, value.offset + offset, nbytes)


def check_chunk_tables(
    folder: AnyPath,
    arrays: Sequence[Array],
    codec_names: Sequence[Sequence[str]],
    tables: Sequence[StoredChunks],
    files: Sequence[AnyPath],
) -> None:
    """Raise PrepError if chunks have wrong sizes, overlap, leave their files, or if too many are missing."""
    absent = 0
    for item, names, chunks in zip(arrays, codec_names, tables):
        _check_chunk_sizes(item, names, chunks)
        absent += math.prod(item.grid.chunk_counts) - len(chunks)
    # Absent chunks take no space in the source: a document of 1 kB could make prep write petabytes.
    if absent > _MAX_ABSENT_CHUNKS:
        why = f"{absent:,} chunks are not stored and read as zeros, the limit is {_MAX_ABSENT_CHUNKS:,}"
        raise PrepError(f"{folder} has too many missing chunks", why, GET_AGAIN_HINT)
    sizes = [stat_indexed_file(file).st_size for file in files]
    ranges: list[tuple[int, int, int, int]] = []
    for array_number, table in enumerate(tables):
        for stored in table.values():
            if isinstance(stored, StoredRange):
                end = stored.offset + stored.nbytes
                ranges.append((stored.file, stored.offset, end, array_number))
    # Sorted by file and offset, so that only neighbours can overlap.
    ranges.sort()
    for file, _, end, array_number in ranges:
        if end > sizes[file]:
            name = quote_name(arrays[array_number].name)
            why = f"a chunk of {name} ends at byte {end:,}, the file at {sizes[file]:,}"
            raise DamagedError(f"{files[file]} is cut short", why, GET_AGAIN_HINT)
    for (file, _, end, first_array), (next_file, start, _, second_array) in itertools.pairwise(
        ranges
    ):
        if file == next_file and start < end:
            why = f"both use byte {start:,} of {files[file]}"
            raise DamagedError(
                f"chunks of {quote_name(arrays[first_array].name)} and {quote_name(arrays[second_array].name)} overlap",
                why,
                GET_AGAIN_HINT,
            )


def _check_chunk_sizes(item: Array, codec_names: Sequence[str], chunks: StoredChunks) -> None:
    """Raise PrepError if a chunk without compression does not have the size of its elements."""
    expected_nbytes = item.chunk_nbytes
    for name in codec_names:
        if not CODECS[name].is_checksum:
            return
        expected_nbytes += CRC32C_NBYTES
    for index, value in chunks.items():
        nbytes = stored_nbytes(value)
        if nbytes != expected_nbytes:
            why = f"it has {nbytes:,} bytes, {item.chunk_shape} of {item.dtype} has {expected_nbytes:,}"
            what = f"chunk {chunk_label(index)} of {quote_name(item.name)} has the wrong size"
            raise DamagedError(what, why, GET_AGAIN_HINT)


def collect_chunks(
    arrays: Sequence[Array], chunks: Iterable[WrittenChunk], *, is_compressed: bool
) -> list[WrittenArray]:
    """Return the arrays with their chunks. Raise PrepError if one is missing, duplicate or of the wrong size."""
    grids = [item.grid.chunk_counts for item in arrays]
    chunk_nbytes = [item.chunk_nbytes for item in arrays]
    columns: list[tuple[array[int], array[int], array[int]]] = []
    for grid in grids:
        count = math.prod(grid)
        zeros = array("q", [0]) * count
        columns.append((array("q", [ABSENT]) * count, zeros, zeros[:]))
    for chunk in chunks:
        # A 13B model has 10^5 chunks.
        array_number, index, file, offset, nbytes = chunk
        item = arrays[array_number]
        files, offsets, sizes = columns[array_number]
        grid = grids[array_number]
        # The index is a number with the grid's extents as its base, e.g. [1, 2] in [2, 3] is 1 * 3 + 2.
        number = 0
        is_inside = len(index) == len(grid)
        for position, extent in zip(index, grid):
            number = number * extent + position
            is_inside = is_inside and 0 <= position < extent
        if not is_inside:
            what = f"the index of {item.name} has chunk {chunk_label(index)}"
            raise PrepError(what, f"its grid is {grid}", BUG_HINT)
        if not is_compressed and nbytes != chunk_nbytes[array_number]:
            why = f"it has {nbytes:,} bytes, {item.chunk_shape} of {item.dtype} has {item.chunk_nbytes:,}"
            what = f"chunk {chunk_label(index)} of {item.name} has the wrong size"
            raise PrepError(what, why, BUG_HINT)
        if files[number] != ABSENT:
            what = f"the index of {item.name} has chunk {chunk_label(index)} twice"
            raise PrepError(what, "", BUG_HINT)
        files[number] = file
        offsets[number] = offset
        sizes[number] = nbytes
    written: list[WrittenArray] = []
    for item, grid, (files, offsets, sizes) in zip(arrays, grids, columns):
        if ABSENT in files:
            missing_index = unravel_chunk_index(grid, files.index(ABSENT))
            what = f"the index of {item.name} misses chunk {chunk_label(missing_index)}"
            raise PrepError(what, "the plan does not place it", BUG_HINT)
        written.append((item, ChunkTable((0,) * len(grid), grid, files, offsets, sizes)))
    return written


def encode_documents(
    arrays: Sequence[WrittenArray],
    file_names: Sequence[str],
    storage: ItemStorage,
    compression: Compression | None,
) -> dict[str, bytes]:
    """Return the metadata documents of arrays in folders by path. Each chunk must be the whole file with its name."""
    documents: dict[str, bytes] = {}
    for item, table in arrays:
        for index, (file, offset) in zip(table.indices(), table.positions()):
            path = storage.chunk_path(item.name, index)
            if offset != 0 or file_names[file] != path:
                why = f"it is at byte {offset:,} of {file_names[file]}"
                raise PrepError(f"chunk {path} has the wrong location", why, BUG_HINT)
        path = f"{item.name}/{storage.zarr.document}"
        documents[path] = _encode_document(item, storage, compression)
    return documents


def _encode_document(item: Array, storage: ItemStorage, compression: Compression | None) -> bytes:
    return encode_zarr_document(storage.zarr, item.shape, item.dtype, item.chunk_shape, compression)


def iter_index_entries(
    arrays: Sequence[WrittenArray],
    file_names: Sequence[str],
    storage: ItemStorage,
    compression: Compression | None,
) -> Iterator[OcdbtEntry]:
    """Yield the entries of the index of a database in the order of keys."""
    by_prefix: list[tuple[str, WrittenArray]] = []
    for item, table in arrays:
        name = storage.name_separator.join(map(str, item.path))
        by_prefix.append((f"{name}/", (item, table)))
    # Keys are UTF-8, and Python sorts texts in the same order.
    by_prefix.sort(key=operator.itemgetter(0))
    entries = itertools.chain.from_iterable(
        _iter_array_entries(prefix, written, file_names, storage, compression)
        for prefix, written in by_prefix
    )
    if any("/" in str(part) for item, _ in arrays for part in item.path):
        # The keys of `a/0` come between the chunks 0 and 1 of `a`: a/.zarray, a/0, a/0/.zarray, a/0/0, a/1.
        return iter(sorted(entries, key=operator.itemgetter(0)))
    return entries


def _iter_array_entries(
    prefix: str,
    written: WrittenArray,
    file_names: Sequence[str],
    storage: ItemStorage,
    compression: Compression | None,
) -> Iterator[OcdbtEntry]:
    """Yield the entries of an array in the order of keys."""
    zarr = storage.zarr
    item, table = written
    document = (f"{prefix}{zarr.document}".encode(), _encode_document(item, storage, compression))
    # `.zarray` sorts before digits, `zarr.json` after the `c` of chunks.
    if zarr == ZARR2:
        yield document
    # Keys are sorted as text: chunk 10 comes before chunk 2, in each axis. Separators sort before digits.
    labels: list[list[str]] = []
    starts: list[list[int]] = []
    for axis, extent in enumerate(table.counts):
        texts = sorted(map(str, range(extent)))
        # Number of chunks from one index of this axis to the next, in C order.
        stride = math.prod(table.counts[axis + 1 :])
        labels.append(texts)
        starts.append([int(text) * stride for text in texts])
    keys = zarr.chunk_keys.keys(labels)
    for key, chunk_number in zip(keys, map(sum, itertools.product(*starts))):
        location = ValueLocation(
            file_names[table.files[chunk_number]],
            table.offsets[chunk_number],
            table.nbytes[chunk_number],
        )
        yield f"{prefix}{key}".encode(), location
    if zarr != ZARR2:
        yield document
