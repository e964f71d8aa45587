"""Encoding examples: tokens in order, with their loss weights."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.corpus import TEXT, make_tokenizer
from trainer.data import encode
from trainer.data.examples import Example, Segment
from trainer.data.tokenizer import TextTokenizer, load_tokenizer

SEGMENTS = st.lists(
    st.tuples(st.text() | st.lists(st.integers(0, 2**32 - 1), max_size=3), st.integers(0, 1)), max_size=3
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    return load_tokenizer(make_tokenizer(tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"))


@given(st.lists(st.integers(0, 2 * encode.ENCODE_BATCH_NBYTES)))
def test_batch_examples_keeps_order_and_bounds_size(sizes: list[int]):
    batches = list(encode.batch_examples(Example((), nbytes) for nbytes in sizes))
    assert [example.nbytes for batch in batches for example in batch] == sizes
    totals = [sum(example.nbytes for example in batch) for batch in batches]
    assert all(len(batch) == 1 or total <= encode.ENCODE_BATCH_NBYTES for batch, total in zip(batches, totals))
    assert all(batches)


def make_segments(parts: list[tuple[str | list[int], int]]) -> tuple[Segment, ...]:
    """Return segments of texts and ids with their weights."""
    contents = [part if isinstance(part, str) else np.array(part, np.uint32) for part, _ in parts]
    return tuple(Segment(content, weight) for content, (_, weight) in zip(contents, parts))


@given(st.lists(st.tuples(SEGMENTS | st.none(), SEGMENTS, st.booleans()), max_size=4))
def test_encode_batch_has_each_token_once_with_its_weight(
    tokenizer: TextTokenizer,
    examples: list[tuple[list[tuple[str | list[int], int]] | None, list[tuple[str | list[int], int]], bool]],
):
    batch = [
        Example(make_segments(target), 0, source=None if source is None else make_segments(source), ends_document=ends)
        for source, target, ends in examples
    ]
    expected = []
    for source, target, ends in examples:
        for parts, is_end in ([] if source is None else [(source, True)]) + [(target, ends)]:
            tokens = [
                (token, weight)
                for part, weight in parts
                for token in (tokenizer.encode([part])[0].tolist() if isinstance(part, str) else part)
            ]
            expected.append((tokens, is_end))
    encoded = [
        (
            list(zip(document.ids, [1] * len(document.ids) if document.weights is None else document.weights)),
            document.ends_document,
        )
        for document in encode.encode_batch(batch, tokenizer)
    ]
    assert encoded == expected
    assert all(
        len(document.ids) == len(document.weights)
        for document in encode.encode_batch(batch, tokenizer)
        if document.weights is not None
    )


def test_text_with_weight_1_has_no_weights(tokenizer: TextTokenizer):
    (document,) = encode.encode_batch([Example((Segment(TEXT),), 0)], tokenizer)
    assert document.weights is None
