"""Data files: they are identified by their content, and must not change while they are read."""

from __future__ import annotations

from pathlib import Path

import pytest
import xxhash

from prepcli.core.errors import PrepError
from trainer.data.files import DataFile, hash_file
from trainer.data.readers import READERS
from trainer.recipe.text_fields import FileType


def test_hash_file_returns_size_and_digest(tmp_path: Path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"abc" * 1_000_000)
    file = hash_file(path)
    assert (file.nbytes, file.digest) == (3_000_000, xxhash.xxh3_128_hexdigest(b"abc" * 1_000_000))


def test_hash_file_fails_for_empty_file(tmp_path: Path):
    (tmp_path / "a.txt").touch()
    with pytest.raises(PrepError) as caught:
        hash_file(tmp_path / "a.txt")
    assert (caught.value.what, caught.value.why) == (
        f"{tmp_path}/a.txt is empty",
        "looked for text, found 0 bytes",
    )


@pytest.mark.parametrize("data_type", ["text", "json", "csv"])
def test_file_changed_after_hashing_fails(tmp_path: Path, data_type: FileType):
    path = tmp_path / "a"
    path.write_text('{"text": "a"}\n')
    before = hash_file(path)
    path.write_text('{"text": "b"}\n')
    with pytest.raises(PrepError, match="a changed while it was read"):
        list(READERS[data_type].read(before))


def test_file_removed_after_hashing_fails(tmp_path: Path):
    removed = DataFile(tmp_path / "a.txt", 1, "x")
    with pytest.raises(PrepError, match=r"cannot read or write .*a.txt - No such file"):
        list(READERS["text"].read(removed))
