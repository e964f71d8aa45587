"""The files of the memory benchmark of tokenizing: all types have the same documents."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.data_memory import TOKENIZER, WORDS, generate_documents, write_data, write_tokenizer
from tests.helpers.corpus import make_config, tokenize_quietly

NBYTES = 50_000


@pytest.mark.parametrize("suffix", ["txt", "jsonl.gz", "parquet"])
def test_files_have_one_token_per_word(tmp_path: Path, suffix: str):
    if suffix == "parquet":
        pytest.importorskip("pyarrow")
    write_tokenizer(tmp_path)
    path = tmp_path / f"data.{suffix}"
    write_data(path, suffix, NBYTES)
    config = make_config(
        tmp_path,
        path,
        type="auto",
        fields="text",
        tokenizer=tmp_path / TOKENIZER,
        vocab=len(WORDS) + 1,
        eos_id=None,
    )
    words = [word for document in generate_documents(NBYTES) for word in document.split()]
    assert tokenize_quietly(config).ids[:].tolist() == [WORDS.index(word) + 1 for word in words]
