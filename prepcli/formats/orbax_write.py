"""Write the metadata of an Orbax item, given its chunks: the OCDBT index or array documents, and Orbax's JSON files.

Neither Orbax nor TensorStore is imported, and no weights are read or written.
"""

from __future__ import annotations

import itertools
import json
import math
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from prepcli.core.errors import Option, PrepError, text
from prepcli.engine.no_follow import write_no_follow
from prepcli.formats.ocdbt import NODE_NBYTES, OcdbtEntry, ValueLocation, encode_ocdbt_index
from prepcli.formats.orbax import (
    METADATA_FILE,
    STRINGS_FILE,
    ZARR_TYPESTRS,
    ZARRAY,
    ArrayMeta,
    OrbaxNonArray,
    chunk_file_path,
    chunk_key,
    dotted_name,
    find_name_clash,
    unravel_chunk_index,
    zarr3_chunk_key,
)
from prepcli.formats.zarr import ZARR_JSON
from prepcli.formats.zarr_documents import encode_zarr_json, encode_zarray

CHECKPOINT_METADATA_FILE = "_CHECKPOINT_METADATA"
COMMIT_MARKER = "commit_success.txt"  # name that Orbax uses
# Hint of errors in the arguments, which a correct plan cannot cause.
_BUG_HINT = "this is a bug in prep: the checkpoint was not written"
# The name of the handler that orbax-checkpoint 0.12 records for a tree of arrays.
_HANDLER = "orbax.checkpoint._src.handlers.standard_checkpoint_handler.StandardCheckpointHandler"


@dataclass(frozen=True, slots=True)
class WrittenChunk:
    """Location of the chunk `index` of array number `array`: `nbytes` bytes at `offset` of file number `file`."""

    array: int
    index: tuple[int, ...]
    file: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class ChunkColumns:
    """File, offset and size of each chunk of an array, in C order of its grid. File -1 if not placed yet."""

    meta: ArrayMeta
    grid: tuple[int, ...]
    chunk_nbytes: int
    files: array[int]
    offsets: array[int]
    nbytes: array[int]


