"""JSON Lines: lines are documents, and errors name the line."""

from __future__ import annotations

from pathlib import Path

import pytest

from prepcli.core.errors import PrepError
from trainer.data.files import hash_file
from trainer.data.readers import READERS
from trainer.data.readers.reader import Record


def read_json(path: Path) -> list[Record]:
    """Return the records of a file."""
    return [piece for piece in READERS["json"].read(hash_file(path)) if isinstance(piece, Record)]


def test_json_file_that_is_not_utf8_fails(tmp_path: Path):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a"}\n{"text": "\xff"}\n')
    with pytest.raises(PrepError) as caught:
        read_json(tmp_path / "a.jsonl")
    assert caught.value.why == "byte 24 is 0xff: invalid start byte"


def test_json_lines_are_records(tmp_path: Path):
    lines = [
        '\ufeff{"body": "one\\n"}',
        '{"body": "", "text": 3}',
        "",
        "  \r",
        '{"body": "\\ud83d\\ude00"}',
    ]
    (tmp_path / "a.jsonl").write_bytes("\n".join(lines).encode())
    records = read_json(tmp_path / "a.jsonl")
    assert [record.values for record in records] == [
        {"body": "one\n"},
        {"body": "", "text": 3},
        {"body": "😀"},
    ]
    assert [record.place for record in records] == [
        f"{tmp_path}/a.jsonl:{number}" for number in (1, 2, 5)
    ]
    assert sum(record.nbytes for record in records) == (tmp_path / "a.jsonl").stat().st_size


def test_json_line_is_never_cut(tmp_path: Path):
    text = "word\n" * 300_000
    (tmp_path / "a.jsonl").write_text(f'{{"text": "{text}"}}'.replace("\n", "\\n"))
    assert [record.values for record in read_json(tmp_path / "a.jsonl")] == [{"text": text}]


@pytest.mark.parametrize(
    ("line", "what", "why"),
    [
        ('{"text": "a"', "not JSON", "Expecting ',' delimiter at character 13"),
        ("{", "not JSON", "Expecting property name enclosed in double quotes at character 2"),
        ("[" * 100_000, "not JSON", "it is nested too deep"),
        ('{"text": ' + "1" * 5000 + "}", "not JSON", "Exceeds the limit"),
        ('["a"]', "not an object but a list", "type `json` needs one object per line, or one list"),
        ('"a"', "not an object but a string", "type `json` needs one object per line, or one list"),
    ],
)
def test_error_names_the_invalid_json_line(tmp_path: Path, line: str, what: str, why: str):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "good"}\n\n' + line + "\n")
    with pytest.raises(PrepError) as caught:
        read_json(path)
    assert caught.value.what == f"{path}:3: {what}"
    assert caught.value.why.startswith(why)
