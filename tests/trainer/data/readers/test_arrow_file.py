"""Parquet and Arrow files: rows are records, and errors name the row and the column."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from prepcli.core.errors import PrepError
from tests.helpers.corpus import make_config, tokenize_quietly
from tests.helpers.data_formats import write_arrow_files
from trainer.data.files import hash_file
from trainer.data.readers import READERS
from trainer.data.readers.reader import Record
from trainer.recipe.text_fields import FileType

pa = pytest.importorskip("pyarrow")
ROWS = [{"id": str(i), "text": f"cat {i}"} for i in range(20)]
TYPES: Mapping[str, FileType] = {
    "a.parquet": "parquet",
    "file.arrow": "arrow",
    "stream.arrow": "arrow",
}


def read_records(path: Path, file_type: FileType) -> list[Record]:
    return [
        piece for piece in READERS[file_type].read(hash_file(path)) if isinstance(piece, Record)
    ]


@pytest.mark.parametrize("name", TYPES)
def test_rows_are_records_that_count_the_bytes_of_the_file(tmp_path: Path, name: str):
    write_arrow_files(tmp_path, ROWS)
    records = read_records(tmp_path / name, TYPES[name])
    assert [dict(record.values) for record in records] == ROWS
    assert [record.place for record in records[::19]] == [
        f"{tmp_path}/{name}, row {number}" for number in (1, 20)
    ]
    nbytes, size = sum(record.nbytes for record in records), (tmp_path / name).stat().st_size
    assert size - 100 < nbytes <= size


@pytest.mark.parametrize("name", TYPES)
def test_error_names_the_damaged_file(tmp_path: Path, name: str):
    write_arrow_files(tmp_path, ROWS)
    path = tmp_path / name
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(PrepError, match=rf"{name} cannot be read as (Parquet|Arrow) after row \d+"):
        read_records(path, TYPES[name])


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ({"en": "a"}, "it is an object"),
        (["a"], "it is a list"),
        (None, "it is null"),
        (b"a", "it is a value of type bytes"),
    ],
)
def test_error_names_row_and_column_of_a_value_without_text(tmp_path: Path, text: Any, why: str):
    from pyarrow import parquet

    path = tmp_path / "a.parquet"
    parquet.write_table(pa.Table.from_pylist([{"text": text}]), path)
    with pytest.raises(PrepError) as caught:
        tokenize_quietly(make_config(tmp_path, path, type="parquet", fields="text"))
    assert (caught.value.what, caught.value.why) == (
        f"{path}, row 1: column `text` is not text",
        why,
    )


def test_missing_column_error_lists_the_other_columns(tmp_path: Path):
    path, *_ = write_arrow_files(tmp_path, ROWS)
    with pytest.raises(PrepError) as caught:
        tokenize_quietly(make_config(tmp_path, path, type="parquet", fields="body"))
    assert (caught.value.what, caught.value.why) == (
        f"{path}, row 1: no column `body`",
        "its columns: `id`, `text`",
    )


@pytest.mark.parametrize("name", TYPES)
def test_file_changed_after_hashing_fails(tmp_path: Path, name: str):
    write_arrow_files(tmp_path, ROWS)
    before = hash_file(tmp_path / name)
    write_arrow_files(tmp_path, [{**row, "text": row["text"].upper()} for row in ROWS])
    with pytest.raises(PrepError, match="changed while it was read"):
        list(READERS[TYPES[name]].read(before))