def write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write files by their paths in a folder. Nothing is fsynced."""
    for path, content in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        write_no_follow(folder / path, content)


def encode_item_metadata(
    arrays: Sequence[ArrayMeta],
    chunks: Iterable[WrittenChunk],
    file_names: Sequence[str],
    now_ns: int,
    *,
    non_arrays: Sequence[OrbaxNonArray] = (),
    node_nbytes: int = NODE_NBYTES,
    zstd_level: int | None = None,
    uses_ocdbt: bool = True,
    uses_zarr3: bool = False,
) -> dict[str, bytes]:
    """Return the metadata files of an Orbax item, by their paths in its folder. The item is also a checkpoint.

    Leaves are declared as `np.ndarray`, so that Orbax restores them with or without a target. Equal arguments give
    equal files, independent of the order of `chunks`.

    Args:
        arrays: Arrays of the item.
        chunks: Location of every chunk of every array.
        file_names: Data files by number, relative to the folder of the item.
        now_ns: Commit time in nanoseconds since the epoch.
        non_arrays: Leaves other than arrays.
        node_nbytes: Decoded size at which an index node is split.
        zstd_level: Compression level of the chunks. None stores raw chunks.
        uses_ocdbt: Write an OCDBT index. Otherwise each chunk is a file, with the path of `chunk_file_path`.
        uses_zarr3: Write arrays of zarr 3 instead of zarr 2.

    Returns:
        Content of each file. `commit_success.txt` is the last one.

    Raises:
        PrepError: A leaf cannot be stored, or a chunk is missing, duplicate or of the wrong size.
    """
    check_leaves(arrays, non_arrays)
    tables = collect_chunks(arrays, chunks, is_compressed=zstd_level is not None)
    if uses_ocdbt:
        entries = _iter_entries(tables, file_names, zstd_level)
        if uses_zarr3:
            entries = sorted(_iter_zarr3_entries(tables, file_names, zstd_level), key=_entry_key)
        files = encode_ocdbt_index(entries, now_ns, node_nbytes)
    else:
        _check_chunk_files(tables, file_names, uses_zarr3=uses_zarr3)
        files = _encode_array_documents(tables, zstd_level, uses_zarr3=uses_zarr3)
    files[METADATA_FILE] = _encode_json(_tree_metadata(arrays, non_arrays, uses_ocdbt, uses_zarr3))
    files[CHECKPOINT_METADATA_FILE] = _encode_json(_checkpoint_metadata(_HANDLER, now_ns))
    texts: dict[str, str] = {}
    for leaf in non_arrays:
        if leaf.value_type == "string":
            texts[dotted_name(leaf.path)] = leaf.text
    if texts:
        files[STRINGS_FILE] = _encode_json(texts)
    # Orbax on Google Cloud Storage takes an item without this marker for unfinished.
    files[COMMIT_MARKER] = b"Checkpoint commit was successful.\n"
    return files


def encode_step_metadata(item_names: Iterable[str], now_ns: int) -> dict[str, bytes]:
    """Return the metadata file of a training step of Orbax with items in its subfolders."""
    metadata = _checkpoint_metadata(dict.fromkeys(item_names, _HANDLER), now_ns)
    return {CHECKPOINT_METADATA_FILE: _encode_json(metadata)}


def check_leaves(arrays: Sequence[ArrayMeta], non_arrays: Sequence[OrbaxNonArray]) -> None:
    """Raise PrepError if an Orbax checkpoint cannot have these leaves."""
    if not arrays:
        raise PrepError(
            "cannot write an Orbax checkpoint without arrays",
            "the tree contains no arrays",
            "add an array, or write another format",
        )
    for meta in arrays:
        if meta.dtype not in ZARR_TYPESTRS:
            raise PrepError(
                f"{meta.name} is {meta.dtype}",
                f"zarr v2 of TensorStore supports {', '.join(ZARR_TYPESTRS)}",
                text("cast it: {}", Option("dtype", "bfloat16")),
            )
        if len(meta.chunk_shape) != len(meta.shape) or min(meta.chunk_shape, default=1) < 1:
            raise PrepError(
                f"chunk {meta.chunk_shape} of {meta.name} does not match its shape {meta.shape}",
                "each axis needs a chunk extent of at least 1",
                _BUG_HINT,
            )
    paths = [leaf.path for leaf in (*arrays, *non_arrays)]
    if () in paths:
        raise PrepError(
            "cannot write a single array",
            "an Orbax tree needs a key for each array",
            "write a dict of arrays",
        )
    if names := find_name_clash(paths):
        raise PrepError(
            "the tree has two leaves with clashing names",
            f"{names[0]} and {names[1]}",
            "rename one of them",
        )


def collect_chunks(
    arrays: Sequence[ArrayMeta], chunks: Iterable[WrittenChunk], *, is_compressed: bool
) -> list[ChunkColumns]:
    """Return the locations of all chunks of each array.

    Raises:
        PrepError: A chunk is missing, duplicate or of the wrong size.
    """
    tables = [_empty_columns(meta) for meta in arrays]
    for chunk in chunks:
        _record_chunk(tables[chunk.array], chunk, is_compressed)
    for table in tables:
        if -1 in table.files:
            missing_index = unravel_chunk_index(table.grid, table.files.index(-1))
            what = f"the index of {table.meta.name} misses chunk {chunk_key(missing_index)}"
            raise PrepError(what, "the plan does not place it", _BUG_HINT)
    return tables


def _empty_columns(meta: ArrayMeta) -> ChunkColumns:
    grid = meta.grid
    chunk_count = math.prod(grid)
    return ChunkColumns(
        meta,
        grid,
        meta.chunk_nbytes,
        array("q", [-1]) * chunk_count,
        array("q", [0]) * chunk_count,
        array("q", [0]) * chunk_count,
    )


def _record_chunk(table: ChunkColumns, chunk: WrittenChunk, is_compressed: bool) -> None:
    # The index is a number with the grid's extents as its base, e.g. [1, 2] in [2, 3] is 1 * 3 + 2.
    chunk_number = 0
    is_inside = len(chunk.index) == len(table.grid)
    for index, extent in zip(chunk.index, table.grid):
        chunk_number = chunk_number * extent + index
        is_inside = is_inside and 0 <= index < extent
    if not is_inside:
        raise _chunk_error(table, chunk, "", f"its grid is {table.grid}")
    if not is_compressed and chunk.nbytes != table.chunk_nbytes:
        meta = table.meta
        why = f"it has {chunk.nbytes:,} bytes, {meta.chunk_shape} of {meta.dtype} has {table.chunk_nbytes:,}"
        what = f"chunk {chunk_key(chunk.index)} of {meta.name} has the wrong size"
        raise PrepError(what, why, _BUG_HINT)
    if table.files[chunk_number] >= 0:
        raise _chunk_error(table, chunk, " twice")
    table.files[chunk_number] = chunk.file
    table.offsets[chunk_number] = chunk.offset
    table.nbytes[chunk_number] = chunk.nbytes


def _chunk_error(table: ChunkColumns, chunk: WrittenChunk, suffix: str, why: str = "") -> PrepError:
    what = f"the index of {table.meta.name} has chunk {chunk_key(chunk.index)}{suffix}"
    return PrepError(what, why, _BUG_HINT)


def _check_chunk_files(
    tables: Sequence[ChunkColumns], file_names: Sequence[str], *, uses_zarr3: bool
) -> None:
    """Raise PrepError if a chunk is not the whole file with its name."""
    for table in tables:
        for chunk_number, file in enumerate(table.files):
            index = unravel_chunk_index(table.grid, chunk_number)
            path = chunk_file_path(table.meta.name, index, uses_zarr3=uses_zarr3)
            if table.offsets[chunk_number] != 0 or file_names[file] != path:
                why = f"it is at byte {table.offsets[chunk_number]:,} of {file_names[file]}"
                raise PrepError(f"chunk {path} has the wrong location", why, _BUG_HINT)


def _encode_array_documents(
    tables: Sequence[ChunkColumns], zstd_level: int | None, *, uses_zarr3: bool
) -> dict[str, bytes]:
    """Return the `.zarray` or `zarr.json` of each array, by its path in the item."""
    documents: dict[str, bytes] = {}
    for table in tables:
        if uses_zarr3:
            document = encode_zarr_json(table.meta, zstd_level)
            documents[f"{table.meta.name}/{ZARR_JSON}"] = document
        else:
            documents[f"{table.meta.name}/{ZARRAY}"] = encode_zarray(table.meta, zstd_level)
    return documents


def _iter_entries(
    tables: Sequence[ChunkColumns], file_names: Sequence[str], zstd_level: int | None
) -> Iterator[OcdbtEntry]:
    """Yield the index entries in the order of keys."""
    entries = _iter_array_entries(tables, file_names, zstd_level)
    if any("/" in table.meta.name for table in tables):
        # The keys of `a/0` come between the chunks 0 and 1 of `a`: a/.zarray, a/0, a/0/.zarray, a/0/0, a/1.
        yield from sorted(entries, key=_entry_key)
    else:
        yield from entries


def _entry_key(entry: OcdbtEntry) -> bytes:
    return entry[0]


def _iter_zarr3_entries(
    tables: Sequence[ChunkColumns], file_names: Sequence[str], zstd_level: int | None
) -> Iterator[OcdbtEntry]:
    """Yield the index entries of arrays of zarr 3, array by array."""
    for table in tables:
        prefix = f"{table.meta.name}/"
        yield (prefix + ZARR_JSON).encode(), encode_zarr_json(table.meta, zstd_level)
        for chunk_number, file in enumerate(table.files):
            index = unravel_chunk_index(table.grid, chunk_number)
            location = ValueLocation(
                file_names[file], table.offsets[chunk_number], table.nbytes[chunk_number]
            )
            yield (prefix + zarr3_chunk_key(index)).encode(), location


def _iter_array_entries(
    tables: Sequence[ChunkColumns], file_names: Sequence[str], zstd_level: int | None
) -> Iterator[OcdbtEntry]:
    """Yield the index entries array by array. `.` and `/` sort before digits."""
    by_key = sorted((f"{table.meta.name}/".encode(), n) for n, table in enumerate(tables))
    for prefix, n in by_key:
        table = tables[n]
        yield prefix + ZARRAY.encode(), encode_zarray(table.meta, zstd_level)
        # Keys are sorted as text: chunk 10 comes before chunk 2, in each axis.
        labels: list[list[bytes]] = []
        starts: list[list[int]] = []
        for axis, extent in enumerate(table.grid):
            indices = sorted(range(extent), key=str)
            # Number of chunks from one index of this axis to the next, in C order.
            stride = math.prod(table.grid[axis + 1 :])
            labels.append([b"%d" % i for i in indices])
            starts.append([i * stride for i in indices])
        for label, start in zip(itertools.product(*labels), itertools.product(*starts)):
            chunk_number = sum(start)
            location = ValueLocation(
                file_names[table.files[chunk_number]],
                table.offsets[chunk_number],
                table.nbytes[chunk_number],
            )
            yield prefix + (b".".join(label) or b"0"), location


def _tree_metadata(
    arrays: Sequence[ArrayMeta],
    non_arrays: Sequence[OrbaxNonArray],
    uses_ocdbt: bool,
    uses_zarr3: bool,
) -> dict[str, object]:
    """Return the content of the metadata file with the tree's keys and value types."""
    tree: dict[str, object] = {}
    for leaf in (*arrays, *non_arrays):
        if isinstance(leaf, ArrayMeta):
            value_metadata = {
                "value_type": "scalar" if leaf.is_scalar else "np.ndarray",
                "skip_deserialize": False,
                "write_shape": leaf.chunk_shape,
            }
        else:
            skip = leaf.value_type != "string"
            value_metadata = {"value_type": leaf.value_type, "skip_deserialize": skip}
        keys: list[dict[str, object]] = []
        for part in leaf.path:
            keys.append({"key": str(part), "key_type": 1 if isinstance(part, int) else 2})
        tree[str(tuple(map(str, leaf.path)))] = {
            "key_metadata": keys,
            "value_metadata": value_metadata,
        }
    return {
        "tree_metadata": tree,
        "use_ocdbt": uses_ocdbt,
        "use_zarr3": uses_zarr3,
        "store_array_data_equal_to_fill_value": True,
        "custom_metadata": None,
    }


def _checkpoint_metadata(handlers: str | dict[str, str], now_ns: int) -> dict[str, object]:
    return {
        "item_handlers": handlers,
        "metrics": {},
        "performance_metrics": {},
        "init_timestamp_nsecs": now_ns,
        "commit_timestamp_nsecs": now_ns,
        "custom_metadata": {},
    }


def _encode_json(document: object) -> bytes:
    return json.dumps(document).encode()
