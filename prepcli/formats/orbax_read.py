"""What an Orbax item holds and where each chunk lies; the chunks themselves are for others to read.

Items come from strangers. All that is read from one here is checked: afterwards every chunk of every array is known
to lie, with the right number of bytes, in an ordinary file inside the folder, apart from all other chunks.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prepcli.engine.digest import digest
from prepcli.errors import PrepError
from prepcli.formats.codecs import CRC32C, CRC32C_NBYTES
from prepcli.formats.ocdbt import OCDBT_MANIFEST
from prepcli.formats.orbax import (
    METADATA_FILE,
    STRINGS_FILE,
    ArrayMeta,
    OrbaxNonArray,
    TreePath,
    chunk_key,
    dotted_name,
    find_name_clash,
)
from prepcli.formats.orbax_store import ChunkTable, OrbaxStore, StoredRange, build_chunk_table
from prepcli.formats.untrusted import list_folder, parse_json, quote_name, read_small_file, stat_file
from prepcli.formats.zarr import ZarrArray, parse_zarr_document

_UNFINISHED = ".orbax-checkpoint-tmp"
_MOST_ABSENT = 1 << 18  # chunks of zeros that are not stored


@dataclass(frozen=True, slots=True)
class OrbaxItem:
    """An item's arrays and where they lie.

    `chunks`, `steps` and `value_types` are parallel to `arrays`: the chunks that are stored, those that are not stand
    for zeros; the steps of `codecs` that turn elements into what is stored; and what Orbax says the leaf is:
    `jax.Array`, `np.ndarray` or `scalar`. `stamp`: a digest of all that says so.
    """

    folder: Path
    arrays: tuple[ArrayMeta, ...]
    chunks: tuple[ChunkTable, ...]
    codec_names: tuple[tuple[str, ...], ...]
    files: tuple[Path, ...]
    value_types: tuple[str, ...]
    non_arrays: tuple[OrbaxNonArray, ...]
    unlisted_names: tuple[str, ...]  # names in the index that the tree lacks; Orbax does not see them either
    metadata_digest: str


@dataclass(frozen=True, slots=True)
class _Leaf:
    path: TreePath
    value_type: str
    empty: bool


def read_item(folder: Path) -> OrbaxItem:
    """All that the item says of its arrays. Raises PrepError for what is broken, and for storage that is not read."""
    if unfinished := next((part for part in folder.absolute().parts if _UNFINISHED in part), None):
        raise PrepError(f"{folder} is a checkpoint that Orbax did not finish", f"its folder is {unfinished}")
    tree = _read_tree(folder)
    leaves = [_leaf(folder, entry) for entry in tree["tree_metadata"].values()]
    if names := find_name_clash(leaf.path for leaf in leaves):
        raise PrepError(
            f"{folder / METADATA_FILE} is broken", f"it has {quote_name(names[0])} and {quote_name(names[1])}"
        )
    listed = [leaf for leaf in leaves if not leaf.empty and leaf.value_type != "string"]
    uses_ocdbt = tree.get("use_ocdbt", True) is not False
    names = [dotted_name(leaf.path) for leaf in listed]
    store = OrbaxStore(folder, names, uses_ocdbt, bool(tree.get("use_zarr3")))
    documents = [store.pop_document(name) for name in names]
    zarrs = [parse_zarr_document(quote_name(name), store.document_name, text) for name, text in zip(names, documents)]
    complete = tree.get("store_array_data_equal_to_fill_value") is True
    tables = [
        build_chunk_table(quote_name(name), zarr, store.values.pop(name), store, complete)
        for name, zarr in zip(names, zarrs)
    ]
    arrays = tuple(_array(leaf, zarr) for leaf, zarr in zip(listed, zarrs))
    for meta, zarr, chunks in zip(arrays, zarrs, tables):
        _check_sizes(meta, zarr, chunks)
    _check_absent(folder, arrays, tables)
    _check_places(arrays, tables, store.files)
    return OrbaxItem(
        folder=folder,
        arrays=arrays,
        chunks=tuple(tables),
        codec_names=tuple(zarr.codec_names for zarr in zarrs),
        files=store.files,
        value_types=tuple(leaf.value_type for leaf in listed),
        non_arrays=_others(folder, leaves),
        unlisted_names=tuple(sorted(store.values)),
        metadata_digest=_stamp(folder, documents),
    )


def _read_tree(folder: Path) -> Mapping[str, Any]:
    if METADATA_FILE not in list_folder(folder):
        raise PrepError(f"{folder} is not an Orbax checkpoint", f"it has no {METADATA_FILE}")
    tree = _read_json(folder / METADATA_FILE)
    if not isinstance(tree.get("tree_metadata"), dict):
        raise PrepError(f"{folder / METADATA_FILE} is broken", "it has no tree_metadata")
    return tree


def _stamp(folder: Path, documents: Iterable[bytes]) -> str:
    index = folder / OCDBT_MANIFEST
    held = [read_small_file(folder / METADATA_FILE), read_small_file(index) if index.exists() else b"", *documents]
    return digest(b"".join(held))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        document = parse_json(read_small_file(path))
    except ValueError as error:
        raise PrepError(f"{path} is broken", str(error)) from error
    if not isinstance(document, dict):
        raise PrepError(f"{path} is broken", "it is not a JSON object")
    return document


def _leaf(folder: Path, entry: Any) -> _Leaf:
    match entry:
        case {"key_metadata": [_, *_] as keys, "value_metadata": {"value_type": str(value_type)} as value}:
            path = tuple(_part(folder, key) for key in keys)
            return _Leaf(path, value_type, value.get("skip_deserialize") is True)
    raise PrepError(f"{folder / METADATA_FILE} is broken", "it describes a leaf without its path or type")


def _part(folder: Path, key: Any) -> str | int:
    match key:
        case {"key": str(text), "key_type": 1} if re.fullmatch("0|[1-9][0-9]{0,8}", text):
            return int(text)
        case {"key": str(text), "key_type": 2}:
            return text
    raise PrepError(f"{folder / METADATA_FILE} is broken", f"{quote_name(str(key))} is no part of a path")


def _array(leaf: _Leaf, zarr: ZarrArray) -> ArrayMeta:
    return ArrayMeta(
        leaf.path, zarr.shape, zarr.dtype, zarr.chunk_shape, leaf.value_type == "scalar" and not zarr.shape
    )


def _check_sizes(meta: ArrayMeta, zarr: ZarrArray, chunks: ChunkTable) -> None:
    """Chunks that are not compressed have the bytes of their elements, and no more than those."""
    if zarr.codec_names not in ((), (CRC32C,)):
        return
    wanted = meta.chunk_nbytes + CRC32C_NBYTES * bool(zarr.codec_names)
    for index, stored in chunks.items():
        nbytes = len(stored) if isinstance(stored, bytes) else stored.nbytes
        if nbytes != wanted:
            why = f"it has {nbytes:,} bytes, {meta.chunk_shape} of {meta.dtype} has {wanted:,}"
            raise PrepError(f"chunk {chunk_key(index)} of {quote_name(meta.name)} has the wrong size", why)


def _check_absent(folder: Path, arrays: Sequence[ArrayMeta], tables: Sequence[ChunkTable]) -> None:
    """PrepError where an item claims to be far larger than what it stores."""
    absent = sum(math.prod(meta.grid) - len(chunks) for meta, chunks in zip(arrays, tables))
    if absent > _MOST_ABSENT:
        why = f"{absent:,} chunks stand for zeros, prep takes at most {_MOST_ABSENT:,} such"
        raise PrepError(f"{folder} does not store what it holds", why)


def _check_places(arrays: Sequence[ArrayMeta], chunks: Sequence[ChunkTable], files: Sequence[Path]) -> None:
    """Every chunk in its file, no two on the same bytes."""
    sizes = [stat_file(file).st_size for file in files]
    places = sorted(
        (stored.file, stored.offset, stored.offset + stored.nbytes, n)
        for n, table in enumerate(chunks)
        for stored in table.values()
        if isinstance(stored, StoredRange)
    )
    for file, _, end, n in places:
        if end > sizes[file]:
            why = f"a chunk of {quote_name(arrays[n].name)} ends at byte {end:,}, the file at {sizes[file]:,}"
            raise PrepError(f"{files[file]} is cut short", why, "copy the checkpoint again")
    for (file, _, end, a), (next_file, start, _, b) in itertools.pairwise(places):
        if file == next_file and start < end:
            why = f"both use byte {start:,} of {files[file]}"
            raise PrepError(f"chunks of {quote_name(arrays[a].name)} and {quote_name(arrays[b].name)} overlap", why)


def _others(folder: Path, leaves: Sequence[_Leaf]) -> tuple[OrbaxNonArray, ...]:
    strings = [leaf for leaf in leaves if leaf.value_type == "string" and not leaf.empty]
    texts = _read_json(folder / STRINGS_FILE) if strings else {}
    for leaf in strings:
        if not isinstance(texts.get(dotted_name(leaf.path)), str):
            raise PrepError(f"{folder / STRINGS_FILE} has no text for {quote_name(dotted_name(leaf.path))}")
    empty = [OrbaxNonArray(leaf.path, leaf.value_type) for leaf in leaves if leaf.empty]
    return (*empty, *(OrbaxNonArray(leaf.path, leaf.value_type, texts[dotted_name(leaf.path)]) for leaf in strings))
