"""The token store: complete or absent, and damage is detected."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import xxhash

from prepcli.core.errors import PrepError
from tests.helpers.token_stores import NAME, fill
from trainer.data import store
from trainer.data.store_writer import build_store


@pytest.mark.parametrize(("dtype", "code"), [("uint16", "<u2"), ("uint32", "<u4")])
def test_store_reads_back_written_tokens(tmp_path: Path, dtype: str, code: str):
    build_store(tmp_path / NAME, dtype, fill)
    meta = store.read_meta(tmp_path / NAME)
    tokens = store.map_tokens(tmp_path / NAME, meta, 2)
    assert (meta.identity, meta.dtype, meta.n_tokens, meta.n_documents, meta.max_id) == (
        NAME,
        dtype,
        5,
        3,
        7,
    )
    files = {path.name: path.read_bytes() for path in (tmp_path / NAME).glob("*.bin")}
    assert meta.digests == {name: xxhash.xxh3_128_hexdigest(data) for name, data in files.items()}
    assert (tokens.ids.tolist(), tokens.ends.tolist()) == ([1, 2, 3, 7, 5], [4, 4, 5])
    assert (tokens.n_tokens, tokens.n_documents, tokens.n_blocks, tokens.identity) == (
        5,
        3,
        2,
        NAME,
    )
    assert (tmp_path / NAME / "tokens.bin").read_bytes() == np.array(
        [1, 2, 3, 7, 5], code
    ).tobytes()
    assert (tmp_path / NAME / "documents.bin").read_bytes() == np.array([4, 4, 5], "<u8").tobytes()


@pytest.mark.parametrize(
    ("file", "data", "why"),
    [
        ("tokens.bin", b"123", "tokens.bin has 3 bytes, meta.json records 10"),
        ("documents.bin", b"", "documents.bin has 0 bytes, meta.json records 24"),
        ("meta.json", b"{", "meta.json is malformed"),
        ("meta.json", b"[]", "meta.json is malformed"),
        ("meta.json", b"{}", "meta.json is malformed"),
        ("tokens.bin", None, "No such file"),
        ("meta.json", None, "No such file"),
    ],
)
def test_damaged_store_is_reported(tmp_path: Path, file: str, data: bytes | None, why: str):
    folder = tmp_path / NAME
    build_store(folder, "uint16", fill)
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
    build_store(folder, "uint16", fill, has_weights=True)
    data = bytearray((folder / name).read_bytes())
    data[3] ^= 4
    (folder / name).write_bytes(data)
    with pytest.raises(
        store.DamagedStoreError, match=rf"{name} differs from the digest that meta\.json records"
    ):
        store.read_meta(folder)


def test_read_meta_without_digests_checks_sizes_only(tmp_path: Path):
    folder = tmp_path / NAME
    build_store(folder, "uint16", fill)
    meta = store.read_meta(folder)
    data = bytearray((folder / "tokens.bin").read_bytes())
    data[3] ^= 4
    (folder / "tokens.bin").write_bytes(data)
    assert store.read_meta(folder, checks_digests=False) == meta
    (folder / "tokens.bin").write_bytes(data[:-1])
    with pytest.raises(store.DamagedStoreError, match="bytes"):
        store.read_meta(folder, checks_digests=False)


def test_cut_off_weights_are_detected(tmp_path: Path):
    build_store(tmp_path / NAME, "uint16", fill, has_weights=True)
    (tmp_path / NAME / "weights.bin").write_bytes(b"1")
    with pytest.raises(
        store.DamagedStoreError, match=r"weights\.bin has 1 byte, meta\.json records 5"
    ):
        store.read_meta(tmp_path / NAME)


def test_store_without_digests_is_read(tmp_path: Path):
    folder = tmp_path / NAME
    build_store(folder, "uint16", fill)
    meta = json.loads((folder / "meta.json").read_text())
    del meta["digests"]
    (folder / "meta.json").write_text(json.dumps(meta))
    assert store.read_meta(folder).digests == {}


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "float32"},
        {"n_tokens": "5"},
        {"identity": "1" * 32},
        {"digests": {"tokens.bin": "0"}},
        {"digests": []},
        {"digests": {"weights.bin": "0"}},
    ],
)
def test_store_with_invalid_meta_is_rejected(tmp_path: Path, change: dict[str, object]):
    folder = tmp_path / NAME
    build_store(folder, "uint16", fill)
    meta = json.loads((folder / "meta.json").read_text())
    (folder / "meta.json").write_text(json.dumps(meta | change))
    with pytest.raises(
        PrepError, match=r"meta\.json has invalid values or belongs to another store"
    ):
        store.read_meta(folder)
