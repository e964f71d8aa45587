"""The token store: complete or absent, damage is detected, and its identity is that of earlier versions."""

from __future__ import annotations

import datetime
import json
import os
import shutil
import time
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from prepcli.core.errors import PrepError
from tests.helpers.corpus import change
from tests.helpers.token_stores import (
    NAME,
    Fill,
    fill,
    write_earlier_layout,
    write_shards,
    write_store,
)
from trainer.data import store
from trainer.data.chat_template import ChatTemplate
from trainer.data.conversations import LossRule
from trainer.data.examples import ExampleSettings, IdentityChange
from trainer.data.files import DataFile
from trainer.data.shards import ShardWriter
from trainer.data.store_files import ABANDONED_AFTER_S, new_folder, remove_abandoned
from trainer.data.tokenize_config import TokenizeConfig, store_identity

# The token store: complete or absent, and damage is detected.


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


# The identity of a token store: unchanged for the recipes of earlier versions.

FILES = [DataFile(Path("a"), 10, "d1"), DataFile(Path("b"), 20, "d2")]


def identity(without: Collection[IdentityChange] = (), **changes: Any) -> str:
    """Return the identity of a store of FILES, without changes since an earlier version."""
    config = TokenizeConfig(
        type="text",
        paths=("a",),
        examples=ExampleSettings(eos_id=0),
        seq_length=8,
        tokenizer=Path("t"),
        vocab=300,
        cache=Path("c"),
    )
    return store_identity(change(config, **changes), FILES, "tokenizer", without=without)


@pytest.mark.parametrize(
    ("changes", "recorded"),
    [
        ({}, "bd1a2e9022d6c54251ccec723e18282d"),
        ({"eos_id": None}, "e84760fb2b0248eba564c25e6d0810ad"),
        ({"type": "json", "fields": "text"}, "bea09ba10bfd281250553682122eaf0b"),
        ({"type": "json", "fields": "my text"}, "417eea8b52d4274a93a0ca48d67f57d2"),
        (
            {"type": "json", "fields": "[a], [b], c", "has_encoder": True},
            "f42182989a392ce0099c15c2d783bc13",
        ),
        (
            {"type": "json", "fields": "[a], c", "has_encoder": True, "source_prefix": "do: "},
            "7c3c283b6c803123420db07927ad73a9",
        ),
    ],
)
def test_identity_of_earlier_versions_is_unchanged(changes: dict[str, Any], recorded: str):
    assert identity(**changes) == recorded


JSON = {"type": "json", "fields": "text", "bos_id": 3}

TEMPLATE = ChatTemplate("f", "{{ messages }}", (("bos_token", "<s>"),))

VARIANTS: list[dict[str, Any]] = [
    JSON,
    {**JSON, "add_bos": True},
    {**JSON, "add_bos": True, "bos_id": 4},
    {**JSON, "add_eos": False},
    {**JSON, "prepend_text": "Q: "},
    {**JSON, "subfield_separator": ""},
    {**JSON, "max_examples": 5},
    {**JSON, "fields": "[text], b"},
    {**JSON, "fields": "[text], b", "has_encoder": True},
    {**JSON, "fields": "[text+b], b"},
    {**JSON, "fields": "[text+b], b", "has_encoder": True},
    {**JSON, "fields": "[text+b], b", "has_encoder": True, "bos_id": 4},
    {**JSON, "fields": "<|bos|>, b"},
    {**JSON, "fields": "<|bos|>, b", "bos_id": 4},
    {**JSON, "fields": "<|bos|>, b", "add_eos": False},
    {**JSON, "fields": "<|bos|>, b", "add_eos": False, "eos_id": 1},
    {**JSON, "fields": "{text}"},
    {**JSON, "fields": "", "fields_from_example": "text"},
    {**JSON, "fields": "", "fields_from_example": "text", "bos_id": 4},
    {**JSON, "fields": "", "fields_from_example": "text", "has_encoder": True},
    {**JSON, "chat_template": TEMPLATE},
    {**JSON, "chat_template": replace(TEMPLATE, text="{{ messages[0] }}")},
    {**JSON, "chat_template": replace(TEMPLATE, special_tokens=())},
    {**JSON, "chat_template": replace(TEMPLATE, tool_text="{{ tools }}")},
    {**JSON, "chat_template": replace(TEMPLATE, arguments='{"a": 1}')},
    {**JSON, "chat_template": replace(TEMPLATE, date=datetime.date(2026, 1, 31))},
    {**JSON, "chat_template": TEMPLATE, "joins_last_turns": True},
    {**JSON, "chat_template": TEMPLATE, "loss": LossRule(("last",))},
    {**JSON, "chat_template": TEMPLATE, "loss": LossRule(has_reasoning=False)},
    {**JSON, "chat_template": TEMPLATE, "stop_texts": ("</s>",)},
]


def test_identity_depends_on_all_settings_of_examples():
    assert len({identity(**variant) for variant in VARIANTS}) == len(VARIANTS)


@pytest.mark.parametrize(
    "change", [{"bos_id": 4}, {"source_length": 9}, {"eos_id": 0, "add_bos": False}]
)
def test_identity_ignores_settings_that_change_no_token(change: dict[str, Any]):
    assert identity(**JSON) == identity(**{**JSON, **change})


def test_chat_identity_has_a_begin_token_that_the_template_lacks():
    settings = {**JSON, "fields": "messages", "chat_template": TEMPLATE}
    assert identity(**settings, add_bos=True) != identity(**settings)
    writes_bos = replace(TEMPLATE, text="{{ bos_token }}{{ messages }}")
    doubled = {**settings, "chat_template": writes_bos}
    assert identity(**doubled, add_bos=True) != identity(**settings, add_bos=True)


