"""Tests of malicious items: more values than they store, or endless folders."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from prepcli.core.errors import PrepError
from prepcli.formats import orbax_chunks
from prepcli.formats.orbax import read_item
from prepcli.formats.orbax_chunks import unplaced_array
from tests.helpers.zarr_items import StorageForm, write_zarr_item

META = unplaced_array(("w",), (8, 8), "float32", (2, 2))
VALUES = np.arange(64, dtype=np.float32).reshape(8, 8)


def refused(item: Path) -> PrepError:
    with pytest.raises(PrepError) as caught:
        read_item(item)
    return caught.value


def test_chunks_of_shards_count_towards_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Count the chunks of shards: many shards may share a few bytes with an index of a million empty chunks."""
    write_zarr_item(tmp_path / "item", {META: VALUES}, StorageForm(zarr3=True, chunks_per_shard=2))
    assert len([*read_item(tmp_path / "item").arrays[0].stored_chunks()]) == 16
    monkeypatch.setattr(orbax_chunks, "MAX_VALUES", 16)
    assert "claims more than 16 chunks" in refused(tmp_path / "item").what


def test_links_to_folders_are_not_followed(tmp_path: Path):
    """Do not follow two links to their own folder, which would be 2^40 folders."""
    write_zarr_item(tmp_path / "item", {META: VALUES}, StorageForm(zarr3=True, ocdbt=False))
    for name in ("a", "b"):
        os.symlink(".", tmp_path / "item" / "w" / name)
    assert refused(tmp_path / "item").what == f"{tmp_path / 'item/w/a'} is not a file"


def test_links_to_chunk_files_are_followed(tmp_path: Path):
    write_zarr_item(tmp_path / "item", {META: VALUES}, StorageForm(ocdbt=False))
    chunk = tmp_path / "item" / "w" / "0.0"
    os.symlink(chunk.rename(tmp_path / "elsewhere"), chunk)
    assert len([*read_item(tmp_path / "item").arrays[0].stored_chunks()]) == 16
