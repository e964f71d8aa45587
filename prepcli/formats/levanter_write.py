"""Encode the metadata of a Levanter checkpoint, given its chunks: the OCDBT index and `metadata.json`.

Neither Levanter nor TensorStore is imported, and no weights are read or written.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime

from prepcli.formats.levanter import LEVANTER_METADATA_FILE
from prepcli.formats.ocdbt import NODE_NBYTES, OcdbtEntry, ValueLocation, encode_ocdbt_index
from prepcli.formats.orbax import ArrayMeta, unravel_chunk_index, zarr3_chunk_key
from prepcli.formats.orbax_write import (
    ChunkColumns,
    WrittenChunk,
    check_leaves,
    collect_chunks,
)
from prepcli.formats.zarr import ZARR_JSON
from prepcli.formats.zarr_documents import encode_zarr_json


def encode_levanter_metadata(
    arrays: Sequence[ArrayMeta],
    chunks: Iterable[WrittenChunk],
    file_names: Sequence[str],
    now_ns: int,
    *,
    step: int = 0,
) -> dict[str, bytes]:
    """Return the metadata files of a checkpoint, by their paths in its folder.

    Args:
        arrays: Arrays of the checkpoint.
        chunks: Location of every chunk of every array. Chunks are not compressed.
        file_names: Data files by number, relative to the folder.
        now_ns: Time of the checkpoint in nanoseconds since the epoch.
        step: Number of finished steps.

    Returns:
        Content of each file. `metadata.json` is the last one.

    Raises:
        PrepError: A leaf cannot be stored, or a chunk is missing, duplicate or of the wrong size.
    """
    check_leaves(arrays, ())
    tables = collect_chunks(arrays, chunks, is_compressed=False)
    files = encode_ocdbt_index(_iter_entries(tables, file_names), now_ns, NODE_NBYTES)
    # Levanter compares the times of checkpoints of one step, and writes them without a time zone.
    time = datetime.fromtimestamp(now_ns // 10**9, UTC).replace(tzinfo=None)
    # The first step of Levanter is step 0, so that the last one is the number of finished steps minus 1.
    metadata = {
        "step": max(0, step - 1),
        "timestamp": time.isoformat(),
        "is_temporary": False,
    }
    files[LEVANTER_METADATA_FILE] = json.dumps(metadata).encode()
    return files


def _iter_entries(
    tables: Sequence[ChunkColumns], file_names: Sequence[str]
) -> Iterator[OcdbtEntry]:
    """Yield the index entries in the order of keys."""
    by_prefix: dict[str, ChunkColumns] = {}
    for table in tables:
        by_prefix["/".join(map(str, table.meta.path)) + "/"] = table
    # No path is the start of another one, so that the keys of an array are consecutive. Keys are UTF-8, and Python
    # sorts texts in the same order.
    for prefix, table in sorted(by_prefix.items(), key=lambda item: item[0]):
        for key, chunk_number in sorted(_chunk_keys(table)):
            location = ValueLocation(
                file_names[table.files[chunk_number]],
                table.offsets[chunk_number],
                table.nbytes[chunk_number],
            )
            yield f"{prefix}{key}".encode(), location
        # `c` sorts before `z`.
        yield f"{prefix}{ZARR_JSON}".encode(), encode_zarr_json(table.meta)


def _chunk_keys(table: ChunkColumns) -> Iterator[tuple[str, int]]:
    """Yield the key of each chunk without its prefix, e.g. `c/0/3`, and the number of the chunk."""
    for chunk_number in range(len(table.files)):
        index = unravel_chunk_index(table.grid, chunk_number)
        yield zarr3_chunk_key(index), chunk_number
