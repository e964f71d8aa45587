"""Rows of documents beside the tokens: made once, checked, and without documents that are too long."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.corpus import TEXT, change, make_config
from tests.helpers.thread_groups import ThreadGroup, run_group
from trainer.data import document_rows
from trainer.data.document_packing import DocumentRows
from trainer.data.document_rows import DTYPES, make_rows, read_rows
from trainer.data.encode import EncodedBatch, OverlongRule, fit_documents
from trainer.data.store import MappedTokens, read_meta
from trainer.data.store_files import file_digest
from trainer.data.tokenize import open_tokens, tokenize_files, tokenize_in_group
from trainer.data.tokenize_config import TokenizeConfig
from trainer.recipe.text_fields import Overlong

# Rows of documents beside the tokens: made once, checked, and equal to those made in memory.

PACKINGS = ("documents", "none")


@pytest.fixture
def config(tmp_path: Path) -> TokenizeConfig:
    paths = [tmp_path / f"{number}.txt" for number in range(9)]
    for number, path in enumerate(paths):
        path.write_text(TEXT[: 7 * number + 3])
    return make_config(tmp_path, *paths, packing="documents")


def tokenize(config: TokenizeConfig) -> tuple[MappedTokens, DocumentRows, list[str]]:
    """Return the tokens, the rows and the notes of a run of tokenization."""
    notes: list[str] = []
    tokens = tokenize_files(config, progress=lambda *counts: None, note=notes.append)
    assert tokens.rows is not None
    return tokens, tokens.rows, notes


def contents(rows: DocumentRows) -> list[object]:
    """Return what is compared of rows."""
    pieces = [rows.pieces(row) for row in range(rows.n_rows)]
    return [pieces, rows.seq_length, rows.n_tokens, rows.max_length, rows.fraction_with_token]


def rows_folder(config: TokenizeConfig) -> Path:
    """Return the folder of the only rows in the cache."""
    (path,) = config.cache.glob("*/*/rows.json")
    return path.parent


def fail_packing(*args: object) -> None:
    raise AssertionError("rows are rebuilt")


@pytest.mark.parametrize("packing", PACKINGS)
def test_stored_rows_equal_rows_built_in_memory(config: TokenizeConfig, packing: str):
    tokens, rows, _ = tokenize(change(config, packing=packing))
    assert contents(rows) == contents(make_rows(tokens, packing))
    assert rows.n_rows > 3


def test_stored_rows_are_built_once(config: TokenizeConfig, monkeypatch: pytest.MonkeyPatch):
    first = contents(tokenize(config)[1])
    monkeypatch.setattr(document_rows, "write_rows", fail_packing)
    assert contents(tokenize(config)[1]) == first
    opened = open_tokens(config, rows_folder(config).parent.name, note=print)
    assert opened.rows is not None
    assert contents(opened.rows) == first
    with pytest.raises(AssertionError, match="rebuilt"):
        tokenize(change(config, seq_length=5))


def test_stored_rows_of_other_settings_are_kept(config: TokenizeConfig):
    for seq_length in (8, 5, 8):
        for packing in PACKINGS:
            tokenize(change(config, seq_length=seq_length, packing=packing))
    assert len([*config.cache.glob("*/*/rows.json")]) == 4


def test_store_with_rows_is_complete(config: TokenizeConfig):
    tokenize(config)
    assert read_meta(rows_folder(config).parent).n_documents == 9


@pytest.mark.parametrize("name", [*DTYPES, "rows.json"])
@pytest.mark.parametrize("damage", ["flip", "cut", "remove", "fifo", "deep"])
def test_damaged_rows_are_rebuilt(config: TokenizeConfig, name: str, damage: str):
    first = contents(tokenize(config)[1])
    path = rows_folder(config) / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.unlink()
    if damage == "fifo":
        os.mkfifo(path)
    elif damage != "remove":
        path.write_bytes({"flip": data, "cut": data[:-1], "deep": b"[" * 100_000}[damage])
    assert contents(tokenize(config)[1]) == first
    assert contents(read_rows(rows_folder(config), tokenize(config)[0])) == first
    assert not [*config.cache.rglob("*.partial")]


@pytest.mark.parametrize("key", ["seq_length", "max_length", "n_rows"])
def test_rows_with_wrong_metadata_are_rebuilt(config: TokenizeConfig, key: str):
    """The metadata has no digest of its own."""
    first = contents(tokenize(config)[1])
    path = rows_folder(config) / "rows.json"
    values = json.loads(path.read_text())
    path.write_text(json.dumps({**values, key: values[key] + 2}))
    _, rows, notes = tokenize(config)
    assert contents(rows) == first
    assert any("they are rebuilt" in note for note in notes)


def test_rows_in_the_form_of_earlier_versions_are_made_again(config: TokenizeConfig):
    first = contents(tokenize(config)[1])
    path = rows_folder(config) / "rows.json"
    for file in rows_folder(config).glob("*.bin"):
        file.unlink()
    digests: dict[str, str] = {}
    for name in ("starts.bin", "lengths.bin", "ends.bin"):
        path.with_name(name).write_bytes(b"12345678")
        digests[name] = file_digest(path.with_name(name))
    path.write_text(json.dumps({**json.loads(path.read_text()), "digests": digests}))
    _, rows, notes = tokenize(config)
    assert contents(rows) == first
    assert not any("rebuilt" in note for note in notes)
    names = {file.name for file in rows_folder(config).iterdir()}
    assert names == {"windows.bin", "assignments.bin", "rows.json"}


def test_rows_of_changed_documents_are_not_used(config: TokenizeConfig):
    """The identity of rows has the digest of the ends of documents."""
    tokenize(config)
    meta_path = rows_folder(config).parent / "store.json"
    meta = json.loads(meta_path.read_text())
    path = meta_path.parent / "00000" / "documents.bin"
    ends = np.fromfile(path, "<u8")
    ends[0] += 1
    ends.tofile(path)
    meta["shards"][0]["digests"] = {}
    meta_path.write_text(json.dumps(meta))
    tokens, rows, _ = tokenize(config)
    assert contents(rows) == contents(make_rows(tokens, "documents"))


def test_rows_that_cannot_be_stored_are_built_in_memory(
    config: TokenizeConfig, monkeypatch: pytest.MonkeyPatch
):
    def fail(path: Path, *args: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(document_rows, "_build_rows", fail)
    tokens, rows, notes = tokenize(config)
    assert contents(rows) == contents(make_rows(tokens, "documents"))
    assert any("made in memory" in note for note in notes)
    assert [path.name for path in config.cache.glob("*/*") if path.is_dir()] == ["00000"]


def test_scratch_dir_gets_the_rows_of_a_cached_store(config: TokenizeConfig, tmp_path: Path):
    """A dry run writes nothing to the folder of the run."""
    tokenize_files(change(config, packing="concatenate"), progress=lambda *counts: None, note=print)
    before = sorted(config.cache.rglob("*"))
    (tmp_path / "scratch").mkdir()
    tokens, rows, _ = tokenize(change(config, scratch_dir=tmp_path / "scratch"))
    assert contents(rows) == contents(make_rows(tokens, "documents"))
    assert sorted(config.cache.rglob("*")) == before
    assert [*tmp_path.glob("scratch/*/rows.json")]


def test_abandoned_rows_are_removed(config: TokenizeConfig):
    tokenize(config)
    folder = rows_folder(config)
    abandoned = folder.with_name(f"{folder.name}.0123456789ab.partial")
    folder.rename(abandoned)
    tokenize(config)
    assert rows_folder(config) == folder
    assert not abandoned.exists()


def test_processes_share_the_rows(config: TokenizeConfig):
    def tokenize_together(process: ThreadGroup) -> list[object]:
        tokens = tokenize_in_group(
            config, process, progress=lambda *counts: None, note=lambda text: None
        )
        assert tokens.rows is not None
        return contents(tokens.rows)

    results = run_group(3, tokenize_together)
    assert results == [contents(tokenize(config)[1])] * 3


def test_processes_that_build_rows_at_once_agree(
    config: TokenizeConfig,
):
    tokenize(change(config, packing="none"))
    results = run_group(4, lambda process: contents(tokenize(config)[1]))
    assert results == [results[0]] * 4
    assert not [*config.cache.rglob("*.partial")]


# Documents that are longer than a sequence: cut, dropped and counted, for any batches.

CHOICES: tuple[Overlong, ...] = ("split", "truncate", "truncate_prompt", "drop")


# A token id, and whether it has loss.
Document = list[tuple[int, bool]]


documents = st.lists(st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=12), max_size=6)


def make_batch(parts: list[Document], *, has_weights: bool) -> EncodedBatch:
    """Return a batch of documents."""
    tokens = [token for part in parts for token in part]
    weights = None
    if has_weights:
        weights = np.array([loss for _, loss in tokens], np.float32)
    ends = np.cumsum([len(part) for part in parts], dtype=np.int64)
    return EncodedBatch(
        np.array([token for token, _ in tokens], np.uint32), weights, ends, {"a": 1}
    )


def fit(part: Document, choice: Overlong, limit: int, bos_id: int | None) -> Document | None:
    """Return what stays of a document, one token at a time. None for a dropped one."""
    if len(part) <= limit or choice == "split":
        return part
    if choice == "drop":
        return None
    part = part.copy()
    if choice == "truncate_prompt":
        begin = part[:1] if part[0][0] == bos_id and not part[0][1] else []
        rest = part[len(begin) :]
        while len(begin) + len(rest) > limit and rest and not rest[0][1]:
            rest.pop(0)
        part = begin + rest
    return part[:limit]


def test_answer_after_a_prompt_of_one_token_keeps_its_start():
    batch = make_batch([[(3, False), (5, True), (6, True)]], has_weights=True)
    fitted = fit_documents(batch, OverlongRule("truncate_prompt", 2, bos_id=3))
    assert fitted.ids.tolist() == [3, 5]


@given(
    documents,
    st.sampled_from(CHOICES),
    st.integers(2, 6),
    st.booleans(),
    st.sampled_from([None, 3]),
)
def test_documents_fit_as_one_by_one(
    parts: list[Document], choice: Overlong, limit: int, has_weights: bool, bos_id: int | None
):
    if not has_weights:
        parts = [[(token, True) for token, _ in part] for part in parts]
    parts = [part for part in parts if part]
    fitted = fit_documents(
        make_batch(parts, has_weights=has_weights), OverlongRule(choice, limit, bos_id)
    )
    kept = [
        part for part in (fit(part, choice, limit, bos_id) for part in parts) if part is not None
    ]
    expected = make_batch(kept, has_weights=has_weights)
    assert fitted.ids.tolist() == expected.ids.tolist()
    assert fitted.ends.tolist() == expected.ends.tolist()
    if has_weights:
        assert fitted.weights is not None
        assert expected.weights is not None
        assert fitted.weights.tolist() == expected.weights.tolist()
    n_long = sum(len(part) > limit for part in parts)
    counts = {"drop": {"dropped_documents": n_long}, "split": {}}
    changed = counts.get(choice, {"cut_documents": n_long})
    assert fitted.ignored == {"a": 1, **(changed if n_long else {})}


@pytest.mark.parametrize("choice", CHOICES)
def test_empty_documents_stay(choice: Overlong):
    batch = EncodedBatch(np.arange(6, dtype=np.uint32), None, np.array([0, 5, 5, 6]), {})
    fitted = fit_documents(batch, OverlongRule(choice, 3))
    n_empty = sum(length == 0 for length in np.diff(fitted.ends, prepend=0))
    assert n_empty == 2
