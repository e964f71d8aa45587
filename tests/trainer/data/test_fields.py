"""Examples of records: the text of columns, their tokens and loss weights, and samples of them."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prepcli.core.errors import USAGE, PrepError
from tests.helpers.corpus import TEXT, encode, make_tokenizer
from tests.trainer.data.test_packing import make_tokens
from trainer.data import encode as encode_module
from trainer.data import token_samples
from trainer.data.encode import BATCHES_AHEAD, ExampleBatch, encode_batches
from trainer.data.examples import Example, ExampleSettings, Segment
from trainer.data.fields import compile_fields
from trainer.data.readers.reader import Record, TextChunk
from trainer.data.sample_text import SamplePart
from trainer.data.store import MappedTokens
from trainer.data.token_samples import count_samples, read_samples
from trainer.data.tokenizer import TextTokenizer, load_tokenizer

# Examples of records: the text of columns, and errors that name the line and the column.

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


# Encoding examples: tokens in order, with their loss weights.

SEGMENTS = st.lists(
    st.tuples(st.text() | st.lists(st.integers(0, 2**32 - 1), max_size=3), st.integers(0, 1)),
    max_size=3,
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    return load_tokenizer(make_tokenizer(tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"))


@given(st.lists(st.integers(0, 2 * encode_module.ENCODE_BATCH_NBYTES)))
def test_batch_examples_keeps_order_and_bounds_size(sizes: list[int]):
    examples = ((0, Example((), nbytes)) for nbytes in sizes)
    batches = [batch.examples for batch in encode_module.batch_examples(examples)]
    assert [example.nbytes for batch in batches for example in batch] == sizes
    totals = [sum(example.nbytes for example in batch) for batch in batches]
    assert all(
        len(batch) == 1 or total <= encode_module.ENCODE_BATCH_NBYTES
        for batch, total in zip(batches, totals)
    )
    assert all(batches)


def make_segments(parts: list[tuple[str | list[int], int]]) -> tuple[Segment, ...]:
    """Return segments of texts and ids with their weights."""
    contents = [part if isinstance(part, str) else np.array(part, np.uint32) for part, _ in parts]
    return tuple(Segment(content, weight) for content, (_, weight) in zip(contents, parts))


@given(st.lists(st.tuples(SEGMENTS | st.none(), SEGMENTS, st.booleans()), max_size=4))
def test_encode_batch_has_each_token_once_with_its_weight(
    tokenizer: TextTokenizer,
    examples: list[
        tuple[list[tuple[str | list[int], int]] | None, list[tuple[str | list[int], int]], bool]
    ],
):
    batch = [
        Example(
            make_segments(target),
            0,
            source=None if source is None else make_segments(source),
            ends_document=ends,
        )
        for source, target, ends in examples
    ]
    tokens: list[tuple[int, int]] = []
    ends: list[int] = []
    for source, target, ends_document in examples:
        if source is not None:
            tokens += weighted_tokens(source, tokenizer)
            ends.append(len(tokens))
        tokens += weighted_tokens(target, tokenizer)
        if ends_document:
            ends.append(len(tokens))
    encoded = encode_module.encode_batch(batch, tokenizer)
    weights = encoded.weights
    if weights is None:
        weights = np.ones(len(encoded.ids), np.uint8)
    assert list(zip(encoded.ids, weights, strict=True)) == tokens
    assert encoded.ends.tolist() == ends


def weighted_tokens(
    parts: list[tuple[str | list[int], int]], tokenizer: TextTokenizer
) -> list[tuple[int, int]]:
    """Return each token of texts and ids with its weight."""
    tokens: list[tuple[int, int]] = []
    for part, weight in parts:
        if isinstance(part, str):
            ids: list[int] = tokenizer.encode([part])[0].tolist()
        else:
            ids = part
        tokens += [(token, weight) for token in ids]
    return tokens


def test_text_with_weight_1_has_no_weights(tokenizer: TextTokenizer):
    assert encode_module.encode_batch([Example((Segment(TEXT),), 0)], tokenizer).weights is None


def make_batches(count: int, read: list[int]) -> Iterator[ExampleBatch]:
    """Yield batches of one text each, and record their numbers when they are read."""
    for number in range(count):
        read.append(number)
        yield ExampleBatch(0, [Example((Segment(f"the cat {number}"),), nbytes=1)])


def test_encode_batches_reads_a_constant_number_ahead(tokenizer: TextTokenizer):
    read: list[int] = []
    batches = encode_batches(make_batches(9, read), tokenizer)
    for number in range(3):
        next(batches)
        assert len(read) == number + 1 + BATCHES_AHEAD
    batches.close()


def test_encode_batches_raises_errors_of_threads(
    tokenizer: TextTokenizer, monkeypatch: pytest.MonkeyPatch
):
    def fails(batch: list[Example], _: TextTokenizer) -> None:
        raise PrepError(str(batch[0].target[0].content))

    monkeypatch.setattr(encode_module, "encode_batch", fails)
    with pytest.raises(PrepError, match="the cat 0"):
        list(encode_batches(make_batches(9, []), tokenizer))


# Samples of a token store as text, and their counts: compare with documents counted by hand.

# Text, a character of several tokens, and the special token of the tokenizer.
DOCUMENT = "the cat sat\n 日本"

DOCUMENTS = st.lists(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 2)), max_size=6), max_size=9
)


def weighted(documents: list[list[tuple[int, int]]], seq_length: int) -> MappedTokens:
    """Return a store of documents of ids and weight codes: 0, 1, or 2 for the weight 0.3."""
    tokens = make_tokens([[token for token, _ in document] for document in documents], seq_length)
    codes = np.array([code for document in documents for _, code in document], np.uint8)
    return replace(tokens, weight_codes=codes, loss_weights=(0.0, 1.0, 0.3))


@given(DOCUMENTS, st.integers(1, 5))
def test_sample_counts_match_documents(documents: list[list[tuple[int, int]]], seq_length: int):
    counts = count_samples(weighted(documents, seq_length), source_length=0, has_blocks=True)
    losses = [sum(code > 0 for _, code in document) for document in documents]
    lengths = [len(document) for document in documents]
    assert (counts.samples, counts.tokens) == (len(documents), sum(lengths))
    assert (counts.loss_tokens, counts.without_loss) == (sum(losses), losses.count(0))
    assert counts.cut == sum(length > seq_length for length in lengths)
    assert counts.longest == max(lengths, default=0)
    assert counts.dropped == sum(lengths) % seq_length


def test_sample_counts_of_pairs_have_both_texts(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(token_samples, "COUNT_DOCUMENTS", 2)
    pairs = [[(3, 1), (4, 1), (5, 1)], [(6, 1), (7, 0), (8, 1), (9, 1)], [(1, 1)], [(2, 0)]]
    counts = count_samples(weighted(pairs, 2), source_length=2, has_blocks=True)
    assert (counts.samples, counts.tokens, counts.loss_tokens) == (2, 9, 3)
    assert (counts.cut, counts.cut_sources, counts.cut_targets) == (1, 1, 1)
    assert (counts.dropped, counts.longest, counts.without_loss) == (3, 4, 1)
    counts = count_samples(weighted(pairs, 2), source_length=3, has_blocks=False)
    assert (counts.cut_sources, counts.cut_targets, counts.dropped) == (0, 1, 2)


def test_samples_have_the_text_of_all_tokens(tmp_path: Path):
    tokenizer = load_tokenizer(make_tokenizer(tmp_path / "tokenizer.json"))
    ids = encode(tokenizer.path, DOCUMENT)
    unknown = tokenizer.max_id + 5
    (sample,) = read_samples(make_tokens([[*ids, 0, unknown]], 4), tokenizer, 3)
    assert sample.parts == (
        SamplePart(DOCUMENT, tuple(ids), 1.0),
        SamplePart(f"<|end|><|{unknown}|>", (0, unknown), 1.0, is_special=True),
    )
    assert (sample.tokens, sample.loss_tokens, sample.is_cut) == (len(ids) + 2, len(ids) + 2, True)


def test_samples_begin_a_part_where_the_weight_changes(tmp_path: Path):
    tokenizer = load_tokenizer(make_tokenizer(tmp_path / "tokenizer.json"))
    codes = [(" the", 0), (" cat", 1), (" sat", 2)]
    document = [(token, code) for text, code in codes for token in encode(tokenizer.path, text)]
    samples = list(read_samples(weighted([document, [], document], 99), tokenizer, 2))
    parts = [(part.text, part.weight) for part in samples[0].parts]
    assert parts == [(" the", 0.0), (" cat", 1.0), (" sat", 0.3)]
    assert (len(samples), samples[1].parts, samples[1].tokens) == (2, (), 0)


def test_long_sample_has_its_start_and_its_end(tmp_path: Path):
    tokenizer = load_tokenizer(make_tokenizer(tmp_path / "tokenizer.json"))
    ids = encode(tokenizer.path, "the cat sat on the mat." * 100)
    (sample,) = read_samples(make_tokens([ids], 9), tokenizer, 1, max_tokens=5)
    first, middle, last = sample.parts
    assert first.ids + last.ids == (*ids[:2], *ids[-3:])
    assert (middle.omitted, middle.text, sample.tokens) == (len(ids) - 5, "", len(ids))


def test_pairs_have_source_and_target(tmp_path: Path):
    tokenizer = load_tokenizer(make_tokenizer(tmp_path / "tokenizer.json"))
    the, cat = (encode(tokenizer.path, text) for text in ("the", " cat"))
    documents = [the, cat, cat, the, the, the]
    samples = list(read_samples(make_tokens(documents, 9), tokenizer, 2, source_length=9))
    texts = [(sample.source[0].text, sample.parts[0].text) for sample in samples]
    assert texts == [("the", " cat"), (" cat", "the")]
    assert [sample.source[0].weight for sample in samples] == [0.0, 0.0]
    assert [sample.loss_tokens for sample in samples] == [len(cat), len(the)]
