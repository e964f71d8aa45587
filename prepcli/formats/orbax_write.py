"""What makes an Orbax item of raw chunks that lie in data files: the OCDBT index and Orbax's metadata.

Neither Orbax nor TensorStore is imported, and no bytes of weights pass through here.
"""

from __future__ import annotations

import itertools
import json
import math
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from prepcli.engine.no_follow import write_no_follow
from prepcli.errors import PrepError
from prepcli.formats.ocdbt import NODE_NBYTES, OcdbtEntry, ValueLocation, write_ocdbt_index
from prepcli.formats.orbax import (
    METADATA_FILE,
    STRINGS_FILE,
    ZARR_TYPESTRS,
    ArrayMeta,
    OrbaxNonArray,
    TreePath,
    chunk_key,
    dotted_name,
    find_name_clash,
    unravel_chunk_index,
)

CHECKPOINT_METADATA_FILE = "_CHECKPOINT_METADATA"
_HANDLER = "orbax.checkpoint._src.handlers.standard_checkpoint_handler.StandardCheckpointHandler"


@dataclass(frozen=True, slots=True)
class WrittenChunk:
    """Where the chunk `index` (one number per axis) of array number `array` lies: `nbytes` from `offset` of a file."""

    array: int
    index: tuple[int, ...]
    file: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class _Table:
    """File, offset and stored bytes of each chunk of one array, in C order of its grid; file -1: not placed yet."""

    meta: ArrayMeta
    grid: tuple[int, ...]
    chunk_nbytes: int
    files: array[int]
    offsets: array[int]
    nbytes: array[int]


def write_item_metadata(
    folder: Path,
    arrays: Sequence[ArrayMeta],
    chunks: Iterable[WrittenChunk],
    file_names: Sequence[str],
    now_ns: int,
    non_arrays: Sequence[OrbaxNonArray] = (),
    node_nbytes: int = NODE_NBYTES,
    zstd_level: int | None = None,
) -> None:
    """Write all that `folder` needs besides its data files to be an Orbax item, and a whole checkpoint of that item.

    `file_names` are paths relative to `folder`. Leaves are declared `np.ndarray`, so that any reader takes them with
    or without a target. `zstd_level` says how chunks are compressed, if they are. Equal arguments give equal files,
    whatever the order of `chunks`; nothing is fsynced. Raises PrepError, before it writes, where a leaf cannot be
    stored or the chunks are not each chunk of each array once.
    """
    _check_leaves(arrays, non_arrays)
    tables = [_empty_table(meta) for meta in arrays]
    for chunk in chunks:
        _place(tables[chunk.array], chunk, zstd_level is not None)
    for table in tables:
        _check_whole(table)
    write_ocdbt_index(folder, _entries(tables, file_names, zstd_level), now_ns, node_nbytes)
    _write_json(folder / METADATA_FILE, _tree_metadata(arrays, non_arrays))
    _write_json(folder / CHECKPOINT_METADATA_FILE, _checkpoint_metadata(_HANDLER, now_ns))
    if texts := {dotted_name(leaf.path): leaf.text for leaf in non_arrays if leaf.value_type == "string"}:
        _write_json(folder / STRINGS_FILE, texts)
    write_no_follow(folder / "commit_success.txt", b"Checkpoint commit was successful.\n")


def write_step_metadata(folder: Path, item_name: str, now_ns: int) -> None:
    """Make `folder` a whole checkpoint of the item in its folder `item`, as Orbax keeps those of a run's steps."""
    _write_json(folder / CHECKPOINT_METADATA_FILE, _checkpoint_metadata({item_name: _HANDLER}, now_ns))


def encode_zarray(meta: ArrayMeta, zstd_level: int | None = None) -> bytes:
    """The `.zarray` document of an array, raw or compressed, in TensorStore's own spelling."""
    document = {
        "chunks": meta.chunk_shape,
        "compressor": None if zstd_level is None else {"id": "zstd", "level": zstd_level},
        "dimension_separator": ".",
        "dtype": ZARR_TYPESTRS[meta.dtype],
        "fill_value": None,
        "filters": None,
        "order": "C",
        "shape": meta.shape,
        "zarr_format": 2,
    }
    return json.dumps(document, separators=(",", ":")).encode()


def _check_leaves(arrays: Sequence[ArrayMeta], others: Sequence[OrbaxNonArray]) -> None:
    if not arrays:
        raise PrepError("the checkpoint would hold no arrays")
    for meta in arrays:
        if meta.dtype not in ZARR_TYPESTRS:
            raise PrepError(
                f"{meta.name} is {meta.dtype}",
                f"TensorStore's zarr v2 holds {', '.join(ZARR_TYPESTRS)}",
                "cast it: --dtype bfloat16",
            )
        if len(meta.chunk_shape) != len(meta.shape) or min(meta.chunk_shape, default=1) < 1:
            raise PrepError(f"chunk {meta.chunk_shape} of {meta.name} does not suit its shape {meta.shape}")
    paths = [leaf.path for leaf in (*arrays, *others)]
    for path in paths:
        if not path or not all(part and not {".", "/"} & set(part) for part in map(str, path)):
            raise PrepError(f"{path} cannot name a leaf of an Orbax checkpoint", "a part is empty or holds a . or a /")
    if names := find_name_clash(paths):
        raise PrepError(f"the tree has two leaves in one place, {names[0]} and {names[1]}")


