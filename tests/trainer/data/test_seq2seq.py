"""Pairs of source and target, and span corruption: truncated and padded rows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from prepcli.core.errors import PrepError
from tests.helpers.corpus import EOS, encode, make_config, make_tokenizer, tokenize_quietly
from tests.trainer.data.test_packing import make_tokens
from trainer.data.order import RowOrder
from trainer.data.packing import split_holdout
from trainer.data.seq2seq import (
    SpanCorruptionDataset,
    SpanCorruptionTokenIds,
    noise_mask,
    sentinel_ids,
    seq2seq_dataset,
)
from trainer.data.store import MappedTokens
from trainer.data.tokenize import tokenize_files
from trainer.data.tokenizer import load_tokenizer
from trainer.recipe.data_table import SpanSizes, span_sizes

# Seq2seq datasets: compare with truncating and padding each text by hand.

TEXTS = st.lists(st.integers(2, 60000), max_size=9)


PAIRS = st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=8)


START, END = 7, 1


def truncate(ids: list[int], max_length: int) -> list[int]:
    """Return ids cut to `max_length`, with END last if they were cut."""
    return ids if len(ids) <= max_length else [*ids[: max_length - 1], END]


@given(PAIRS, st.integers(2, 9), st.integers(2, 9), st.data())
def test_seq2seq_dataset_matches_reference(
    pairs: list[tuple[list[int], list[int]]],
    source_length: int,
    seq_length: int,
    data: st.DataObject,
):
    tokens = make_tokens([text for pair in pairs for text in pair], seq_length)
    dataset = seq2seq_dataset(tokens, source_length, decoder_start_id=START, eos_id=END)
    assert (dataset.n_rows, dataset.seq_length) == (len(pairs), seq_length)
    rows = data.draw(st.lists(st.integers(-1, len(pairs) - 1), max_size=5))
    batch = dataset.get_batch(rows)
    assert {name: array.dtype for name, array in batch.items()} == {
        name: dtype for name, (_, dtype) in dataset.columns.items()
    }
    assert {name: array.shape for name, array in batch.items()} == {
        name: (len(rows), length) for name, (length, _) in dataset.columns.items()
    }
    for i, row in enumerate(rows):
        source, target = ([], []) if row < 0 else pairs[row]
        source, target = truncate(source, source_length), truncate(target, seq_length)
        is_present = batch["present"][i]
        assert batch["source"][i][is_present].tolist() == source
        assert is_present.tolist() == [column < len(source) for column in range(source_length)]
        has_target = batch["weights"][i] == 1
        assert batch["targets"][i][has_target].tolist() == target
        assert has_target.tolist() == [column < len(target) for column in range(seq_length)]
        assert batch["tokens"][i][has_target].tolist() == [START, *target][: len(target)]
        assert not batch["source"][i][~is_present].any()
        assert not batch["tokens"][i][~has_target].any()


def test_seq2seq_dataset_truncates_without_eos():
    tokens = make_tokens([[3, 4, 5], [6, 7, 8, 9]], 2)
    batch = seq2seq_dataset(tokens, 2, decoder_start_id=START, eos_id=None).get_batch([0])
    assert (batch["source"].tolist(), batch["targets"].tolist()) == ([[3, 4]], [[6, 7]])


def test_seq2seq_dataset_has_the_weights_of_targets():
    tokens = replace(
        make_tokens([[3], [6, 7], [4, 5], [8, 9, 2]], 2),
        weight_codes=np.array([1, 0, 1, 1, 1, 1, 0, 0], np.uint8),
    )
    batch = seq2seq_dataset(tokens, 2, decoder_start_id=START, eos_id=None).get_batch([1, -1, 0])
    assert batch["weights"].tolist() == [[1, 0], [0, 0], [0, 1]]


def test_target_ids_are_whole_and_have_loss():
    tokens = make_tokens([[3], [6, 7, 8], [4, 5], [8, 9, 2]], 2)
    dataset = seq2seq_dataset(tokens, 2, decoder_start_id=START, eos_id=END)
    assert [dataset.target_ids(row).tolist() for row in (0, 1)] == [[6, 7, 8], [8, 9, 2]]
    weighted = replace(
        dataset,
        tokens=replace(tokens, weight_codes=np.array([1, 0, 1, 1, 1, 1, 1, 0, 1], np.uint8)),
    )
    assert [weighted.target_ids(row).tolist() for row in (0, 1)] == [[7, 8], [8, 2]]


def test_split_holdout_takes_last_pairs():
    tokens = make_tokens([[n] for n in range(20)], 3)
    train, evaluation = split_holdout(
        seq2seq_dataset(tokens, 2, decoder_start_id=START, eos_id=END), 0.2
    )
    assert evaluation is not None
    assert (train.n_rows, evaluation.n_rows) == (8, 2)
    assert evaluation.get_batch([0, 1])["source"].tolist() == [[16, 0], [18, 0]]
    with pytest.raises(IndexError):
        train.get_batch([8])


def write_pairs(folder: Path) -> Path:
    """Write two pairs as JSON lines; return the file."""
    lines = ('{"t": "the hat", "s": "that", "n": 1}', "", '{"s": "hat", "t": ""}')
    (folder / "a.jsonl").write_text("\n".join(lines))
    return folder / "a.jsonl"


def test_tokenize_files_reads_pairs(tmp_path: Path):
    path = write_pairs(tmp_path)
    config = make_config(
        tmp_path,
        path,
        type="json",
        fields="[t], [s], s",
        source_length=4,
        has_encoder=True,
        source_prefix="do: ",
    )
    notes: list[str] = []
    tokens = tokenize_files(config, progress=lambda *counts: None, note=notes.append)
    texts = ["do: the hat that", "that", "do:  hat", "hat"]
    ids = [[*encode(config.tokenizer, text), EOS] for text in texts]
    assert tokens.ids[:].tolist() == [token_id for document in ids for token_id in document]
    assert np.diff(tokens.ends[:], prepend=0).tolist() == [len(document) for document in ids]
    n_truncated = sum(len(document) > 4 for document in ids[::2])
    assert f"in 2 pairs: {n_truncated} source" in notes[-1]


@pytest.mark.parametrize(
    ("line", "what", "hint"),
    [
        ('{"t": "a"}', "a.jsonl:1: no column `s`", "`--set data.fields='[SOURCE], TARGET'`"),
        ('{"t": 3, "s": "a"}', "a.jsonl:1: column `t` is not text", "fix or remove the line"),
        ('["t"]', "a.jsonl, record 1: not an object but a string", "fix or remove the record"),
        ('{"t": "a", "s": "b"}\n["t"]', "a.jsonl:2: not an object but a list", "fix or remove"),
        ("\n\n", "the data has no source-target pair", ""),
    ],
)
def test_tokenize_files_rejects_invalid_pairs(tmp_path: Path, line: str, what: str, hint: str):
    (tmp_path / "a.jsonl").write_text(line)
    config = make_config(
        tmp_path,
        tmp_path / "a.jsonl",
        type="json",
        fields="[t], s",
        source_length=4,
        has_encoder=True,
    )
    with pytest.raises(PrepError) as caught:
        tokenize_quietly(config)
    assert caught.value.what.endswith(what)
    assert hint in caught.value.hint


# Tests of span corruption: sizes are those of T5, sources and targets together are the text.

SENTINELS, SPAN_EOS, SPAN_START = np.arange(900, 1000, dtype=np.int32)[::-1], 1, 0


SOURCE_LENGTHS, DENSITIES, MEANS = (
    st.integers(40, 120),
    st.floats(0.1, 0.5, exclude_max=True),
    st.floats(1.5, 6),
)


def reference_lengths(
    inputs_length: int, noise_density: float, mean_noise_span_length: float
) -> tuple[int, int]:
    """Return tokens and target tokens of a block, as `random_spans_helper` of t5/data/preprocessors.py does."""

    def lengths(tokens_length: int) -> tuple[int, int]:
        num_noise_tokens = round(tokens_length * noise_density)
        num_noise_spans = round(num_noise_tokens / mean_noise_span_length)
        return (
            tokens_length - num_noise_tokens + num_noise_spans + 1,
            num_noise_tokens + num_noise_spans + 1,
        )

    tokens_length = inputs_length
    while lengths(tokens_length + 1)[0] <= inputs_length:
        tokens_length += 1
    inputs_length, targets_length = lengths(tokens_length)
    if noise_density == 0.5 and targets_length > inputs_length:
        tokens_length, targets_length = tokens_length - 1, targets_length - 1
    return tokens_length, targets_length


@pytest.mark.parametrize(
    ("source_length", "density", "mean", "expected"),
    [(512, 0.15, 3.0, (568, 114)), (1024, 0.15, 3.0, (1137, 229)), (512, 0.5, 3.0, (766, 512))],
)
def test_span_sizes_match_t5(
    source_length: int, density: float, mean: float, expected: tuple[int, int]
):
    assert reference_lengths(source_length, density, mean) == expected
    sizes = span_sizes(source_length, noise_density=density, mean_span_length=mean)
    assert (sizes.block_length, sizes.target_length) == expected


@given(SOURCE_LENGTHS, DENSITIES, MEANS)
def test_span_sizes_match_the_reference_formula(source_length: int, density: float, mean: float):
    sizes = span_sizes(source_length, noise_density=density, mean_span_length=mean)
    assert (sizes.block_length, sizes.target_length) == reference_lengths(
        source_length, density, mean
    )
    assert sizes.source_length <= source_length


def make_dataset(sizes: SpanSizes, n_rows: int, seed: int = 3) -> SpanCorruptionDataset:
    """Return the dataset of random blocks."""
    ids = np.random.default_rng(0).integers(2, 900, n_rows * sizes.block_length + 1).astype("<u2")
    tokens = MappedTokens(ids, np.array([ids.size], "<u8"), "x", sizes.block_length)
    room = (sizes.source_length + 2, sizes.target_length + 3)
    special_ids = SpanCorruptionTokenIds(SENTINELS, eos=SPAN_EOS, decoder_start=SPAN_START)
    return SpanCorruptionDataset(
        tokens, sizes, special_ids, *room, seed=seed, first_row=0, n_rows=tokens.n_blocks
    )


def spans_of(ids: list[int]) -> list[list[int]]:
    """Split ids at the sentinels, which must count up from the first; the part before the first is the first."""
    spans: list[list[int]] = [[]]
    for token in ids:
        if token >= 900:
            assert token == SENTINELS[len(spans) - 1]
            spans.append([])
        else:
            spans[-1].append(token)
    return spans


@given(SOURCE_LENGTHS, DENSITIES, MEANS, st.integers(0, 3), st.integers(0, 9))
def test_source_and_target_together_are_the_text(
    source_length: int, density: float, mean: float, epoch: int, seed: int
):
    sizes = span_sizes(source_length, noise_density=density, mean_span_length=mean)
    dataset = make_dataset(sizes, 3, seed)
    batch = dataset.get_batch([2, -1, 0], [epoch] * 3)
    assert {name: (array.shape[1], array.dtype) for name, array in batch.items()} == dict(
        dataset.columns
    )
    assert not any(array[1].any() for array in batch.values())
    for i, row in ((0, 2), (2, 0)):
        source, target = (
            batch["source"][i][batch["present"][i]].tolist(),
            batch["targets"][i].tolist(),
        )
        n_targets = int(batch["weights"][i].sum())
        assert (len(source), n_targets) == (sizes.source_length, sizes.target_length)
        assert batch["tokens"][i].tolist() == [
            SPAN_START,
            *target[: n_targets - 1],
            *[0] * (len(target) - n_targets),
        ]
        assert (source[-1], target[n_targets - 1]) == (SPAN_EOS, SPAN_EOS)
        others, (empty, *noise) = spans_of(source[:-1]), spans_of(target[: n_targets - 1])
        assert (empty, others[-1], len(others), len(noise)) == (
            [],
            [],
            sizes.n_spans + 1,
            sizes.n_spans,
        )
        assert all([*others[:-1], *noise])
        text = [token for pair in zip(others, noise) for span in pair for token in span]
        assert (
            text
            == dataset.tokens.ids[
                row * sizes.block_length : (row + 1) * sizes.block_length
            ].tolist()
        )


def test_spans_depend_on_seed_epoch_and_row_alone():
    sizes = span_sizes(64, noise_density=0.15, mean_span_length=3.0)
    dataset = make_dataset(sizes, 8)
    whole, parts = (
        dataset.get_batch([5, 5, 6], [0, 1, 0]),
        [dataset.get_batch([5], [e]) for e in (0, 1)],
    )
    for i, part in enumerate(parts):
        assert all((part[name][0] == whole[name][i]).all() for name in part)
    assert (whole["source"][0] != whole["source"][1]).any()
    assert (make_dataset(sizes, 8, seed=4).get_batch([5])["source"] != whole["source"][0]).any()
    assert (dataset.get_batch([5])["source"] == whole["source"][0]).all()
    _, evaluation = split_holdout(dataset, 0.5)
    assert evaluation is not None
    assert (evaluation.get_batch([1])["source"] == whole["source"][0]).all()


def test_all_tokens_are_noise_equally_often_but_near_the_ends():
    sizes = SpanSizes(40, n_noise=10, n_spans=4)
    counts = np.sum([noise_mask(sizes, str(i)) for i in range(2000)], axis=0) / 2000
    assert counts[0] == 0
    assert abs(counts[8:32] - 0.25).max() < 0.08


def test_epochs_of_a_step_match_its_rows():
    order = RowOrder(n_rows=5, batch_size=4, seed=0, shuffle=False)
    assert [order.epochs(step).tolist() for step in range(3)] == [
        [0] * 4,
        [0, 1, 1, 1],
        [1, 1, 2, 2],
    ]


def test_sentinels_must_be_in_the_tokenizer(tmp_path: Path):
    path = make_tokenizer(tmp_path / "tokenizer.json")
    with pytest.raises(PrepError, match=r"has no token <extra_id_0>"):
        sentinel_ids(load_tokenizer(path), 2, 300)
    library = Tokenizer.from_file(str(path))
    library.add_special_tokens([f"<extra_id_{i}>" for i in (1, 0)])
    library.save(str(path))
    n = library.get_vocab_size()
    assert sentinel_ids(load_tokenizer(path), 2, 400).tolist() == [n - 1, n - 2]
    with pytest.raises(PrepError, match=r"is not in the model's vocabulary"):
        sentinel_ids(load_tokenizer(path), 2, n - 1)
