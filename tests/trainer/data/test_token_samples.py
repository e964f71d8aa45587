"""Samples of a token store as text, and their counts: compare with documents counted by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.corpus import encode, make_tokenizer
from tests.trainer.data.test_packing import make_tokens
from trainer.data import token_samples
from trainer.data.sample_text import SamplePart
from trainer.data.store import MappedTokens
from trainer.data.token_samples import count_samples, read_samples
from trainer.data.tokenizer import load_tokenizer

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
