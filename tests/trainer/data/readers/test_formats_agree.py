"""The same records give the same tokens, whatever the type and the compression of their file."""

from __future__ import annotations

import gzip
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.corpus import EOS, TEXT, make_config, make_tokenizer, tokenize_quietly
from tests.helpers.data_formats import Rows, write_arrow_files, write_csv_files, write_json_files
from trainer.data.store import read_meta

TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\0\r"), max_size=20)
ROWS = [{"id": str(i), "text": f'{TEXT[:i]}, "é" 😀\n{i}'} for i in range(23)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer") / "tokenizer.json")


def digests(folder: Path, tokenizer: Path, path: Path) -> object:
    """Return the digests of the store that a file gives."""
    config = make_config(
        folder,
        path,
        type="auto",
        fields="text",
        seq_length=1,
        tokenizer=tokenizer,
        cache=folder / path.name[::-1],
    )
    meta = read_meta(config.cache / tokenize_quietly(config).identity)
    return [shard.digests for shard in meta.shards.values()]


@pytest.mark.parametrize("write", [write_csv_files, write_arrow_files], ids=["csv", "arrow"])
def test_files_of_all_types_give_equal_stores(
    write: Callable[[Path, Rows], list[Path]], tmp_path: Path, tokenizer: Path
):
    if write is write_arrow_files:
        pytest.importorskip("pyarrow")
    expected, *others = (
        digests(tmp_path, tokenizer, path) for path in write_json_files(tmp_path, ROWS)
    )
    assert others == [expected] * 5
    assert [digests(tmp_path, tokenizer, path) for path in write(tmp_path, ROWS)] == [expected] * 3


@settings(max_examples=25, deadline=None)
@given(st.lists(TEXTS, min_size=1, max_size=8))
def test_any_text_is_read_alike(tokenizer: Path, texts: list[str]):
    rows = [{"id": "x", "text": text} for text in [*texts, "the cat"]]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        paths = [*write_json_files(folder, rows), *write_csv_files(folder, rows)]
        expected, *others = (digests(folder, tokenizer, path) for path in paths)
        assert others == [expected] * 8


def test_compressed_text_gives_the_tokens_of_the_text(tmp_path: Path, tokenizer: Path):
    text = (TEXT * 9000).encode()
    (tmp_path / "a.txt").write_bytes(text)
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(text))
    expected = digests(tmp_path, tokenizer, tmp_path / "a.txt")
    assert digests(tmp_path, tokenizer, tmp_path / "b.txt.gz") == expected


def test_store_from_ids_equals_store_from_text(tmp_path: Path, tokenizer: Path):
    (path, *_) = write_json_files(tmp_path, ROWS)
    config = make_config(
        tmp_path, path, type="json", fields="text", seq_length=1, tokenizer=tokenizer
    )
    ids = np.array(tokenize_quietly(config).ids[:])
    assert ids[-1] == EOS
    np.save(tmp_path / "a.npy", ids.astype(np.int64))
    np.save(tmp_path / "b.npy", ids)
    ids.astype("<u2").tofile(tmp_path / "c.bin")
    expected = digests(tmp_path, tokenizer, path)
    assert [
        digests(tmp_path, tokenizer, tmp_path / name) for name in ("a.npy", "b.npy", "c.bin")
    ] == [expected] * 3
