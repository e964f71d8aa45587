"""CSV files: rows are records, and errors name the line."""

from __future__ import annotations

from pathlib import Path

import pytest

from prepcli.core.errors import PrepError
from trainer.data.files import hash_file
from trainer.data.readers import READERS
from trainer.data.readers.reader import ReadOptions, Record


def read_csv(path: Path, data: bytes, options: ReadOptions | None = None) -> list[Record]:
    """Return the records of a file with these bytes."""
    path.write_bytes(data)
    pieces = READERS["csv"].read(hash_file(path), options or ReadOptions())
    return [piece for piece in pieces if isinstance(piece, Record)]


def test_rows_are_records_with_their_first_line(tmp_path: Path):
    data = b'\xef\xbb\xbfid,text\r\n\r\n1,"one\r\ntwo"\r\n2,"a ""b"", c"\r\n'
    records = read_csv(tmp_path / "a.csv", data)
    assert [record.values for record in records] == [
        {"id": "1", "text": "one\r\ntwo"},
        {"id": "2", "text": 'a "b", c'},
    ]
    assert [record.place for record in records] == [f"{tmp_path}/a.csv:3", f"{tmp_path}/a.csv:5"]
    assert sum(record.nbytes for record in records) == len(data)


def test_tab_separates_columns_of_tsv_files(tmp_path: Path):
    (record,) = read_csv(tmp_path / "a.tsv", b"id\ttext\n1\ta, b\n")
    assert record.values == {"id": "1", "text": "a, b"}


def test_long_field_is_read_whole(tmp_path: Path):
    (record,) = read_csv(tmp_path / "a.csv", b"text\n" + b"a" * 300_000 + b"\n")
    assert record.values["text"] == "a" * 300_000


@pytest.mark.parametrize(
    ("row", "what", "why"),
    [
        (b"1\n", "a.csv:3: 1 field", "the header has 2"),
        (b"1,2,3\n", "a.csv:3: 3 fields", "the header has 2"),
        (b"1,\xe9\n", "a.csv:3: not UTF-8", "field 2 has the byte 0xe9"),
        (b'1,"a"b\n', "a.csv:3: not CSV", "',' expected after '\"'"),
    ],
)
def test_invalid_row_is_an_error_or_is_skipped(tmp_path: Path, row: bytes, what: str, why: str):
    data = b"id,text\n0,a\n" + row + b"2,b\n"
    with pytest.raises(PrepError) as caught:
        read_csv(tmp_path / "a.csv", data)
    assert (caught.value.what, caught.value.why) == (f"{tmp_path}/{what}", why)
    errors: list[PrepError] = []
    records = read_csv(tmp_path / "a.csv", data, ReadOptions(errors.append))
    assert [record.values["id"] for record in records] == ["0", "2"]
    assert [error.what for error in errors] == [f"{tmp_path}/{what}"]


def test_carriage_returns_as_line_ends_are_an_error(tmp_path: Path):
    with pytest.raises(PrepError) as raised:
        read_csv(tmp_path / "a.csv", b"id,text\r1,one\r2,two\r")
    assert raised.value.what == f"{tmp_path}/a.csv:1: not CSV"
    assert (
        raised.value.why == "it has a carriage return outside of quotes; lines end with a line feed"
    )
    assert raised.value.hint == f"`tr '\\r' '\\n' < {tmp_path}/a.csv > NEW` converts such line ends"


def test_error_names_the_line_of_an_unclosed_quote(tmp_path: Path):
    with pytest.raises(PrepError, match=r"a.csv:2: not CSV - unexpected end of data"):
        read_csv(tmp_path / "a.csv", b'id,text\n1,"a\n2,b\n')


@pytest.mark.parametrize(
    ("rows", "n_lines"),
    [(b'1,"a\n2,b\n3,c\n', 3), (b'1,"a\n2,b\n3,"c"\n4,d\n', 3), (b'1,"a\n2","b",c\n4,d\n', 2)],
)
def test_each_line_of_an_invalid_row_is_reported(tmp_path: Path, rows: bytes, n_lines: int):
    errors: list[PrepError] = []
    read_csv(tmp_path / "a.csv", b"id,text\n0,x\n" + rows, ReadOptions(errors.append))
    assert [error.what.partition(": ")[0] for error in errors] == [
        f"{tmp_path}/a.csv:{number}" for number in range(3, 3 + n_lines)
    ]
    assert errors[1].what.endswith("a line of the invalid row at line 3")


def test_invalid_header_is_never_skipped(tmp_path: Path):
    with pytest.raises(PrepError, match=r"a.csv:1: two columns are named `id`"):
        read_csv(tmp_path / "a.csv", b"id,id\n1,2\n", ReadOptions(lambda error: None))
    with pytest.raises(PrepError, match=r"a.csv:1: not UTF-8"):
        read_csv(tmp_path / "a.csv", b"id,\xff\n1,2\n", ReadOptions(lambda error: None))
