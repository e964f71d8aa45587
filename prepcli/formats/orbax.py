"""An Orbax item, the folder that holds one tree of arrays, and Levanter's variant: find it, read it, write it.

Arrays are stored as zarr: a metadata document and one value per chunk below the name of the array, which is its path in
the tree joined by dots. `orbax_chunks` describes where. prep writes chunks in C order, little endian, and pads the last
chunk of an axis to full size. The tree is in `_METADATA`. A checkpoint of Levanter has no such file: its tree follows
from the keys of its database, e.g. `model/lm_head/weight/zarr.json`, and `metadata.json` holds the step. (Facts of
marin-levanter 0.2.20: checkpoint.py and tensorstore_serialization.py.)

Items are untrusted, so all metadata is checked. Every chunk of a returned item is in a regular file inside the folder,
has the expected size (unless it is compressed), and does not overlap another chunk. Only metadata is read and written,
without Orbax, Levanter or TensorStore.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from prepcli.algebra.grids import ChunkTable
from prepcli.core.errors import GET_AGAIN_HINT, DamagedError, Option, PrepError, text
from prepcli.core.json_values import JsonObject, parse_json, quote_name
from prepcli.engine.digest import record_digest
from prepcli.formats.ocdbt import (
    NODE_NBYTES,
    OCDBT_MANIFEST,
    encode_ocdbt_index,
)
from prepcli.formats.orbax_chunks import (
    BUG_HINT,
    ItemValues,
    StoredChunks,
    TreePath,
    WrittenChunk,
    build_chunk_table,
    check_chunk_tables,
    collect_chunks,
    dotted_name,
    encode_documents,
    iter_index_entries,
    unplaced_array,
)
from prepcli.formats.registry import SUFFIXES
from prepcli.formats.zarr import ZARR_TYPESTRS, parse_zarr_document
from prepcli.planning.arrays import Array
from prepcli.planning.item_storage import (
    LEVANTER,
    LEVANTER_METADATA_FILE,
    METADATA_FILE,
    OCDBT,
    ORBAX_STORAGES,
    ZARR2,
    ZARR3,
    Compression,
    ItemStorage,
)
from prepcli.planning.libraries import LIBRARIES
from prepcli.stores.files import list_folder, read_small_file, write_no_follow
from prepcli.stores.paths import AnyPath, PathT

STRINGS_FILE = "_strings.json"
CHECKPOINT_METADATA_FILE = "_CHECKPOINT_METADATA"
COMMIT_MARKER = "commit_success.txt"  # name that Orbax uses
# Files that mark an item, a conversion and a run. The modules that define the last two names import
# this one.
CHECKPOINT_FILES = {METADATA_FILE, "prep-manifest.json", "recipe.toml"}
# Metadata file of an item -> all files that identify the item. Other formats may have a `metadata.json`.
ITEM_MARKERS = {
    METADATA_FILE: (METADATA_FILE,),
    LEVANTER_METADATA_FILE: (LEVANTER_METADATA_FILE, OCDBT_MANIFEST),
}
# Places of items in a step of another trainer, for the checkpoints that prep exports.
ITEM_PLACES = [library.item for library in LIBRARIES if library.item and library.item.item]
# Names of the item with the parameters.
MODEL_ITEMS = {place.item for place in ITEM_PLACES}
# Item with the optimizer state, by the name of the item with the parameters.
STATE_ITEMS = {place.item: place.state_item for place in ITEM_PLACES if place.state_item}
# Names of the item with the parameters next to an item with other state. redco has `params`.
PARAMS_ITEMS = ("params", *STATE_ITEMS)
# Usual names of the only item of a step: of CheckpointManager in Orbax, of prep, and of MaxText.
ITEM_NAMES = ("default", "state", "items")
# Name of a step's folder. Levanter writes `step-1000`.
_STEP_NAME = re.compile(r"(?:step-)?([0-9]+)")
# Orbax writes an item to a folder with this suffix, and renames it when it is complete.
_UNFINISHED_MARK = ".orbax-checkpoint-tmp"
# The name of the handler that orbax-checkpoint 0.12 records for a tree of arrays.
_HANDLER = "orbax.checkpoint._src.handlers.standard_checkpoint_handler.StandardCheckpointHandler"


@dataclass(frozen=True, slots=True)
class OrbaxNonArray:
    """A leaf of the tree other than an array: a string, an empty container or None."""

    path: TreePath
    # Orbax's name: "string", "Dict", "List", "Tuple", "NamedTuple", "None".
    value_type: str
    text: str = ""  # content of a string

    @property
    def is_string(self) -> bool:
        """Whether the leaf is a string."""
        return self.value_type == "string"


@dataclass(frozen=True, slots=True)
class OrbaxItem:
    """Arrays of an item. `value_types` is parallel to `arrays`.

    Attributes:
        folder: Folder of the item.
        arrays: Arrays in the order of the tree, with their chunks as stored. Missing chunks read as zeros.
        files: Files, by the file number of chunks.
        value_types: Orbax's type of each leaf: `jax.Array`, `np.ndarray` or `scalar`.
        non_arrays: Leaves other than arrays.
        unlisted_names: Names in the index without a leaf in the tree. Orbax ignores them too.
        metadata_digest: Digest of all metadata of the item.
    """

    folder: AnyPath
    arrays: tuple[Array, ...]
    files: tuple[AnyPath, ...]
    value_types: tuple[str, ...]
    non_arrays: tuple[OrbaxNonArray, ...]
    unlisted_names: tuple[str, ...]
    metadata_digest: str


@dataclass(frozen=True, slots=True)
class _TreeLeaf:
    """A leaf of a stored tree."""

    path: TreePath
    value_type: str
    is_empty: bool = False

    @property
    def is_array(self) -> bool:
        return not self.is_empty and self.value_type != "string"


# The leaves of an item in the order of the tree, its stored values, and whether every chunk is stored. Otherwise
# TensorStore has omitted chunks of zeros.
_StoredTree = tuple[list[_TreeLeaf], ItemValues, bool]


def item_metadata_file(folder: AnyPath) -> str | None:
    """Return the name of the file with the metadata of an item, or None if the folder is no item.

    A checkpoint of Levanter is an item too: a tree of zarr arrays, without Orbax's description of the tree.
    """
    for name, marker_files in ITEM_MARKERS.items():
        if all((folder / file).is_file() for file in marker_files):
            return name
    return None


def find_item(path: PathT, names: Sequence[str] | None = None) -> PathT | None:
    """Return the item that `path` is or holds: the item of a step folder, or of a run folder's last step.

    `names` are those in the folder, if they were listed before.
    """
    item, children = _search_step(path, names)
    if item is not None:
        return item
    steps: list[tuple[int, PathT]] = []
    for child in children:
        if match := _STEP_NAME.fullmatch(child.name):
            steps.append((int(match[1]), child))
    # A killed writer may have left the last step without an item.
    for _, step in sorted(steps, key=lambda numbered: numbered[0], reverse=True):
        item, _ = _search_step(step)
        if item is not None:
            return item
    return None


def _search_step(
    step: PathT, names: Sequence[str] | None = None
) -> tuple[PathT | None, list[PathT]]:
    """Return the item of a step folder, if it has one, and the subfolders that were searched.

    The names that Orbax uses come first, then the only item, then one of `PARAMS_ITEMS` next to an optimizer state. A
    folder with an item and checkpoints of other formats holds several models, and no item is chosen.
    """
    candidates = [step / name for name in ITEM_NAMES if names is None or name in names]
    if names is None or not ITEM_MARKERS.keys().isdisjoint(names):
        candidates.insert(0, step)
    for candidate in candidates:
        if item_metadata_file(candidate) is not None:
            return candidate, []
    items: list[PathT] = []
    children = _list_subfolders(step, names)
    for child in children:
        if (child / METADATA_FILE).is_file() and not child.name.isdigit():
            items.append(child)
    if len(items) == 1:
        is_only_model = len(list_checkpoint_folders(step)) <= 1
        return (items[0] if is_only_model else None), children
    for item in items:
        if item.name in PARAMS_ITEMS:
            return item, children
    return None, children


def list_checkpoint_folders(path: AnyPath) -> list[AnyPath]:
    """Return the subfolders with weights of any format or with files of prep. Steps are omitted."""
    folders: list[AnyPath] = []
    for child in _list_subfolders(path):
        is_hidden = child.name.startswith(".") or child.name.endswith(".partial")
        if is_hidden or child.name.isdigit():
            continue
        try:
            names = list_folder(child)
        except PrepError:  # a folder of someone else
            continue
        if any(n in CHECKPOINT_FILES or n.endswith(SUFFIXES) for n in names):
            folders.append(child)
    return folders


def _list_subfolders(path: PathT, names: Sequence[str] | None = None) -> list[PathT]:
    if not path.is_dir():
        return []
    if names is None:
        names = list_folder(path)
    return [path / name for name in names if (path / name).is_dir()]


def find_name_clash(paths: Iterable[TreePath]) -> tuple[str, str] | None:
    """Return the names of two leaves with conflicting paths. None if there are none."""
    names = sorted((dotted_name(path), tuple(map(str, path))) for path in paths)
    # Two kinds of clash: ("a.b",) and ("a", "b") have the same name on disk, and a leaf "a"
    # cannot be a folder with "b" in it. After sorting, each clash is between neighbours.
    for (a, _), (b, _) in itertools.pairwise(names):
        if a == b:
            return a, b
    for a, b in itertools.pairwise(sorted(path for _, path in names)):
        if b[: len(a)] == a:
            return dotted_name(a), dotted_name(b)
    return None


def read_item(folder: AnyPath) -> OrbaxItem:
    """Read and check the metadata of an item."""
    for part in folder.absolute().parts:
        if _UNFINISHED_MARK in part:
            what = f"{folder} is a checkpoint that Orbax did not finish"
            hint = "use an earlier step, or save it again"
            raise PrepError(what, f"its folder is {part}", hint)
    # Raises an error for a folder that does not exist or cannot be read.
    list_folder(folder)
    metadata_file = item_metadata_file(folder)
    if metadata_file is None:
        what = f"{folder} is not an Orbax checkpoint"
        hint = f"pass the folder that contains {METADATA_FILE}, e.g. STEP/default"
        raise PrepError(what, f"it has no {METADATA_FILE}", hint)
    if metadata_file == LEVANTER_METADATA_FILE:
        all_leaves, values, is_complete = _read_levanter_tree(folder)
    else:
        all_leaves, values, is_complete = _read_orbax_tree(folder)
    if clash := find_name_clash(leaf.path for leaf in all_leaves):
        raise _broken_file_error(
            folder / metadata_file,
            f"a leaf {quote_name(clash[0])} cannot exist next to {quote_name(clash[1])}",
        )
    leaves = [leaf for leaf in all_leaves if leaf.is_array]
    storage = values.storage
    names = [storage.name_separator.join(map(str, leaf.path)) for leaf in leaves]
    documents = [values.pop_document(name) for name in names]
    unplaced: list[Array] = []
    tables: list[StoredChunks] = []
    codec_names: list[tuple[str, ...]] = []
    # All documents are parsed before the chunks of any array, which take more memory.
    zarrs = [
        parse_zarr_document(quote_name(name), storage.zarr, document)
        for name, document in zip(names, documents)
    ]
    for leaf, name, zarr in zip(leaves, names, zarrs):
        chunks_by_key = values.by_name.pop(name)
        tables.append(build_chunk_table(quote_name(name), zarr, chunks_by_key, values, is_complete))
        unplaced.append(unplaced_array(leaf.path, zarr.shape, zarr.dtype, zarr.chunk_shape))
        codec_names.append(zarr.codec_names)
    check_chunk_tables(folder, unplaced, codec_names, tables, values.files)
    arrays: list[Array] = []
    for array, chunks, codecs in zip(unplaced, tables, codec_names):
        table = ChunkTable.from_stored(array.grid.chunk_counts, chunks)
        arrays.append(replace(array, chunks=table, codecs=codecs))
    metadata = [read_small_file(folder / metadata_file)]
    if (folder / OCDBT_MANIFEST).exists():
        metadata.append(read_small_file(folder / OCDBT_MANIFEST))
    return OrbaxItem(
        folder=folder,
        arrays=tuple(arrays),
        files=values.files,
        value_types=tuple(leaf.value_type for leaf in leaves),
        non_arrays=_read_non_arrays(folder, all_leaves),
        unlisted_names=tuple(sorted(values.by_name)),
        metadata_digest=record_digest(b"".join([*metadata, *documents])),
    )


def _read_orbax_tree(folder: AnyPath) -> _StoredTree:
    """Read the tree in the metadata file of Orbax."""
    tree = _read_json(folder / METADATA_FILE)
    entries = tree.get("tree_metadata")
    if not isinstance(entries, dict):
        raise _broken_file_error(folder / METADATA_FILE, "it has no tree_metadata")
    leaves: list[_TreeLeaf] = []
    for entry in entries.values():
        match entry:
            # `skip_deserialize` marks leaves without stored values: None and empty containers
            case {
                "key_metadata": [_, *_] as keys,
                "value_metadata": {"value_type": str(value_type)} as value,
            }:
                is_empty = value.get("skip_deserialize") is True
            case _:
                why = "it describes a leaf without a path or a type"
                raise _broken_file_error(folder / METADATA_FILE, why)
        path: list[str | int] = []
        for key in keys:
            # Orbax's KeyType: 1 is an index of a sequence, 2 a key of a dict. Nine digits bound the list that
            # a hostile index can ask for.
            match key:
                case {"key": str(part), "key_type": 1} if re.fullmatch("0|[1-9][0-9]{0,8}", part):
                    path.append(int(part))
                case {"key": str(part), "key_type": 2}:
                    path.append(part)
                case _:
                    why = f"{quote_name(str(key))} is not a part of a path"
                    raise _broken_file_error(folder / METADATA_FILE, why)
        leaves.append(_TreeLeaf(tuple(path), value_type, is_empty))
    names = [dotted_name(leaf.path) for leaf in leaves if leaf.is_array]
    # Without the keys, the storage is OCDBT and zarr 2, the defaults of Orbax.
    has_chunk_files = tree.get("use_ocdbt", True) is False
    zarr = ZARR3 if tree.get("use_zarr3") else ZARR2
    storage = next(
        storage
        for storage in ORBAX_STORAGES.values()
        if storage.zarr == zarr and storage.has_chunk_files == has_chunk_files
    )
    # By default TensorStore omits chunks that equal the fill value. With this key it stores all of
    # them, so that a missing chunk is damage and not zeros.
    is_complete = tree.get("store_array_data_equal_to_fill_value") is True
    return leaves, ItemValues(folder, names, storage), is_complete


def _read_levanter_tree(folder: AnyPath) -> _StoredTree:
    """Read the tree from the keys of the database: each array has a document below its path."""
    values = ItemValues(folder, (), LEVANTER)
    leaves: list[_TreeLeaf] = []
    for name, chunks_by_key in values.by_name.items():
        if LEVANTER.zarr.document in chunks_by_key:
            leaves.append(_TreeLeaf(tuple(name.split(LEVANTER.name_separator)), "jax.Array"))
    return leaves, values, False


def _read_json(path: AnyPath) -> JsonObject:
    try:
        document = parse_json(read_small_file(path))
    except ValueError as error:
        raise _broken_file_error(path, str(error)) from error
    if not isinstance(document, dict):
        raise _broken_file_error(path, "it is not a JSON object")
    return document


def _broken_file_error(path: AnyPath, why: str) -> DamagedError:
    return DamagedError(f"{path} is broken", why, GET_AGAIN_HINT)


def _read_non_arrays(folder: AnyPath, leaves: Sequence[_TreeLeaf]) -> tuple[OrbaxNonArray, ...]:
    """Return the empty leaves, then the strings of a tree with their texts."""
    others = [OrbaxNonArray(leaf.path, leaf.value_type) for leaf in leaves if leaf.is_empty]
    strings = [leaf for leaf in leaves if not leaf.is_empty and not leaf.is_array]
    # Orbax writes the file of strings only if the tree has some.
    texts = _read_json(folder / STRINGS_FILE) if strings else {}
    for leaf in strings:
        name = dotted_name(leaf.path)
        content = texts.get(name)
        if not isinstance(content, str):
            why = f"it has no text for {quote_name(name)}"
            raise _broken_file_error(folder / STRINGS_FILE, why)
        others.append(OrbaxNonArray(leaf.path, leaf.value_type, content))
    return tuple(others)


def write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write files by their paths in a folder. Nothing is fsynced."""
    for path, content in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        write_no_follow(folder / path, content)


