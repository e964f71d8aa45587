"""The token store: complete or absent, and damage is detected."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import xxhash

from prepcli.core.errors import PrepError
from tests.helpers.token_stores import (
    NAME,
    Fill,
    fill,
    write_earlier_layout,
    write_shards,
    write_store,
)
from trainer.data import store
from trainer.data.shards import ShardWriter


def flip_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[3] ^= 4
    path.write_bytes(data)


@pytest.mark.parametrize(("dtype", "code"), [("uint16", "<u2"), ("uint32", "<u4")])
def test_store_reads_back_written_tokens(tmp_path: Path, dtype: str, code: str):
    folder = tmp_path / NAME
    write_store(folder, dtype=dtype)
    meta = store.read_meta(folder)
    tokens = store.map_tokens(folder, meta, 2)
    assert (meta.identity, meta.dtype, meta.n_tokens, meta.n_documents, meta.max_id) == (
        NAME,
        dtype,
        5,
        3,
        7,
    )
    files = {path.name: path.read_bytes() for path in folder.glob("00000/*.bin")}
    assert meta.shards["00000"].digests == {
        name: xxhash.xxh3_128_hexdigest(data) for name, data in files.items()
    }
    assert (tokens.ids[:].tolist(), tokens.ends[:].tolist()) == ([1, 2, 3, 7, 5], [4, 4, 5])
    assert (tokens.n_tokens, tokens.n_documents, tokens.n_blocks, tokens.identity) == (
        5,
        3,
        2,
        NAME,
    )
    assert files["tokens.bin"] == np.array([1, 2, 3, 7, 5], code).tobytes()
    assert files["documents.bin"] == np.array([4, 4, 5], "<u8").tobytes()


def fill_nothing(writer: ShardWriter) -> None:
    writer.append(np.array([], np.uint32))


def fill_half(writer: ShardWriter) -> None:
    """Append the start of a document. The next shard has its end."""
    weights = np.array([0.25, 0, 0.5], np.float32)
    writer.append(np.array([9, 8, 7], np.uint32), weights)


def fill_weights(writer: ShardWriter) -> None:
    weights = np.array([0.5, 1], np.float32)
    writer.append(np.array([4, 5], np.uint32), weights, ends=[1, 2])


SHARDS = (fill_nothing, fill_half, fill_nothing, fill_weights, fill_nothing)


def test_shards_are_read_as_one_array(tmp_path: Path):
    meta = write_store(tmp_path / NAME, SHARDS, has_weights=True)
    assert meta == store.read_meta(tmp_path / NAME)
    tokens = store.map_tokens(tmp_path / NAME, meta, 2)
    assert tokens.weight_codes is not None
    ids = [9, 8, 7, 4, 5]
    for low in range(6):
        for high in range(7):
            assert tokens.ids[low:high].tolist() == ids[low:high]
    assert tokens.ids[:].dtype == np.uint16
    # The second document begins in a shard and ends in another one.
    assert tokens.ends[:].tolist() == [4, 5]
    assert [ends.tolist() for ends in store.document_end_blocks(tokens, 1)] == [[4], [5]]
    weights = tokens.read_weights(0, tokens.n_tokens)
    assert weights.tolist() == [0.25, 0, 0.5, 0.5, 1]
    assert meta.loss_weights == [0, 1, 0.25, 0.5]
    assert tokens.count_loss() == 4


def test_too_many_loss_weights_of_all_shards_are_an_error(tmp_path: Path):
    def fill_many(start: int) -> Fill:
        def fill_shard(writer: ShardWriter) -> None:
            weights = np.arange(start, start + 200, dtype=np.float32) / np.float32(1000)
            writer.append(np.ones(200, np.uint32), weights, ends=[200])

        return fill_shard

    with pytest.raises(PrepError, match="the data has too many loss weights"):
        write_store(tmp_path / NAME, (fill_many(1), fill_many(201)), has_weights=True)


def test_store_of_an_earlier_version_is_read(tmp_path: Path):
    """Its folder is its only shard, without the list of shards."""
    folder = tmp_path / NAME
    meta = write_store(folder, (fill_weights,), has_weights=True)
    ids = store.map_tokens(folder, meta, 2).ids[:].tolist()
    write_earlier_layout(folder)
    assert {path.name for path in folder.iterdir()} == {
        "tokens.bin",
        "documents.bin",
        "weights.bin",
        "meta.json",
    }
    assert store.is_complete(folder)
    earlier = store.read_meta(folder)
    assert [*earlier.shards.values()] == [*meta.shards.values()]
    assert store.map_tokens(folder, earlier, 2).ids[:].tolist() == ids
    flip_bit(folder / "tokens.bin")
    with pytest.raises(store.DamagedStoreError, match=r"tokens\.bin differs from the digest"):
        store.read_meta(folder)


def test_shards_without_their_list_are_incomplete(tmp_path: Path):
    write_shards(tmp_path / NAME, (fill, fill))
    assert not store.is_complete(tmp_path / NAME)
    assert store.has_shard(tmp_path / NAME)


@pytest.mark.parametrize(
    ("file", "data", "why"),
    [
        ("00000/tokens.bin", b"123", "00000/tokens.bin has 3 bytes, meta.json records 10"),
        ("00000/documents.bin", b"", "00000/documents.bin has 0 bytes, meta.json records 24"),
        ("store.json", b"{", "store.json is malformed"),
        ("store.json", b"[]", "store.json is malformed"),
        ("store.json", b"{}", "store.json is malformed"),
        ("store.json", b'{"shards": [{}]}', "store.json is malformed"),
        ("store.json", b'{"shards": [7]}', "store.json is malformed"),
        ("00000/tokens.bin", None, "No such file"),
    ],
)
def test_damaged_store_is_reported(tmp_path: Path, file: str, data: bytes | None, why: str):
    folder = tmp_path / NAME
    write_store(folder)
    if data is None:
        (folder / file).unlink()
    else:
        (folder / file).write_bytes(data)
    with pytest.raises(PrepError) as caught:
        store.read_meta(folder)
    assert why in caught.value.why
    assert caught.value.what == f"the tokens in {folder} are damaged"
    assert caught.value.hint.startswith(f"`rm -r {folder}`")


@pytest.mark.parametrize("name", ["tokens.bin", "documents.bin", "weights.bin"])
def test_flipped_bit_is_detected(tmp_path: Path, name: str):
    folder = tmp_path / NAME
    write_store(folder, has_weights=True)
    flip_bit(folder / "00000" / name)
    message = rf"{name} differs from the digest that meta\.json records"
    with pytest.raises(store.DamagedStoreError, match=message):
        store.read_meta(folder)


def test_read_meta_without_digests_checks_sizes_only(tmp_path: Path):
    folder = tmp_path / NAME
    meta = write_store(folder)
    path = folder / "00000" / "tokens.bin"
    flip_bit(path)
    assert store.read_meta(folder, checks_digests=False) == meta
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(store.DamagedStoreError, match="bytes"):
        store.read_meta(folder, checks_digests=False)


def test_cut_off_weights_are_detected(tmp_path: Path):
    write_store(tmp_path / NAME, has_weights=True)
    (tmp_path / NAME / "00000" / "weights.bin").write_bytes(b"1")
    message = r"weights\.bin has 1 byte, meta\.json records 5"
    with pytest.raises(store.DamagedStoreError, match=message):
        store.read_meta(tmp_path / NAME)


def test_earlier_store_without_digests_is_read(tmp_path: Path):
    folder = tmp_path / NAME
    write_store(folder)
    write_earlier_layout(folder)
    meta = json.loads((folder / "meta.json").read_text())
    del meta["digests"]
    (folder / "meta.json").write_text(json.dumps(meta))
    assert store.read_meta(folder).shards[""].digests == {}


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "float32"},
        {"n_tokens": "5"},
        {"identity": "1" * 32},
        {"digests": {"tokens.bin": "0"}},
        {"digests": []},
        {"digests": {"weights.bin": "0"}},
        {"n_bad_lines": None},
    ],
)
def test_store_with_invalid_meta_is_rejected(tmp_path: Path, change: dict[str, object]):
    folder = tmp_path / NAME
    write_store(folder)
    values = json.loads((folder / "store.json").read_text())
    values["shards"][0] |= change
    (folder / "store.json").write_text(json.dumps(values))
    message = r"store\.json has invalid values or belongs to another store"
    with pytest.raises(PrepError, match=message):
        store.read_meta(folder)
