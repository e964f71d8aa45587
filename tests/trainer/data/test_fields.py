"""Examples of records: the text of columns, and errors that name the line and the column."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prepcli.core.errors import USAGE, PrepError
from trainer.data.examples import Example, ExampleSettings
from trainer.data.fields import compile_fields
from trainer.data.readers.reader import Record, TextChunk

PLACE, VOCAB = "a.jsonl:3", 100


def build(values: dict[str, Any], **settings: Any) -> Example:
    """Return the example of a record."""
    return compile_fields(ExampleSettings(**settings), vocab=VOCAB).build(Record(values, PLACE, 41))


def contents(segments: Any) -> list[tuple[Any, int]]:
    """Return content and weight of segments, with ids as lists."""
    return [
        (
            part.content.tolist() if isinstance(part.content, np.ndarray) else part.content,
            part.weight,
        )
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
        (
            {"text": "\ud83d"},
            "column `text` is not text",
            "it has an unpaired surrogate, which is not a character",
        ),
    ],
)
def test_error_names_the_invalid_text_column(values: dict[str, Any], what: str, why: str):
    with pytest.raises(PrepError) as caught:
        build(values, fields="text")
    assert (caught.value.what, caught.value.why) == (f"{PLACE}: {what}", why)


def test_source_is_a_document_of_its_own_with_the_prefix():
    values = {"a": "long", "b": "text", "c": "short"}
    example = build(values, fields="[a], [b], c", has_encoder=True, eos_id=7, source_prefix="sum: ")
    assert contents(example.source) == [("sum: long text", 1), ([7], 1)]
    assert contents(example.target) == [("short", 1), ([7], 1)]
    assert (example.nbytes, example.ends_document) == (41, True)


def encode_base64(ids: list[int]) -> str:
    """Return ids as base64 of little-endian int32 values."""
    return base64.b64encode(np.array(ids, "<i4").tobytes()).decode()


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
IDS = st.lists(st.integers(0, VOCAB - 1), max_size=4)
ITEMS = st.one_of(
    st.lists(TEXTS, min_size=1, max_size=3),
    IDS.map(np.array),
    IDS.map(encode_base64).map(str.encode),
    st.integers(0, VOCAB - 1),
    st.sampled_from(["<|bos|>", "<|eos|>"]),
)


@given(
    st.lists(st.tuples(ITEMS, st.booleans()), max_size=5),
    TEXTS,
    st.booleans(),
    st.booleans(),
    st.sampled_from(["", " ", "--"]),
)
def test_decoder_reads_all_fields_in_order_with_their_weights(
    items: list[tuple[Any, bool]], last: str, add_bos: bool, add_eos: bool, separator: str
):
    """Each token of a record occurs once. The bos token and tokens in brackets have weight 0."""
    values: dict[str, Any] = {"last": last}
    names: list[str] = []
    # Fields that begin with the token do not get a second one.
    begins_with_bos = bool(items) and str(items[0][0]) in ("<|bos|>", "3")
    expected: list[tuple[Any, int]] = [([3], 0)] * (add_bos and not begins_with_bos)
    for item, is_bracketed in items:
        columns = [
            f"column {len(values) + i}" for i in range(len(item) if isinstance(item, list) else 1)
        ]
        content: Any = (
            {"<|bos|>": [3], "<|eos|>": [4]}.get(item) if isinstance(item, str) else [item]
        )
        name: str = item if isinstance(item, str) else f"<|{item}|>"
        if isinstance(item, list):
            values |= dict(zip(columns, item))
            name, content = "+".join(columns), separator.join(item)
        elif isinstance(item, bytes):
            values[columns[0]] = item.decode()
            name, content = (
                f"{{{columns[0]}}}",
                np.frombuffer(base64.b64decode(item), "<i4").tolist(),
            )
        elif isinstance(item, np.ndarray):
            values[columns[0]] = item.tolist()
            name, content = f"{{{columns[0]}}}", item.tolist()
        names.append(f"[{name}]" if is_bracketed else name)
        expected.append((content, 0 if is_bracketed else 1))
    expected += [(last, 1), *[([4], 1)] * add_eos]
    settings = {
        "add_bos": add_bos,
        "add_eos": add_eos,
        "bos_id": 3,
        "eos_id": 4,
        "subfield_separator": separator,
    }
    fields = ", ".join([*names, "last"])
    assert contents(build(values, fields=fields, **settings).target) == expected
    by_record = build({**values, "how": fields}, fields_from_example="how", **settings)
    assert contents(by_record.target) == expected
    builder = compile_fields(ExampleSettings(fields=fields, **settings), vocab=VOCAB)
    assert builder.has_weights == any(weight == 0 for _, weight in expected)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ("a", [([8, 9], 0), ("text", 1)]),
        ("[a], a", [([8, 9], 0), ("text", 0), ("text", 1)]),
        ("<|bos|>, a", [([3], 1), ("text", 1)]),
        ("{c}, a", [([5, 6], 1), ("text", 1)]),
    ],
)
def test_texts_begin_as_the_tokenizer_begins_them(fields: str, expected: list[Any]):
    values = {"a": "text", "c": [5, 6]}
    example = build(values, fields=fields, bos_id=3, prefix_ids=(8, 9))
    assert contents(example.target) == expected
    assert contents(build(values, fields=fields, bos_id=3, add_bos=False).target) == (
        [item for item in expected if item[0] != [8, 9]]
    )


def test_encoder_joins_texts_between_tokens():
    values = {"a": "long", "b": "text", "c": [5, 6], "d": "short", "e": "er"}
    settings = {
        "has_encoder": True,
        "bos_id": 3,
        "add_bos": True,
        "eos_id": 7,
        "subfield_separator": "_",
    }
    example = build(
        values, fields="[a, b], d, [{c}], [<|9|>, a], e", source_prefix="sum: ", **settings
    )
    assert contents(example.source) == [
        ([3], 0),
        ("sum: long_text", 1),
        ([5, 6], 1),
        ([9], 1),
        ("long", 1),
        ([7], 1),
    ]
    assert contents(example.target) == [([3], 0), ("short_er", 1), ([7], 1)]


def test_prepended_text_is_part_of_the_first_field():
    values = {"a": "what?", "b": "that"}
    assert contents(build(values, fields="[a], b", prepend_text="Q: ").target) == [
        ("Q: what?", 0),
        ("that", 1),
    ]
    chunks = [TextChunk("one", 3, True, False), TextChunk("two", 3, False, True)]
    builder = compile_fields(
        ExampleSettings(prepend_text="Q: ", bos_id=3, add_bos=True), vocab=VOCAB
    )
    assert [contents(builder.build(chunk).target) for chunk in chunks] == [
        [([3], 0), ("Q: one", 1)],
        [("two", 1)],
    ]


@pytest.mark.parametrize(
    ("fields", "settings", "why"),
    [
        ("<|bos|>, a", {}, "the model's config.json has no bos_token_id"),
        ("<|eos|>, a", {}, "the model's config.json has no eos_token_id"),
        ("<|100|>, a", {}, "<|100|> is not in the vocabulary of 100 tokens without padding"),
        ("<|5|>, a", {"prepend_text": "Q: "}, "its first field must be a text"),
        (
            "a",
            {"has_encoder": True},
            "the model has an encoder, so it needs source columns in brackets",
        ),
    ],
)
def test_fields_that_do_not_fit_the_model_are_rejected(
    fields: str, settings: dict[str, Any], why: str
):
    with pytest.raises(PrepError) as caught:
        compile_fields(ExampleSettings(fields=fields, **settings), vocab=VOCAB)
    assert caught.value.code == USAGE
    assert why in caught.value.why
    with pytest.raises(PrepError) as caught:
        build({"a": "x", "how": fields}, fields_from_example="how", **settings)
    assert caught.value.what == f'{PLACE}: column `how` is "{fields}"'
    assert why in caught.value.why


@pytest.mark.parametrize(
    ("value", "what", "why"),
    [
        ("*", " has no token ids", "Only base64 data is allowed"),
        (
            "AAAA",
            " has no token ids",
            "its base64 decodes to 3 bytes, which is not a multiple of 4",
        ),
        (None, " has no token ids", "it is null"),
        (["a"], " has no token ids", "it is a list of other values"),
        ([1.5], " has no token ids", "it is a list of other values"),
        ([True], " has no token ids", "it is a list of other values"),
        ([[1], [2, 3]], " has no token ids", "inhomogeneous"),
        ([[1]], " has no token ids", "it is a list of other values"),
        ([2**70], " has no token ids", "it is a list of other values"),
        (
            [1, 100],
            ": token id 100 is out of range",
            "the vocabulary without padding has 100 tokens",
        ),
        ([-1, 3], ": token id -1 is out of range", "the vocabulary without padding has 100 tokens"),
        (
            encode_base64([5, 1000]),
            ": token id 1,000 is out of range",
            "the vocabulary without padding has 100 tokens",
        ),
    ],
)
def test_error_names_the_invalid_ids_column(value: Any, what: str, why: str):
    with pytest.raises(PrepError) as caught:
        build({"ids": value}, fields="{ids}")
    assert caught.value.what == f"{PLACE}: column `ids`{what}"
    assert why in caught.value.why


@pytest.mark.parametrize("ends_document", [False, True])
def test_eos_id_follows_the_last_chunk_of_a_text(ends_document: bool):
    builder = compile_fields(ExampleSettings(eos_id=7), vocab=VOCAB)
    example = builder.build(TextChunk("part", 4, starts_document=True, ends_document=ends_document))
    assert contents(example.target) == [("part", 1)] + [([7], 1)] * ends_document
    assert (example.source, example.nbytes, example.ends_document) == (None, 4, ends_document)
