"""Reading documents: the file is the one that was hashed."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer.data.documents import read_text_chunks
from trainer.data.files import DataFile, hash_file
from trainer.models.errors import PrepError
from trainer.recipe.text_fields import DataType, TextFields


@pytest.mark.parametrize("data_type", ["text", "json"])
def test_file_changed_after_hashing_fails(tmp_path: Path, data_type: DataType):
    path = tmp_path / "a"
    path.write_text('{"text": "a"}\n')
    before = hash_file(path)
    path.write_text('{"text": "b"}\n')
    with pytest.raises(PrepError, match="a changed while it was read"):
        list(read_text_chunks(before, data_type, fields=TextFields(("text",))))


def test_file_removed_after_hashing_fails(tmp_path: Path):
    removed = DataFile(tmp_path / "a.txt", 1, "x")
    with pytest.raises(PrepError, match=r"cannot read or write .*a.txt - No such file"):
        list(read_text_chunks(removed, "text", fields=TextFields(())))
