"""Rows in the compact form equal the rows in memory."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.corpus import TEXT, change, make_config
from trainer.data import document_rows
from trainer.data.document_packing import DocumentRows, collect_rows, pack_documents, pad_documents
from trainer.data.document_rows import COMPACT_DTYPES, make_rows
from trainer.data.new_folders import HashingFile
from trainer.data.store import DamagedStoreError, MappedTokens
from trainer.data.tokenize import TokenizeConfig, tokenize_files
from trainer.data.window_rows import WindowRows, write_windows

MAKE_ROWS = {"documents": pack_documents, "none": pad_documents}


def all_pieces(rows: DocumentRows) -> list[list[tuple[int, int]]]:
    """Return the pieces of each row."""
    return [rows.pieces(row) for row in range(rows.n_rows)]


def windows_of(tokens: MappedTokens, packing: str, window: int) -> dict[str, np.ndarray]:
    """Return the content of the files of the compact form."""
    buffers = {name: io.BytesIO() for name in COMPACT_DTYPES}
    files = {name: HashingFile(buffer) for name, buffer in buffers.items()}
    write_windows(files, tokens, packing, window=window)
    return {
        name: np.frombuffer(buffers[name].getvalue(), dtype)
        for name, dtype in COMPACT_DTYPES.items()
    }


def make_tokens(lengths: list[int], seq_length: int) -> MappedTokens:
    """Return a store of documents of these lengths."""
    ends = np.cumsum(lengths, dtype=np.uint64)
    return MappedTokens(np.zeros(sum(lengths), np.uint16), ends, "x", seq_length)


@given(
    st.lists(st.integers(0, 25), min_size=1, max_size=30).filter(any),
    st.integers(1, 9),
    st.integers(1, 12),
    st.sampled_from(sorted(MAKE_ROWS)),
)
def test_window_rows_equal_rows_in_memory(
    lengths: list[int], seq_length: int, window: int, packing: str
):
    tokens = make_tokens(lengths, seq_length)
    ends = tokens.ends[:].astype(np.int64)
    rows = WindowRows(windows_of(tokens, packing, window), tokens, packing)
    make = MAKE_ROWS[packing]
    expected = collect_rows(make([ends], seq_length, window=window), seq_length)
    assert all_pieces(rows) == all_pieces(expected)
    assert rows.pieces(0) == expected.pieces(0)
    assert (rows.n_tokens, rows.max_length) == (expected.n_tokens, expected.max_length)
    assert rows.fraction_with_token == expected.fraction_with_token


def test_window_rows_need_an_eighth_byte_per_document():
    lengths = np.random.default_rng(0).lognormal(4.4, 0.8, 200_000).astype(np.int64) + 4
    tokens = make_tokens(lengths.tolist(), 2048)
    arrays = windows_of(tokens, "documents", 1 << 16)
    assert sum(array.nbytes for array in arrays.values()) < len(lengths) / 8


def test_damaged_assignment_is_an_error():
    tokens = make_tokens([3, 4, 5], 6)
    arrays = windows_of(tokens, "documents", 8)
    arrays["assignments.bin"] = arrays["assignments.bin"] ^ 1
    with pytest.raises(DamagedStoreError):
        WindowRows(arrays, tokens, "documents").pieces(0)


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TokenizeConfig:
    """Return the data of a run. Its rows are stored in the compact form."""
    monkeypatch.setattr(document_rows, "MAX_INDEX_NBYTES", 0)
    paths = [tmp_path / f"{number}.txt" for number in range(9)]
    for number, path in enumerate(paths):
        path.write_text(TEXT[: 7 * number + 3])
    return make_config(tmp_path, *paths, packing="documents")


def tokenize(config: TokenizeConfig) -> tuple[MappedTokens, DocumentRows, list[str]]:
    """Return the tokens, the rows and the notes of a run of tokenization."""
    notes: list[str] = []
    tokens = tokenize_files(config, progress=lambda *counts: None, note=notes.append)
    assert isinstance(tokens.rows, WindowRows)
    return tokens, tokens.rows, notes


@pytest.mark.parametrize("packing", MAKE_ROWS)
def test_rows_of_many_documents_are_stored_compactly(config: TokenizeConfig, packing: str):
    tokens, rows, _ = tokenize(change(config, packing=packing))
    assert all_pieces(rows) == all_pieces(make_rows(tokens, packing))
    _, rows_again, notes = tokenize(change(config, packing=packing))
    assert all_pieces(rows_again) == all_pieces(rows)
    assert not any("rebuilt" in note for note in notes)


@pytest.mark.parametrize("name", COMPACT_DTYPES)
@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_damaged_windows_are_rebuilt(config: TokenizeConfig, name: str, damage: str):
    _, first, _ = tokenize(config)
    (path,) = config.cache.glob(f"*/*/{name}")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.unlink()
    if damage != "remove":
        path.write_bytes({"flip": data, "cut": data[:-1]}[damage])
    _, rows, notes = tokenize(config)
    assert any("rebuilt" in note for note in notes)
    assert all_pieces(rows) == all_pieces(first)


@pytest.mark.parametrize("key", ["seq_length", "max_length", "n_rows"])
def test_windows_with_wrong_metadata_are_rebuilt(config: TokenizeConfig, key: str):
    _, first, _ = tokenize(config)
    (path,) = config.cache.glob("*/*/rows.json")
    values = json.loads(path.read_text())
    path.write_text(json.dumps({**values, key: values[key] + 2}))
    _, rows, notes = tokenize(config)
    assert all_pieces(rows) == all_pieces(first)
    assert any("they are rebuilt" in note for note in notes)
