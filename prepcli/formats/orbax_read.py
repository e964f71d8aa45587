"""What an Orbax item holds and where each chunk lies; the chunks themselves are for others to read.

Items come from strangers. All that is read from one here is checked: afterwards every chunk of every array is known
to lie, with the right number of bytes, in an ordinary file inside the folder, apart from all other chunks.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prepcli.errors import PrepError
from prepcli.formats.ocdbt import Place, read_database
from prepcli.formats.orbax import (
    METADATA,
    STRINGS,
    TYPESTR,
    ArrayMeta,
    Other,
    TreePath,
    chunk_key,
    clash,
    dotted,
    index_at,
)
from prepcli.formats.untrusted import list_folder, parse_json, shown, stat_file, unreadable

_DTYPES = {typestr: dtype for dtype, typestr in TYPESTR.items()} | {"<i1": "int8", "<u1": "uint8", "<b1": "bool"}
_RESAVE = (
    "save it again raw, in Python: import orbax.checkpoint as ocp; "
    "ocp.PyTreeCheckpointer(use_compression=False).save(NEW, ocp.PyTreeCheckpointer().restore(OLD))"
)
_UNFINISHED = ".orbax-checkpoint-tmp"
_MAX_ZARRAY_NBYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Stored:
    """`nbytes` bytes from `offset` of file number `file` of the item."""

    file: int
    offset: int
    nbytes: int


Chunks = dict[tuple[int, ...], Stored | bytes]  # by the index in the array's grid: its place, or the bytes themselves


@dataclass(frozen=True, slots=True)
class OrbaxItem:
    """An item of raw chunks.

    `chunks` and `value_types` are parallel to `arrays`; the latter is what Orbax says the leaf is: `jax.Array`,
    `np.ndarray` or `scalar`.
    """

    folder: Path
    arrays: tuple[ArrayMeta, ...]
    chunks: tuple[Chunks, ...]
    files: tuple[Path, ...]
    value_types: tuple[str, ...]
    others: tuple[Other, ...]
    unlisted: tuple[str, ...]  # names in the index that the tree lacks; Orbax does not see them either


@dataclass(frozen=True, slots=True)
class _Leaf:
    path: TreePath
    value_type: str
    empty: bool


def read_item(folder: Path) -> OrbaxItem:
    """All that the item says of its arrays. Raises PrepError for what is broken, and for storage that is not raw."""
    if unfinished := next((part for part in folder.absolute().parts if _UNFINISHED in part), None):
        raise PrepError(f"{folder} is a checkpoint that Orbax did not finish", f"its folder is {unfinished}")
    tree = _read_tree(folder)
    leaves = [_leaf(folder, entry) for entry in tree["tree_metadata"].values()]
    if names := clash(leaf.path for leaf in leaves):
        raise PrepError(f"{folder / METADATA} is broken", f"it has {shown(names[0])} and {shown(names[1])}")
    index, files = _read_index(folder)
    listed = [leaf for leaf in leaves if not leaf.empty and leaf.value_type != "string"]
    arrays = tuple(_array(folder, files, leaf, index.get(dotted(leaf.path), {})) for leaf in listed)
    complete = tree.get("store_array_data_equal_to_fill_value") is True
    chunks = tuple(_chunks(meta, index.pop(meta.name), complete) for meta in arrays)
    _check_places(arrays, chunks, files)
    return OrbaxItem(
        folder=folder,
        arrays=arrays,
        chunks=chunks,
        files=files,
        value_types=tuple(leaf.value_type for leaf in listed),
        others=_others(folder, leaves),
        unlisted=tuple(sorted(index)),
    )


def _read_tree(folder: Path) -> Mapping[str, Any]:
    if METADATA not in list_folder(folder):
        raise PrepError(f"{folder} is not an Orbax checkpoint", f"it has no {METADATA}")
    tree = _read_json(folder / METADATA)
    if not isinstance(tree.get("tree_metadata"), dict):
        raise PrepError(f"{folder / METADATA} is broken", "it has no tree_metadata")
    if tree.get("use_zarr3"):
        raise PrepError(f"{folder} is stored as zarr3", "prep reads zarr v2 so far", _RESAVE)
    if tree.get("use_ocdbt") is False:
        raise PrepError(f"{folder} is stored as one file a chunk", "prep reads OCDBT so far", _RESAVE)
    return tree


def _read_json(path: Path) -> dict[str, Any]:
    try:
        document = parse_json(_read(path))
    except ValueError as error:
        raise PrepError(f"{path} is broken", str(error)) from error
    if not isinstance(document, dict):
        raise PrepError(f"{path} is broken", "it is not a JSON object")
    return document


def _read(path: Path, offset: int = 0, nbytes: int = -1) -> bytes:
    stat_file(path)
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(nbytes)
    except OSError as error:
        raise unreadable(path, error) from error


def _leaf(folder: Path, entry: Any) -> _Leaf:
    match entry:
        case {"key_metadata": [_, *_] as keys, "value_metadata": {"value_type": str(value_type)} as value}:
            path = tuple(_part(folder, key) for key in keys)
            return _Leaf(path, value_type, value.get("skip_deserialize") is True)
    raise PrepError(f"{folder / METADATA} is broken", "it describes a leaf without its path or type")


def _part(folder: Path, key: Any) -> str | int:
    match key:
        case {"key": str(text), "key_type": 1} if re.fullmatch("0|[1-9][0-9]{0,8}", text):
            return int(text)
        case {"key": str(text), "key_type": 2}:
            return text
    raise PrepError(f"{folder / METADATA} is broken", f"{shown(str(key))} is no part of a path")


_Index = dict[str, dict[str, Stored | bytes]]  # by array, then by what follows the slash


def _read_index(folder: Path) -> tuple[_Index, tuple[Path, ...]]:
    """The whole index, and the data files that it refers to."""
    index: _Index = {}
    numbers: dict[str, int] = {}
    for key, value in read_database(folder):
        name, _, rest = key.decode(errors="replace").rpartition("/")
        if isinstance(value, Place):
            file = numbers.setdefault(value.path, len(numbers))
            value = Stored(file, value.offset, value.nbytes)
        index.setdefault(name, {})[rest] = value
    return index, tuple(folder / path for path in numbers)


def _array(folder: Path, files: Sequence[Path], leaf: _Leaf, index: dict[str, Stored | bytes]) -> ArrayMeta:
    name = shown(dotted(leaf.path))
    if (stored := index.pop(".zarray", None)) is None:
        raise PrepError(f"{name} is not in the index of {folder}", f"{METADATA} lists it, but it has no .zarray")
    try:
        document = parse_json(stored if isinstance(stored, bytes) else _read_bytes(stored, files))
    except ValueError as error:
        raise PrepError(f"the .zarray of {name} is broken", str(error)) from error
    if not isinstance(document, dict):
        raise PrepError(f"the .zarray of {name} is broken", "it is not a JSON object")
    dtype = _raw_dtype(name, document)
    shape, chunk = _extents(document.get("shape")), _extents(document.get("chunks"))
    if shape is None or chunk is None or len(shape) != len(chunk) or 0 in chunk:
        why = f"shape {document.get('shape')}, chunks {document.get('chunks')}"
        raise PrepError(f"the .zarray of {name} is broken", why)
    return ArrayMeta(leaf.path, shape, dtype, chunk, leaf.value_type == "scalar" and not shape)


def _read_bytes(stored: Stored, files: Sequence[Path]) -> bytes:
    path = files[stored.file]
    if stored.nbytes > _MAX_ZARRAY_NBYTES or stored.offset + stored.nbytes > stat_file(path).st_size:
        raise ValueError(f"its {stored.nbytes:,} bytes are not in {path}")
    return _read(path, stored.offset, stored.nbytes)


def _extents(value: Any) -> tuple[int, ...] | None:
    if isinstance(value, list) and all(type(n) is int and n >= 0 for n in value):
        return tuple(value)
    return None


def _raw_dtype(name: str, document: Mapping[str, Any]) -> str:
    """The dtype of an array whose chunks are its elements and nothing else."""
    compressor, order, separator = (document.get(key) for key in ("compressor", "order", "dimension_separator"))
    if compressor is not None:
        method = compressor.get("id") if isinstance(compressor, dict) else compressor
        raise _not_raw(f"{name} is stored compressed with {shown(str(method))}")
    if document.get("filters"):
        raise _not_raw(f"{name} is stored with filters")
    if order != "C":
        raise _not_raw(f"{name} is stored in order {shown(str(order))}")
    if separator not in (None, "."):
        raise _not_raw(f"the chunks of {name} are named with {shown(str(separator))}")
    typestr = document.get("dtype")
    if isinstance(typestr, str) and typestr.startswith(">"):
        raise _not_raw(f"{name} is stored big endian")
    if not isinstance(typestr, str) or typestr not in _DTYPES:
        raise PrepError(f"{name} is {shown(str(typestr))}", f"prep carries {', '.join(TYPESTR)}")
    return _DTYPES[typestr]


def _not_raw(what: str) -> PrepError:
    return PrepError(what, "prep reads raw chunks so far: C order, little endian, named with dots", _RESAVE)


def _chunks(meta: ArrayMeta, index: Mapping[str, Stored | bytes], complete: bool) -> Chunks:
    """`complete`: the writer promised to store chunks also where they hold nothing but the fill value."""
    grid, chunk_nbytes, name = meta.grid, meta.chunk_nbytes, shown(meta.name)
    chunks: Chunks = {}
    for at in range(min(math.prod(grid), len(index) + 1)):  # a grid may claim to be endless
        key = chunk_key(grid_index := index_at(grid, at))
        if (stored := index.get(key)) is None:
            why = "" if complete else "it was saved by an old Orbax, which left out chunks of zeros"
            raise PrepError(f"the index of {name} misses chunk {key}", why, "" if complete else _RESAVE)
        nbytes = len(stored) if isinstance(stored, bytes) else stored.nbytes
        if nbytes != chunk_nbytes:
            why = f"it has {nbytes:,} bytes, {meta.chunk} of {meta.dtype} has {chunk_nbytes:,}"
            raise PrepError(f"chunk {key} of {name} has the wrong size", why)
        chunks[grid_index] = stored
    if len(index) > len(chunks):
        extra = next(iter(index.keys() - set(map(chunk_key, chunks))))
        raise PrepError(f"the index of {name} has chunk {shown(extra)}", f"its grid is {grid}")
    return chunks


def _check_places(arrays: Sequence[ArrayMeta], chunks: Sequence[Chunks], files: Sequence[Path]) -> None:
    """Every chunk in its file, no two on the same bytes."""
    sizes = [stat_file(file).st_size for file in files]
    places = sorted(
        (stored.file, stored.offset, stored.offset + stored.nbytes, n)
        for n, table in enumerate(chunks)
        for stored in table.values()
        if isinstance(stored, Stored)
    )
    for file, _, end, n in places:
        if end > sizes[file]:
            why = f"a chunk of {shown(arrays[n].name)} ends at byte {end:,}, the file at {sizes[file]:,}"
            raise PrepError(f"{files[file]} is cut short", why, "copy the checkpoint again")
    for (file, _, end, a), (next_file, start, _, b) in itertools.pairwise(places):
        if file == next_file and start < end:
            why = f"both use byte {start:,} of {files[file]}"
            raise PrepError(f"chunks of {shown(arrays[a].name)} and {shown(arrays[b].name)} overlap", why)


def _others(folder: Path, leaves: Sequence[_Leaf]) -> tuple[Other, ...]:
    strings = [leaf for leaf in leaves if leaf.value_type == "string" and not leaf.empty]
    texts = _read_json(folder / STRINGS) if strings else {}
    for leaf in strings:
        if not isinstance(texts.get(dotted(leaf.path)), str):
            raise PrepError(f"{folder / STRINGS} has no text for {shown(dotted(leaf.path))}")
    empty = [Other(leaf.path, leaf.value_type) for leaf in leaves if leaf.empty]
    return (*empty, *(Other(leaf.path, leaf.value_type, texts[dotted(leaf.path)]) for leaf in strings))
