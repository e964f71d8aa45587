"""`bench.tokenize_processes`: the files have the whole corpus, and each number of processes makes one store."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import tokenize
from bench.tokenize_processes import FILES, N_FILES, make_share, read_store_meta, write_files
from trainer.data import shards


def test_shares_make_the_store_of_all_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tokenize, "SENTENCES", 500)
    monkeypatch.setattr(tokenize, "WORDS", 600)
    monkeypatch.setattr(shards, "SHARD_NBYTES", 10_000)
    write_files(tmp_path, 100_000)
    lines = [path.read_text().splitlines() for path in sorted((tmp_path / FILES).iterdir())]
    assert len(lines) == N_FILES
    assert make_share(tmp_path, tmp_path / FILES, 0, 2) is None
    meta = make_share(tmp_path, tmp_path / FILES, 1, 2)
    assert meta is not None
    assert meta == read_store_meta(tmp_path)
    assert meta.n_documents == sum(map(len, lines))
