"""Reading examples: files in order, and no more of them than asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from prepcli.core.errors import PrepError
from tests.helpers.corpus import write_json
from trainer.data.example_settings import ExampleSettings
from trainer.data.fields import compile_fields
from trainer.data.files import hash_file
from trainer.data.records import RecordSettings, read_examples


def write_files(folder: Path) -> list[Path]:
    """Write two files of three and two lines."""
    return [
        write_json(folder / "a.jsonl", ["a", "b", "c"]),
        write_json(folder / "b.jsonl", ["d", "e"]),
    ]


def settings(limit: int) -> RecordSettings:
    """Return settings with a limit."""
    return RecordSettings(vocab=9, limit=limit)


def read_texts(paths: list[Path], limit: int) -> list[object]:
    """Return the texts of the examples of files."""
    builder = compile_fields(ExampleSettings(fields="text"), vocab=9)
    examples = read_examples(
        [hash_file(path) for path in paths], "json", builder, settings=settings(limit), note=print
    )
    return [segment.content for example in examples for segment in example.target]


@pytest.mark.parametrize(
    ("limit", "texts"), [(0, "abcde"), (2, "ab"), (3, "abc"), (4, "abcd"), (9, "abcde")]
)
def test_read_examples_stops_at_the_limit(tmp_path: Path, limit: int, texts: str):
    assert read_texts(write_files(tmp_path), limit) == [*texts]


def test_file_that_is_not_read_to_its_end_is_checked(tmp_path: Path):
    path = write_files(tmp_path)[0]
    builder = compile_fields(ExampleSettings(fields="text"), vocab=9)
    examples = read_examples([hash_file(path)], "json", builder, settings=settings(1), note=print)
    next(examples)
    path.write_text(path.read_text().replace("c", "x"))
    with pytest.raises(PrepError, match=r"a\.jsonl changed while it was read"):
        next(examples)


def test_limit_counts_a_long_text_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("trainer.data.readers.text_file.TEXT_CHUNK_NBYTES", 40)
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("word\n" * 50)
    files = [hash_file(tmp_path / name) for name in ("a.txt", "b.txt")]
    builder = compile_fields(ExampleSettings(), vocab=9)
    examples = list(read_examples(files, "text", builder, settings=settings(1), note=print))
    assert (
        "".join(str(part.content) for example in examples for part in example.target)
        == "word\n" * 50
    )
    assert len(examples) > 1
