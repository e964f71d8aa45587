"""Examples of records: the text of columns, and errors that name the line and the column."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from trainer.data.examples import Example
from trainer.data.fields import ExampleSettings, compile_fields
from trainer.data.readers.reader import Record, TextChunk
from trainer.models.errors import PrepError

PLACE = "a.jsonl:3"


def build(values: dict[str, Any], **settings: Any) -> Example:
    """Return the example of a record."""
    return compile_fields(ExampleSettings(**settings)).build(Record(values, PLACE, 41))


def contents(segments: Any) -> list[tuple[Any, int]]:
    """Return content and weight of segments, with ids as lists."""
    return [
        (part.content.tolist() if isinstance(part.content, np.ndarray) else part.content, part.weight)
        for part in segments
    ]


@pytest.mark.parametrize(
    ("values", "what", "why"),
    [
        ({"body": "a", "id": 1}, "no column `text`", "its columns: `body`, `id`"),
        ({}, "no column `text`", "its columns: none"),
        ({"text": None}, "column `text` is not text", "it is null"),
        ({"text": ["a"]}, "column `text` is not text", "it is a list"),
        ({"text": {}}, "column `text` is not text", "it is an object"),
        ({"text": True}, "column `text` is not text", "it is a boolean"),
        ({"text": 1.5}, "column `text` is not text", "it is a number"),
        ({"text": "\ud83d"}, "column `text` is not text", "it has an unpaired surrogate, which is not a character"),
    ],
)
def test_invalid_text_column_is_named(values: dict[str, Any], what: str, why: str):
    with pytest.raises(PrepError) as caught:
        build(values, fields="text")
    assert (caught.value.what, caught.value.why) == (f"{PLACE}: {what}", why)


def test_source_is_a_document_of_its_own_with_the_prefix():
    values = {"a": "long", "b": "text", "c": "short"}
    example = build(values, fields="[a], [b], c", has_encoder=True, eos_id=7, source_prefix="sum: ")
    assert contents(example.source) == [("sum: long text", 1), ([7], 1)]
    assert contents(example.target) == [("short", 1), ([7], 1)]
    assert (example.nbytes, example.ends_document) == (41, True)


@pytest.mark.parametrize("ends_document", [False, True])
def test_eos_id_follows_the_last_chunk_of_a_text(ends_document: bool):
    builder = compile_fields(ExampleSettings(eos_id=7))
    example = builder.build(TextChunk("part", 4, starts_document=True, ends_document=ends_document))
    assert contents(example.target) == [("part", 1)] + [([7], 1)] * ends_document
    assert (example.source, example.nbytes, example.ends_document) == (None, 4, ends_document)