def test_identity_ignores_the_file_of_a_chat_template():
    assert identity(**JSON, chat_template=TEMPLATE) == identity(
        **JSON, chat_template=replace(TEMPLATE, file="other")
    )


def test_identity_has_the_rule_of_lists_only_with_skipped_lines():
    earlier = [IdentityChange.JSON_LISTS]
    # Recorded before lists were read.
    assert identity(earlier, type="json", fields="text", bad_lines=2) == (
        "25fb75f318c9a5a17fd253d64c38eb4f"
    )
    assert identity(earlier, **JSON, bad_lines=2) != identity(**JSON, bad_lines=2)
    assert identity(earlier, **JSON) == identity(**JSON)
    csv = {**JSON, "type": "csv"}
    assert identity(earlier, **csv, bad_lines=2) == identity(**csv, bad_lines=2)


def test_identity_has_the_document_limit_only_with_skipped_lines():
    assert identity(**JSON, max_document_nbytes=5) == identity(**JSON)
    assert identity(**JSON, max_document_nbytes=5, bad_lines=2) != identity(**JSON, bad_lines=2)


@pytest.mark.parametrize(
    ("changes", "recorded"),
    [
        ({"type": "parquet"}, "eafee558c91dd2e364aa0d2e44d7ca9e"),
        ({"type": "parquet", "add_bos": True}, "a5e21b119fcaba5ecdbae54967950cd6"),
        ({"type": "json", "add_bos": True}, "f544d5cb77c1fd774c53de278ac8a160"),
    ],
)
def test_identity_without_changes_is_that_of_an_earlier_version(
    changes: dict[str, Any], recorded: str
):
    writes_bos = replace(TEMPLATE, text="{{ bos_token }}{{ messages }}")
    settings = {"bos_id": 3, "fields": "messages", "chat_template": writes_bos, **changes}
    assert identity(**settings) != recorded
    assert identity([*IdentityChange], **settings) == recorded


# Folders have their name only when complete, with any number of processes and after any death.

FOLDER = "0" * 32


def write(folder: Path, content: str = "x") -> None:
    with new_folder(folder) as temporary:
        (temporary / "file").write_text(content)


def test_new_folder_appears_at_the_end(tmp_path: Path):
    folder = tmp_path / "parent" / FOLDER
    with new_folder(folder) as temporary:
        (temporary / "file").write_text("x")
        assert not folder.exists()
    assert [path.name for path in folder.parent.iterdir()] == [FOLDER]
    assert (folder / "file").read_text() == "x"


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_failed_block_leaves_nothing(tmp_path: Path, error: type[BaseException]):
    def fails() -> None:
        with new_folder(tmp_path / FOLDER) as temporary:
            (temporary / "file").write_text("x")
            raise error

    with pytest.raises(error):
        fails()
    assert [*tmp_path.iterdir()] == []


def test_first_process_to_finish_gives_the_name(tmp_path: Path):
    folder = tmp_path / FOLDER
    with new_folder(folder) as temporary:
        (temporary / "file").write_text("second")
        write(folder, "first")
    assert (folder / "file").read_text() == "first"
    assert [path.name for path in tmp_path.iterdir()] == [FOLDER]


def test_process_finds_its_temporary_folder_half_removed(tmp_path: Path):
    folder = tmp_path / FOLDER
    with new_folder(folder) as temporary:
        write(folder, "first")
        # The other process removes one file after another, and then the folder.
        temporary.mkdir()
        (temporary / "file").read_text()
    assert (folder / "file").read_text() == "first"
    assert [path.name for path in tmp_path.iterdir()] == [FOLDER]


def test_temporary_folder_of_a_killed_process_is_removed(tmp_path: Path):
    with new_folder(tmp_path / FOLDER) as temporary:
        shutil.copytree(temporary, tmp_path / f"{NAME}.0123456789ab.partial")
    assert [path.name for path in tmp_path.iterdir()] == [FOLDER]


def test_only_abandoned_stores_are_removed(tmp_path: Path):
    old = time.time() - ABANDONED_AFTER_S - 60
    names = ["1" * 32, f"{'2' * 32}.host-1-2.partial", f"shards-{'3' * 32}"]
    kept = ["4" * 32, "model-init.partial", "5" * 31, "mine"]
    for name in (*names, *kept):
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, (old, old))
    # A store with a shard, and one whose shard is being written
    for name, part in (("7" * 32, "00000"), ("8" * 32, "00000.0123456789ab.partial")):
        (tmp_path / name / part).mkdir(parents=True)
        kept.append(name)
    written = tmp_path / ("8" * 32) / "00000.0123456789ab.partial" / "tokens.bin"
    written.write_bytes(b"x")
    for folder in (tmp_path / ("7" * 32) / "00000", tmp_path / ("7" * 32), tmp_path / ("8" * 32)):
        os.utime(folder, (old, old))
    (tmp_path / ("6" * 32)).mkdir()
    remove_abandoned(tmp_path, lambda folder: folder.name == "4" * 32)
    assert {path.name for path in tmp_path.iterdir()} == {*kept, "6" * 32}


def test_cut_off_weights_are_detected(tmp_path: Path):
    write_store(tmp_path / NAME, has_weights=True)
    (tmp_path / NAME / "00000" / "weights.bin").write_bytes(b"1")
    message = r"weights\.bin has 1 byte, meta\.json records 5"
    with pytest.raises(store.DamagedStoreError, match=message):
        store.read_meta(tmp_path / NAME)
