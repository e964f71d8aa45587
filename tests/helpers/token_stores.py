"""Small token stores, also of the layout of earlier versions."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from trainer.data.shards import ShardWriter, writing_shard
from trainer.data.store import (
    STORE_FILE,
    StoreMeta,
    join_shards,
    read_shard,
    shard_name,
    write_meta,
)

NAME = "0" * 32
Fill = Callable[[ShardWriter], None]


def fill(writer: ShardWriter) -> None:
    """Append three documents, one of them empty."""
    writer.append(np.array([1, 2, 3], np.uint32))
    writer.append(np.array([], np.uint32))
    writer.append(np.array([7, 5], np.uint32), ends=[1, 1, 2])


def write_shards(
    folder: Path, fills: Sequence[Fill], dtype: str = "uint16", *, has_weights: bool = False
) -> None:
    """Write the shards of an incomplete store."""
    for shard, fill_shard in enumerate(fills):
        with writing_shard(folder, shard, dtype, has_weights=has_weights) as writer:
            fill_shard(writer)


def write_store(
    folder: Path,
    fills: Sequence[Fill] = (fill,),
    dtype: str = "uint16",
    *,
    has_weights: bool = False,
) -> StoreMeta:
    """Write a store with a shard for each function, and return its metadata."""
    write_shards(folder, fills, dtype, has_weights=has_weights)
    names = [shard_name(shard) for shard in range(len(fills))]
    meta = join_shards(folder.name, {name: read_shard(folder, name) for name in names})
    write_meta(folder, meta)
    return meta


def write_earlier_layout(folder: Path) -> None:
    """Change a store of one shard to the layout of earlier versions, which had the files of the shard in its folder."""
    (shard,) = folder.glob("[0-9]*/meta.json")
    for path in shard.parent.iterdir():
        path.rename(folder / path.name)
    shutil.rmtree(shard.parent)
    (folder / STORE_FILE).unlink()


def read_files(folder: Path) -> dict[str, bytes]:
    """Return the bytes of each file in a folder and its subfolders, by relative path."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}
