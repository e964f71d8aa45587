"""Compressed data files: they are read to their end, and damage is an error."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
import zstandard

from prepcli.core.errors import PrepError
from trainer.data.files import hash_file
from trainer.data.readers import READERS
from trainer.data.readers.reader import TextChunk

TEXT = "a line of text\n" * 40_000
COMPRESS = {".gz": gzip.compress, ".zst": zstandard.compress}


@pytest.mark.parametrize("suffix", COMPRESS)
def test_text_is_decompressed_and_counted_in_bytes_of_the_file(tmp_path: Path, suffix: str):
    path = tmp_path / f"a.txt{suffix}"
    path.write_bytes(COMPRESS[suffix](TEXT.encode()))
    chunks = [
        piece for piece in READERS["text"].read(hash_file(path)) if isinstance(piece, TextChunk)
    ]
    assert "".join(chunk.text for chunk in chunks) == TEXT
    assert len(chunks) > 1
    assert sum(chunk.nbytes for chunk in chunks) == path.stat().st_size


@pytest.mark.parametrize("suffix", COMPRESS)
@pytest.mark.parametrize("damage", ["cut", "garbage", "tail"])
def test_error_names_the_damaged_file(tmp_path: Path, suffix: str, damage: str):
    data = COMPRESS[suffix](TEXT.encode())
    path = tmp_path / f"a.txt{suffix}"
    path.write_bytes(
        {"cut": data[:-9], "garbage": b"no compressed bytes", "tail": data + b"more"}[damage]
    )
    with pytest.raises(PrepError, match=rf"a.txt{suffix} cannot be decompressed"):
        list(READERS["text"].read(hash_file(path)))


def test_file_changed_after_hashing_fails(tmp_path: Path):
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"text": "a"}\n'))
    before = hash_file(path)
    path.write_bytes(gzip.compress(b'{"text": "b"}\n'))
    with pytest.raises(PrepError, match="changed while it was read"):
        list(READERS["json"].read(before))
