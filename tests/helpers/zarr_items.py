"""Write small Orbax items in every storage form with a simple reference encoder."""

from __future__ import annotations

import gzip
import itertools
import json
import math
import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import zstandard

from prepcli.formats.ocdbt import ValueLocation
from prepcli.formats.orbax_chunks import unplaced_array
from prepcli.formats.zarr import ZARR_TYPESTRS
from prepcli.planning.arrays import Array
from tests.helpers.orbax_items import NOW_NS, chunk_bytes, write_ocdbt_index

ENCODERS = {
    "zstd": zstandard.ZstdCompressor(level=1).compress,
    "gzip": lambda data: gzip.compress(data, 1),
    "zlib": lambda data: zlib.compress(data, 1),
    "crc32c": lambda data: data + struct.pack("<I", google_crc32c.value(data)),
}


@dataclass(frozen=True, slots=True)
class StorageForm:
    """Storage form of an item; `chunks_per_shard` is per axis, 0 for no shards."""

    zarr3: bool = False
    ocdbt: bool = True
    codec_names: tuple[str, ...] = ()
    chunks_per_shard: int = 0
    max_inline_nbytes: int = 0
    omits_zero_chunks: bool = False
    separator: str = "/"
    index_at_end: bool = True


def encode(data: bytes, steps: tuple[str, ...]) -> bytes:
    """Encode a chunk by each codec in turn."""
    for step in steps:
        data = ENCODERS[step](data)
    return data


def document(meta: Array, form: StorageForm) -> dict[str, Any]:
    """Return the metadata of an array as JSON."""
    if not form.zarr3:
        compressor = {"id": form.codec_names[0], "level": 1} if form.codec_names else None
        return {
            "chunks": meta.chunk_shape, "compressor": compressor, "dimension_separator": ".",
            "dtype": ZARR_TYPESTRS[meta.dtype],
            "fill_value": None, "filters": None, "order": "C", "shape": meta.shape, "zarr_format": 2,
        }  # fmt: skip
    codecs: list[dict[str, Any]] = [{"name": "bytes", "configuration": {"endian": "little"}}]
    codecs += [{"name": step} for step in form.codec_names]
    if form.chunks_per_shard:
        index = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
        location = {} if form.index_at_end else {"index_location": "start"}
        inside = {
            "chunk_shape": meta.chunk_shape,
            "codecs": codecs,
            "index_codecs": index,
            **location,
        }
        codecs = [{"name": "sharding_indexed", "configuration": inside}]
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": meta.shape,
        "data_type": meta.dtype,
        "fill_value": 0,
        "chunk_grid": {
            "name": "regular",
            "configuration": {"chunk_shape": _stored_chunk(meta, form)},
        },
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": form.separator}},
        "codecs": codecs,
    }


def _stored_chunk(meta: Array, form: StorageForm) -> tuple[int, ...]:
    return tuple(n * max(1, form.chunks_per_shard) for n in meta.chunk_shape)


def _key(index: tuple[int, ...], form: StorageForm) -> str:
    """Return the key of a chunk, e.g. `0.1` or `c/0/1`."""
    return (
        form.separator.join(("c", *map(str, index)))
        if form.zarr3
        else ".".join(map(str, index)) or "0"
    )


def _values(meta: Array, array: np.ndarray, form: StorageForm) -> Iterator[tuple[str, bytes]]:
    """Yield the key and value of each stored chunk or shard."""
    stored = _stored_chunk(meta, form)
    outer = replace(meta, chunk_shape=stored)
    for index in np.ndindex(outer.grid.chunk_counts):
        if form.chunks_per_shard:
            value = _shard(meta, array, index, form)
        else:
            value = encode(chunk_bytes(array, meta.chunk_shape, index), form.codec_names)
        part = array[tuple(slice(i * c, (i + 1) * c) for i, c in zip(index, stored))]
        if not (form.omits_zero_chunks and not part.view(np.uint8).any() if part.ndim else False):
            yield _key(index, form), value


def _shard(meta: Array, array: np.ndarray, outer: tuple[int, ...], form: StorageForm) -> bytes:
    """Return a shard: the encoded chunks of a part of the array with an index of them."""
    parts = (form.chunks_per_shard,) * len(meta.shape)
    count = math.prod(parts)
    table, data = [], b""
    start = 0 if form.index_at_end else 16 * count + 4
    for inner in np.ndindex(parts):
        index = tuple(o * form.chunks_per_shard + i for o, i in zip(outer, inner))
        if all(i < n for i, n in zip(index, meta.grid.chunk_counts)):
            value = encode(chunk_bytes(array, meta.chunk_shape, index), form.codec_names)
            table += [start + len(data), len(value)]
            data += value
        else:
            table += [2**64 - 1, 2**64 - 1]
    index_bytes = encode(struct.pack(f"<{2 * count}Q", *table), ("crc32c",))
    return data + index_bytes if form.index_at_end else index_bytes + data