def encode_item_metadata(
    arrays: Sequence[Array],
    chunks: Iterable[WrittenChunk],
    file_names: Sequence[str],
    now_ns: int,
    *,
    storage: ItemStorage = OCDBT,
    compression: Compression | None = None,
    non_arrays: Sequence[OrbaxNonArray] = (),
    step: int = 0,
    node_nbytes: int = NODE_NBYTES,
) -> dict[str, bytes]:
    """Return the metadata files of an item, by their paths in its folder. The item is also a checkpoint.

    Leaves are declared as `np.ndarray`, so that Orbax restores them with or without a target. Equal arguments give
    equal files, independent of the order of `chunks`.

    Args:
        arrays: Arrays of the item.
        chunks: Location of every chunk of every array.
        file_names: Data files by number, relative to the folder of the item.
        now_ns: Commit time in nanoseconds since the epoch.
        storage: Storage of the arrays. It also decides between an item of Orbax and of Levanter.
        compression: Compression of the chunks. None for raw chunks.
        non_arrays: Leaves other than arrays. Levanter has none.
        step: Number of finished steps. Orbax does not record it.
        node_nbytes: Decoded size at which an index node is split.

    Returns:
        Content of each file. The one that completes the item is the last.

    Raises:
        PrepError: A leaf cannot be stored, or a chunk is missing, duplicate or of the wrong size.
    """
    if not arrays:
        what = "cannot write an Orbax checkpoint without arrays"
        raise PrepError(
            what, "the tree contains no arrays", "add an array, or write another format"
        )
    for meta in arrays:
        if meta.dtype not in ZARR_TYPESTRS:
            why = f"zarr v2 of TensorStore supports {', '.join(ZARR_TYPESTRS)}"
            hint = text("cast it: {}", Option("dtype", "bfloat16"))
            raise PrepError(f"{meta.name} is {meta.dtype}", why, hint)
        if len(meta.chunk_shape) != len(meta.shape) or min(meta.chunk_shape, default=1) < 1:
            what = f"chunk {meta.chunk_shape} of {meta.name} does not match its shape {meta.shape}"
            raise PrepError(what, "each axis needs a chunk extent of at least 1", BUG_HINT)
    paths = [leaf.path for leaf in (*arrays, *non_arrays)]
    if () in paths:
        why = "an Orbax tree needs a key for each array"
        raise PrepError("cannot write a single array", why, "write a dict of arrays")
    if names := find_name_clash(paths):
        what = "the tree has two leaves with clashing names"
        raise PrepError(what, f"{names[0]} and {names[1]}", "rename one of them")
    tables = collect_chunks(arrays, chunks, is_compressed=compression is not None)
    if storage.has_chunk_files:
        files = encode_documents(tables, file_names, storage, compression)
    else:
        entries = iter_index_entries(tables, file_names, storage, compression)
        files = encode_ocdbt_index(entries, now_ns, node_nbytes)
    if storage == LEVANTER:
        # Levanter compares the times of checkpoints of one step, and writes them without a time zone.
        time = datetime.fromtimestamp(now_ns // 10**9, UTC).replace(tzinfo=None).isoformat()
        # The first step of Levanter is step 0, so that the last one is the number of finished steps minus 1.
        metadata = {"step": max(0, step - 1), "timestamp": time, "is_temporary": False}
        files[LEVANTER_METADATA_FILE] = json.dumps(metadata).encode()
        return files
    tree = _tree_metadata(arrays, non_arrays, storage)
    files[METADATA_FILE] = json.dumps(tree).encode()
    checkpoint = _checkpoint_metadata(_HANDLER, now_ns)
    files[CHECKPOINT_METADATA_FILE] = json.dumps(checkpoint).encode()
    texts = {dotted_name(each.path): each.text for each in non_arrays if each.is_string}
    if texts:
        files[STRINGS_FILE] = json.dumps(texts).encode()
    # Orbax on Google Cloud Storage takes an item without this marker for unfinished.
    files[COMMIT_MARKER] = b"Checkpoint commit was successful.\n"
    return files


def encode_step_metadata(item_names: Iterable[str], now_ns: int) -> dict[str, bytes]:
    """Return the metadata file of a training step of Orbax with items in its subfolders."""
    metadata = _checkpoint_metadata(dict.fromkeys(item_names, _HANDLER), now_ns)
    return {CHECKPOINT_METADATA_FILE: json.dumps(metadata).encode()}


def _tree_metadata(
    arrays: Sequence[Array], non_arrays: Sequence[OrbaxNonArray], storage: ItemStorage
) -> dict[str, object]:
    """Return the content of the metadata file with the tree's keys and value types."""
    tree: dict[str, object] = {}
    for leaf in (*arrays, *non_arrays):
        if isinstance(leaf, Array):
            value_metadata = {
                "value_type": "np.ndarray",
                "skip_deserialize": False,
                "write_shape": leaf.chunk_shape,
            }
        else:
            value_metadata = {
                "value_type": leaf.value_type,
                "skip_deserialize": not leaf.is_string,
            }
        keys: list[dict[str, object]] = []
        for part in leaf.path:
            keys.append({"key": str(part), "key_type": 1 if isinstance(part, int) else 2})
        tree[str(tuple(map(str, leaf.path)))] = {
            "key_metadata": keys,
            "value_metadata": value_metadata,
        }
    return {
        "tree_metadata": tree,
        "use_ocdbt": not storage.has_chunk_files,
        "use_zarr3": storage.zarr == ZARR3,
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
