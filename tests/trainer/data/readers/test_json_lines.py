"""JSON Lines: lines are documents, and errors name the line."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer.data.documents import read_text_chunks
from trainer.data.files import hash_file
from trainer.data.readers.reader import TextChunk
from trainer.models.errors import PrepError
from trainer.recipe.text_fields import TextFields


def read_json(path: Path, column: str = "text") -> list[TextChunk]:
    """Read a file whose text is in one column."""
    return list(read_text_chunks(hash_file(path), "json", fields=TextFields((column,))))


def test_json_file_that_is_not_utf8_fails(tmp_path: Path):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a"}\n{"text": "\xff"}\n')
    with pytest.raises(PrepError) as caught:
        read_json(tmp_path / "a.jsonl")
    assert caught.value.why == "byte 24 is 0xff: invalid start byte"


def test_json_lines_are_documents(tmp_path: Path):
    lines = ['\ufeff{"body": "one\\n"}', '{"body": "", "text": 3}', "", "  \r", '{"body": "\\ud83d\\ude00"}']
    (tmp_path / "a.jsonl").write_bytes("\n".join(lines).encode())
    chunks = read_json(tmp_path / "a.jsonl", column="body")
    assert [(chunk.text, chunk.ends_document) for chunk in chunks] == [("one\n", True), ("", True), ("😀", True)]
    assert sum(chunk.nbytes for chunk in chunks) == (tmp_path / "a.jsonl").stat().st_size


def test_json_line_is_never_cut(tmp_path: Path):
    text = "word\n" * 300_000
    (tmp_path / "a.jsonl").write_text(f'{{"text": "{text}"}}'.replace("\n", "\\n"))
    assert [chunk.text for chunk in read_json(tmp_path / "a.jsonl")] == [text]


@pytest.mark.parametrize(
    ("line", "what", "why"),
    [
        ('{"text": "a"', "not JSON", "Expecting ',' delimiter at character 13"),
        ("{", "not JSON", "Expecting property name enclosed in double quotes at character 2"),
        ("[" * 100_000, "not JSON", "it is nested too deep"),
        ('{"text": ' + "1" * 5000 + "}", "not JSON", "Exceeds the limit"),
        ('["a"]', "not an object but a list", "type `json` needs one object per line"),
        ('"a"', "not an object but a string", "type `json` needs one object per line"),
        ('{"body": "a", "id": 1}', "no column `text`", "its columns: `body`, `id`"),
        ("{}", "no column `text`", "its columns: none"),
        ('{"text": null}', "column `text` is not text", "it is null"),
        ('{"text": ["a"]}', "column `text` is not text", "it is a list"),
        ('{"text": {}}', "column `text` is not text", "it is an object"),
        ('{"text": true}', "column `text` is not text", "it is a boolean"),
        ('{"text": 1.5}', "column `text` is not text", "it is a number"),
        ('{"text": "\\ud83d"}', "column `text` is not text", "it has an unpaired surrogate"),
    ],
)
def test_invalid_json_line_is_named(tmp_path: Path, line: str, what: str, why: str):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "good"}\n\n' + line + "\n")
    with pytest.raises(PrepError) as caught:
        read_json(path)
    assert caught.value.what == f"{path}:3: {what}"
    assert caught.value.why.startswith(why)


def test_source_comes_before_its_target_with_the_prefix(tmp_path: Path):
    (tmp_path / "a.jsonl").write_text('{"a": "long", "b": "text", "c": "short"}\n')
    fields = TextFields(target=("c",), source=("a", "b"))
    chunks = read_text_chunks(hash_file(tmp_path / "a.jsonl"), "json", fields=fields, prefix="sum: ")
    assert [*chunks] == [TextChunk("sum: long text", 0, True), TextChunk("short", 41, True)]