def write_zarr_item(folder: Path, arrays: Mapping[Array, np.ndarray], form: StorageForm) -> None:
    """Write an item of these arrays."""
    folder.mkdir(parents=True)
    name = "zarr.json" if form.zarr3 else ".zarray"
    values: dict[str, bytes] = {}
    for meta, array in arrays.items():
        values[f"{meta.name}/{name}"] = json.dumps(document(meta, form)).encode()
        values |= {f"{meta.name}/{key}": value for key, value in _values(meta, array, form)}
    if form.ocdbt:
        _database(folder, values, form)
    else:
        for key, value in values.items():
            (folder / key).parent.mkdir(parents=True, exist_ok=True)
            (folder / key).write_bytes(value)
    leaves = {
        str(meta.path): {
            "key_metadata": [
                {"key": str(part), "key_type": 1 if isinstance(part, int) else 2}
                for part in meta.path
            ],
            "value_metadata": {"value_type": "np.ndarray", "skip_deserialize": False},
        }
        for meta in arrays
    }
    tree = {"tree_metadata": leaves, "use_ocdbt": form.ocdbt, "use_zarr3": form.zarr3}
    tree["store_array_data_equal_to_fill_value"] = not form.omits_zero_chunks
    (folder / "_METADATA").write_text(json.dumps(tree))


def _database(folder: Path, values: Mapping[str, bytes], form: StorageForm) -> None:
    """Write keys and values as an OCDBT database."""
    (folder / "ocdbt.process_0/d").mkdir(parents=True)
    data, entries = bytearray(), []
    for key, value in values.items():
        if len(value) <= form.max_inline_nbytes or key.endswith(("zarray", "zarr.json")):
            entries.append((key.encode(), value))
        else:
            entries.append(
                (key.encode(), ValueLocation("ocdbt.process_0/d/data", len(data), len(value)))
            )
            data += value
    (folder / "ocdbt.process_0/d/data").write_bytes(data)
    write_ocdbt_index(folder, sorted(entries, key=lambda entry: entry[0]), NOW_NS, 400)


ALL_STEPS = ((), ("zstd",), ("gzip",), ("crc32c",), ("zstd", "crc32c"))
STORAGE_FORMS = [
    *(StorageForm(codec_names=(step,) if step else ()) for step in ("", "zstd", "gzip", "zlib")),
    *(StorageForm(ocdbt=False, codec_names=(step,) if step else ()) for step in ("", "zstd")),
    *(
        StorageForm(max_inline_nbytes=60, codec_names=(step,) if step else ())
        for step in ("", "zstd")
    ),
    *(StorageForm(zarr3=True, codec_names=steps) for steps in ALL_STEPS),
    *(
        StorageForm(zarr3=True, chunks_per_shard=shard, codec_names=steps)
        for shard, steps in itertools.product((1, 2), ALL_STEPS)
    ),
    StorageForm(zarr3=True, chunks_per_shard=2, codec_names=("zstd",), ocdbt=False),
    StorageForm(zarr3=True, chunks_per_shard=2, max_inline_nbytes=200),
    StorageForm(zarr3=True, chunks_per_shard=2, index_at_end=False),
    StorageForm(zarr3=True, separator=".", codec_names=("zstd",)),
    StorageForm(omits_zero_chunks=True),
    StorageForm(omits_zero_chunks=True, codec_names=("zstd",), zarr3=True, chunks_per_shard=2),
    StorageForm(omits_zero_chunks=True, ocdbt=False),
]


def write_item(folder: Path, leaves: Mapping[str, np.ndarray]) -> None:
    """Write a tree with dotted names as an Orbax item with one chunk per leaf, without prep's writer and manifest."""
    arrays: dict[Array, np.ndarray] = {}
    for name, leaf in leaves.items():
        meta = unplaced_array(tuple(name.split(".")), leaf.shape, str(leaf.dtype), leaf.shape)
        arrays[meta] = np.ascontiguousarray(leaf)
    write_zarr_item(folder, arrays, StorageForm(codec_names=("zstd",)))
