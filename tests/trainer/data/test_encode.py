"""Encoding examples: tokens in order, with their loss weights."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prepcli.core.errors import PrepError
from tests.helpers.corpus import TEXT, make_tokenizer
from tests.helpers.corpus import encode as encode_text
from trainer.data import encode
from trainer.data.encode import BATCHES_AHEAD, ExampleBatch, encode_batches
from trainer.data.examples import Example, Segment
from trainer.data.tokenizer import TextTokenizer, load_tokenizer

SEGMENTS = st.lists(
    st.tuples(st.text() | st.lists(st.integers(0, 2**32 - 1), max_size=3), st.integers(0, 1)),
    max_size=3,
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    return load_tokenizer(make_tokenizer(tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"))


@given(st.lists(st.integers(0, 2 * encode.ENCODE_BATCH_NBYTES)))
def test_batch_examples_keeps_order_and_bounds_size(sizes: list[int]):
    examples = ((0, Example((), nbytes)) for nbytes in sizes)
    batches = [batch.examples for batch in encode.batch_examples(examples)]
    assert [example.nbytes for batch in batches for example in batch] == sizes
    totals = [sum(example.nbytes for example in batch) for batch in batches]
    assert all(
        len(batch) == 1 or total <= encode.ENCODE_BATCH_NBYTES
        for batch, total in zip(batches, totals)
    )
    assert all(batches)


@given(st.lists(st.integers(0, 3)))
def test_batch_examples_separates_shards(shards: list[int]):
    shards.sort()
    examples = [(shard, Example((), number)) for number, shard in enumerate(shards)]
    batches = encode.batch_examples(iter(examples))
    assert [(batch.shard, example) for batch in batches for example in batch.examples] == examples


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
    encoded = encode.encode_batch(batch, tokenizer)
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
    assert encode.encode_batch([Example((Segment(TEXT),), 0)], tokenizer).weights is None


def make_batches(count: int, read: list[int]) -> Iterator[ExampleBatch]:
    """Yield batches of one text each, and record their numbers when they are read."""
    for number in range(count):
        read.append(number)
        yield ExampleBatch(0, [Example((Segment(f"the cat {number}"),), nbytes=1)])


@pytest.mark.parametrize("count", [0, 1, BATCHES_AHEAD, 9])
def test_encode_batches_keeps_the_order(tokenizer: TextTokenizer, count: int):
    encoded = [
        encoded.ids.tolist() for _, encoded in encode_batches(make_batches(count, []), tokenizer)
    ]
    assert encoded == [encode_text(tokenizer.path, f"the cat {number}") for number in range(count)]


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

    monkeypatch.setattr(encode, "encode_batch", fails)
    with pytest.raises(PrepError, match="the cat 0"):
        list(encode_batches(make_batches(9, []), tokenizer))
