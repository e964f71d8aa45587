"""Read the metadata of an Orbax item: its arrays and the location of each chunk.

Items are untrusted, so all metadata is checked. Every chunk of a returned item is in a regular file inside the folder,
has the expected size (unless it is compressed), and does not overlap another chunk.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prepcli.core.errors import GET_AGAIN_HINT, DamagedError, PrepError
from prepcli.core.json_types import JsonObject
from prepcli.engine.digest import digest
from prepcli.formats.codecs import CRC32C, CRC32C_NBYTES
from prepcli.formats.levanter import LEVANTER_METADATA_FILE
from prepcli.formats.ocdbt import OCDBT_MANIFEST
from prepcli.formats.ocdbt_read import BeforeRead, ignore_read
from prepcli.formats.orbax import (
    METADATA_FILE,
    STRINGS_FILE,
    ArrayMeta,
    OrbaxNonArray,
    TreePath,
    chunk_key,
    dotted_name,
    find_name_clash,
    item_metadata_file,
)
from prepcli.formats.orbax_store import ChunkTable, OrbaxStore, StoredRange, build_chunk_table
from prepcli.formats.untrusted import (
    list_folder,
    parse_json,
    quote_name,
    read_small_file,
    stat_indexed_file,
)
from prepcli.formats.zarr import ZarrArray, parse_zarr_document

# Orbax writes an item to a folder with this suffix, and renames it when it is complete.
_UNFINISHED_MARK = ".orbax-checkpoint-tmp"
# Limit of chunks without a stored value, which read as zeros.
_MAX_ABSENT_CHUNKS = 1 << 18


@dataclass(frozen=True, slots=True)
class OrbaxItem:
    """Arrays of an item and the locations of their chunks.

    `chunks`, `codec_names` and `value_types` are parallel to `arrays`.

    Attributes:
        folder: Folder of the item.
        arrays: Arrays in the order of the tree.
        chunks: Stored chunks of each array. Missing chunks read as zeros.
        codec_names: Codecs of each array's chunks, in encoding order.
        files: Files that the locations of chunks refer to by number.
        value_types: Orbax's type of each leaf: `jax.Array`, `np.ndarray` or `scalar`.
        non_arrays: Leaves other than arrays.
        unlisted_names: Names in the index without a leaf in the tree. Orbax ignores them too.
        metadata_digest: Digest of all metadata of the item.
        is_remote: Whether the files are placeholders of remote files, which are read without open files.
    """

    folder: Path
    arrays: tuple[ArrayMeta, ...]
    chunks: tuple[ChunkTable, ...]
    codec_names: tuple[tuple[str, ...], ...]
    files: tuple[Path, ...]
    value_types: tuple[str, ...]
    non_arrays: tuple[OrbaxNonArray, ...]
    unlisted_names: tuple[str, ...]
    metadata_digest: str
    is_remote: bool = False


@dataclass(frozen=True, slots=True)
class _TreeLeaf:
    """A leaf of the tree in `_METADATA`."""

    path: TreePath
    value_type: str
    is_empty: bool


@dataclass(frozen=True, slots=True)
class _StoredTree:
    """Leaves of an item and its stored values.

    Attributes:
        leaves: The leaves, in the order of the tree.
        store: The stored values.
        separator: Text between the parts of a path in the names of the store.
        is_complete: Whether every chunk is stored. Otherwise TensorStore has omitted chunks of zeros.
    """

    leaves: Sequence[_TreeLeaf]
    store: OrbaxStore
    separator: str
    is_complete: bool


def read_item(
    folder: Path, *, is_remote: bool = False, before_read: BeforeRead = ignore_read
) -> OrbaxItem:
    """Read and check the metadata of an item.

    Args:
        folder: Folder of the item.
        is_remote: The data files in the folder are placeholders.
        before_read: Called with each location in a data file before it is read, for example to download it.

    Raises:
        PrepError: The metadata is invalid, or the storage is not supported.
    """
    for part in folder.absolute().parts:
        if _UNFINISHED_MARK in part:
            raise PrepError(
                f"{folder} is a checkpoint that Orbax did not finish",
                f"its folder is {part}",
                "use an earlier step, or save it again",
            )
    # Raises an error for a folder that does not exist or cannot be read.
    list_folder(folder)
    metadata_file = item_metadata_file(folder)
    if metadata_file is None:
        raise PrepError(
            f"{folder} is not an Orbax checkpoint",
            f"it has no {METADATA_FILE}",
            f"pass the folder that contains {METADATA_FILE}, e.g. STEP/default",
        )
    if metadata_file == LEVANTER_METADATA_FILE:
        tree = _read_levanter_tree(folder, before_read)
    else:
        tree = _read_orbax_tree(folder, before_read)
    if clash := find_name_clash(leaf.path for leaf in tree.leaves):
        raise _broken_file_error(
            folder / metadata_file,
            f"a leaf {quote_name(clash[0])} cannot exist next to {quote_name(clash[1])}",
        )
    array_leaves = [leaf for leaf in tree.leaves if _is_array(leaf)]
    store = tree.store
    names = [tree.separator.join(map(str, leaf.path)) for leaf in array_leaves]
    documents = [store.pop_document(name) for name in names]
    zarrs = [
        parse_zarr_document(quote_name(name), store.metadata_file_name, text)
        for name, text in zip(names, documents)
    ]
    tables = [
        build_chunk_table(quote_name(name), zarr, store.values.pop(name), store, tree.is_complete)
        for name, zarr in zip(names, zarrs)
    ]
    arrays = tuple(_make_array_meta(leaf, zarr) for leaf, zarr in zip(array_leaves, zarrs))
    for meta, zarr, chunks in zip(arrays, zarrs, tables):
        _check_chunk_sizes(meta, zarr, chunks)
    _check_absent_chunks(folder, arrays, tables)
    _check_chunk_ranges(arrays, tables, store.files)
    return OrbaxItem(
        folder=folder,
        arrays=arrays,
        chunks=tuple(tables),
        codec_names=tuple(zarr.codec_names for zarr in zarrs),
        files=store.files,
        value_types=tuple(leaf.value_type for leaf in array_leaves),
        non_arrays=_read_non_arrays(folder, tree.leaves),
        unlisted_names=tuple(sorted(store.values)),
        metadata_digest=_metadata_digest(folder, metadata_file, documents),
        is_remote=is_remote,
    )


def _read_orbax_tree(folder: Path, before_read: BeforeRead) -> _StoredTree:
    """Read the tree in the metadata file of Orbax."""
    tree = _read_json(folder / METADATA_FILE)
    entries = tree.get("tree_metadata")
    if not isinstance(entries, dict):
        raise _broken_file_error(folder / METADATA_FILE, "it has no tree_metadata")
    leaves = [_parse_leaf(folder, entry) for entry in entries.values()]
    names = [dotted_name(leaf.path) for leaf in leaves if _is_array(leaf)]
    # Without the key, the storage is OCDBT, the default of Orbax. Without OCDBT, each chunk is a file.
    uses_ocdbt = tree.get("use_ocdbt", True) is not False
    store = OrbaxStore(
        folder,
        names,
        uses_ocdbt=uses_ocdbt,
        uses_zarr3=bool(tree.get("use_zarr3")),
        before_read=before_read,
    )
    # By default TensorStore omits chunks that equal the fill value. With this key it stores all of
    # them, so that a missing chunk is damage and not zeros.
    is_complete = tree.get("store_array_data_equal_to_fill_value") is True
    return _StoredTree(leaves, store, ".", is_complete)


def _read_levanter_tree(folder: Path, before_read: BeforeRead) -> _StoredTree:
    """Read the tree from the keys of the database: each array has a document below its path."""
    store = OrbaxStore(folder, (), uses_ocdbt=True, uses_zarr3=True, before_read=before_read)
    leaves: list[_TreeLeaf] = []
    for name, values in store.values.items():
        if store.metadata_file_name in values:
            leaves.append(_TreeLeaf(tuple(name.split("/")), "jax.Array", is_empty=False))
    return _StoredTree(leaves, store, "/", is_complete=False)


def _is_array(leaf: _TreeLeaf) -> bool:
    return not leaf.is_empty and leaf.value_type != "string"


def _metadata_digest(folder: Path, metadata_file: str, documents: Iterable[bytes]) -> str:
    index = folder / OCDBT_MANIFEST
    contents = [read_small_file(folder / metadata_file)]
    if index.exists():
        contents.append(read_small_file(index))
    return digest(b"".join([*contents, *documents]))


def _read_json(path: Path) -> JsonObject:
    try:
        document = parse_json(read_small_file(path))
    except ValueError as error:
        raise _broken_file_error(path, str(error)) from error
    if not isinstance(document, dict):
        raise _broken_file_error(path, "it is not a JSON object")
    return document


def _broken_file_error(path: Path, why: str) -> DamagedError:
    return DamagedError(f"{path} is broken", why, GET_AGAIN_HINT)


def _parse_leaf(folder: Path, entry: Any) -> _TreeLeaf:
    match entry:
        # `skip_deserialize` marks leaves without stored values: None and empty containers
        case {
            "key_metadata": [_, *_] as keys,
            "value_metadata": {"value_type": str(value_type)} as value,
        }:
            path = tuple(_parse_path_part(folder, key) for key in keys)
            return _TreeLeaf(path, value_type, value.get("skip_deserialize") is True)
    raise _broken_file_error(folder / METADATA_FILE, "it describes a leaf without a path or a type")


def _parse_path_part(folder: Path, key: Any) -> str | int:
    # Orbax's KeyType: 1 is an index of a sequence, 2 a key of a dict. Nine digits bound the list that a
    # hostile index can ask for.
    match key:
        case {"key": str(text), "key_type": 1} if re.fullmatch("0|[1-9][0-9]{0,8}", text):
            return int(text)
        case {"key": str(text), "key_type": 2}:
            return text
    raise _broken_file_error(
        folder / METADATA_FILE, f"{quote_name(str(key))} is not a part of a path"
    )


def _make_array_meta(leaf: _TreeLeaf, zarr: ZarrArray) -> ArrayMeta:
    return ArrayMeta(
        leaf.path,
        zarr.shape,
        zarr.dtype,
        zarr.chunk_shape,
        leaf.value_type == "scalar" and not zarr.shape,
    )


def _check_chunk_sizes(meta: ArrayMeta, zarr: ZarrArray, chunks: ChunkTable) -> None:
    """Raise PrepError if a chunk without compression does not have the size of its elements."""
    if zarr.codec_names not in ((), (CRC32C,)):
        return
    expected_nbytes = meta.chunk_nbytes + CRC32C_NBYTES * bool(zarr.codec_names)
    for index, value in chunks.items():
        if isinstance(value, bytes):
            nbytes = len(value)
        else:
            nbytes = value.nbytes
        if nbytes != expected_nbytes:
            why = f"it has {nbytes:,} bytes, {meta.chunk_shape} of {meta.dtype} has {expected_nbytes:,}"
            what = f"chunk {chunk_key(index)} of {quote_name(meta.name)} has the wrong size"
            raise DamagedError(what, why, GET_AGAIN_HINT)


def _check_absent_chunks(
    folder: Path, arrays: Sequence[ArrayMeta], tables: Sequence[ChunkTable]
) -> None:
    """Raise PrepError if too many chunks are not stored: the item claims to be far larger than its files."""
    absent = sum(math.prod(meta.grid) - len(chunks) for meta, chunks in zip(arrays, tables))
    # Absent chunks take no space in the source: a document of 1 kB could make prep write petabytes.
    if absent > _MAX_ABSENT_CHUNKS:
        why = f"{absent:,} chunks are not stored and read as zeros, the limit is {_MAX_ABSENT_CHUNKS:,}"
        raise PrepError(f"{folder} has too many missing chunks", why, GET_AGAIN_HINT)


def _check_chunk_ranges(
    arrays: Sequence[ArrayMeta], chunks: Sequence[ChunkTable], files: Sequence[Path]
) -> None:
    """Raise PrepError if a chunk exceeds its file or overlaps another chunk."""
    sizes = [stat_indexed_file(file).st_size for file in files]
    ranges: list[tuple[int, int, int, int]] = []
    for array_number, table in enumerate(chunks):
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


def _read_non_arrays(folder: Path, leaves: Sequence[_TreeLeaf]) -> tuple[OrbaxNonArray, ...]:
    """Return the empty leaves and the strings of a tree, with the texts of the strings."""
    empty_leaves: list[OrbaxNonArray] = []
    strings: list[_TreeLeaf] = []
    for leaf in leaves:
        if leaf.is_empty:
            empty_leaves.append(OrbaxNonArray(leaf.path, leaf.value_type))
        elif leaf.value_type == "string":
            strings.append(leaf)
    # Orbax writes the file of strings only if the tree has some.
    texts: JsonObject = {}
    if strings:
        texts = _read_json(folder / STRINGS_FILE)
    text_leaves: list[OrbaxNonArray] = []
    for leaf in strings:
        name = dotted_name(leaf.path)
        content = texts.get(name)
        if not isinstance(content, str):
            raise _broken_file_error(
                folder / STRINGS_FILE, f"it has no text for {quote_name(name)}"
            )
        text_leaves.append(OrbaxNonArray(leaf.path, leaf.value_type, content))
    return (*empty_leaves, *text_leaves)