def _empty_table(meta: ArrayMeta) -> _Table:
    grid = meta.grid
    n = math.prod(grid)
    return _Table(meta, grid, meta.chunk_nbytes, array("q", [-1]) * n, array("q", [0]) * n, array("q", [0]) * n)


def _place(table: _Table, chunk: WrittenChunk, compressed: bool) -> None:
    at, inside = 0, len(chunk.index) == len(table.grid)
    for i, n in zip(chunk.index, table.grid):
        at, inside = at * n + i, inside and 0 <= i < n
    if not inside:
        raise _chunk_error(table, chunk, "", f"its grid is {table.grid}")
    if not compressed and chunk.nbytes != table.chunk_nbytes:
        meta = table.meta
        why = f"it has {chunk.nbytes:,} bytes, {meta.chunk_shape} of {meta.dtype} has {table.chunk_nbytes:,}"
        raise PrepError(f"chunk {chunk_key(chunk.index)} of {meta.name} has the wrong size", why)
    if table.files[at] >= 0:
        raise _chunk_error(table, chunk, " twice")
    table.files[at], table.offsets[at], table.nbytes[at] = chunk.file, chunk.offset, chunk.nbytes


def _chunk_error(table: _Table, chunk: WrittenChunk, how: str, why: str = "") -> PrepError:
    return PrepError(f"the index of {table.meta.name} has chunk {chunk_key(chunk.index)}{how}", why)


def _check_whole(table: _Table) -> None:
    if -1 not in table.files:
        return
    missing = unravel_chunk_index(table.grid, table.files.index(-1))
    raise PrepError(f"the index of {table.meta.name} misses chunk {chunk_key(missing)}")


def _entries(tables: Sequence[_Table], file_names: Sequence[str], zstd_level: int | None) -> Iterator[OcdbtEntry]:
    """In the order of keys: no name holds a slash, and both `.` and `/` come before the digits."""
    by_key = sorted((f"{table.meta.name}/".encode(), n) for n, table in enumerate(tables))
    for prefix, n in by_key:
        table = tables[n]
        yield prefix + b".zarray", encode_zarray(table.meta, zstd_level)
        axes = [sorted(range(extent), key=str) for extent in table.grid]
        labels = [[b"%d" % i for i in axis] for axis in axes]
        steps = [math.prod(table.grid[n + 1 :]) for n in range(len(axes))]
        starts = [[i * step for i in axis] for axis, step in zip(axes, steps)]
        for label, start in zip(itertools.product(*labels), itertools.product(*starts)):
            at = sum(start)
            place = ValueLocation(file_names[table.files[at]], table.offsets[at], table.nbytes[at])
            yield prefix + (b".".join(label) or b"0"), place


def _tree_metadata(arrays: Sequence[ArrayMeta], others: Sequence[OrbaxNonArray]) -> dict[str, object]:
    tree: dict[str, object] = {}
    for meta in arrays:
        value_type = "scalar" if meta.is_scalar else "np.ndarray"
        tree[_key(meta.path)] = {
            "key_metadata": _key_metadata(meta.path),
            "value_metadata": {"value_type": value_type, "skip_deserialize": False, "write_shape": meta.chunk_shape},
        }
    for leaf in others:
        skip = leaf.value_type != "string"
        tree[_key(leaf.path)] = {
            "key_metadata": _key_metadata(leaf.path),
            "value_metadata": {"value_type": leaf.value_type, "skip_deserialize": skip},
        }
    return {
        "tree_metadata": tree,
        "use_ocdbt": True,
        "use_zarr3": False,
        "store_array_data_equal_to_fill_value": True,
        "custom_metadata": None,
    }


def _key(path: TreePath) -> str:
    return str(tuple(map(str, path)))


def _key_metadata(path: TreePath) -> list[dict[str, object]]:
    return [{"key": str(part), "key_type": 1 if isinstance(part, int) else 2} for part in path]


def _checkpoint_metadata(handlers: str | dict[str, str], now_ns: int) -> dict[str, object]:
    return {
        "item_handlers": handlers,
        "metrics": {},
        "performance_metrics": {},
        "init_timestamp_nsecs": now_ns,
        "commit_timestamp_nsecs": now_ns,
        "custom_metadata": {},
    }


def _write_json(path: Path, document: object) -> None:
    write_no_follow(path, json.dumps(document).encode())
