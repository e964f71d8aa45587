"""Reading examples: files in order, and no more of them than asked for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from prepcli.core.errors import PrepError
from tests.helpers.corpus import write_json
from trainer.data.examples import Example, ExampleSettings
from trainer.data.fields import compile_fields
from trainer.data.files import hash_file
from trainer.data.records import RecordSettings, ShardReader, divide_files
from trainer.recipe.text_fields import FileType


def write_files(folder: Path) -> list[Path]:
    """Write two files of three and two lines."""
    return [
        write_json(folder / "a.jsonl", ["a", "b", "c"]),
        write_json(folder / "b.jsonl", ["d", "e"]),
    ]


def settings(limit: int) -> RecordSettings:
    """Return settings with a limit."""
    return RecordSettings(vocab=9, limit=limit)


def read_examples(paths: Sequence[Path], file_type: FileType, limit: int) -> Iterator[Example]:
    """Yield the examples of files, in one shard."""
    files = [hash_file(path) for path in paths]
    layout = divide_files(files, file_type, min_nbytes=1 << 20, max_shards=1)
    settings_of_examples = ExampleSettings(fields="text" if file_type == "json" else "")
    builder = compile_fields(settings_of_examples, vocab=9)
    reader = ShardReader(files, file_type, builder, settings(limit), layout, print)
    for shard, example in reader.read(lambda shard: True):
        assert shard == 0
        yield example


def read_texts(paths: list[Path], limit: int) -> list[object]:
    """Return the texts of the examples of files."""
    examples = read_examples(paths, "json", limit)
    return [segment.content for example in examples for segment in example.target]


@pytest.mark.parametrize(
    ("limit", "texts"), [(0, "abcde"), (2, "ab"), (3, "abc"), (4, "abcd"), (9, "abcde")]
)
def test_read_examples_stops_at_the_limit(tmp_path: Path, limit: int, texts: str):
    assert read_texts(write_files(tmp_path), limit) == [*texts]


def test_file_that_is_not_read_to_its_end_is_checked(tmp_path: Path):
    path = write_files(tmp_path)[0]
    examples = read_examples([path], "json", 1)
    next(examples)
    path.write_text(path.read_text().replace("c", "x"))
    with pytest.raises(PrepError, match=r"a\.jsonl changed while it was read"):
        next(examples)


def test_limit_counts_a_long_text_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("trainer.data.readers.text_files.TEXT_CHUNK_NBYTES", 40)
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("word\n" * 50)
    paths = [tmp_path / name for name in ("a.txt", "b.txt")]
    examples = list(read_examples(paths, "text", 1))
    assert (
        "".join(str(part.content) for example in examples for part in example.target)
        == "word\n" * 50
    )
    assert len(examples) > 1
