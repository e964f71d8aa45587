"""Tests of span corruption: sizes are those of T5, sources and targets together are the text."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from prepcli.core.errors import PrepError
from tests.helpers.corpus import make_tokenizer
from trainer.data.order import RowOrder
from trainer.data.packing import split_holdout
from trainer.data.seq2seq import (
    SpanCorruptionDataset,
    SpanCorruptionTokenIds,
    noise_mask,
    sentinel_ids,
)
from trainer.data.store import MappedTokens
from trainer.data.tokenizer import load_tokenizer
from trainer.recipe.data_table import SpanSizes, span_sizes

SENTINELS, EOS, START = np.arange(900, 1000, dtype=np.int32)[::-1], 1, 0
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
    special_ids = SpanCorruptionTokenIds(SENTINELS, eos=EOS, decoder_start=START)
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
            START,
            *target[: n_targets - 1],
            *[0] * (len(target) - n_targets),
        ]
        assert (source[-1], target[n_targets - 1]) == (EOS, EOS)
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
