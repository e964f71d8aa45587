"""Packed datasets: compare with concatenating and cutting token by token."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prepcli.core.errors import PrepError
from trainer.data.packing import (
    Arrays,
    ColumnSpecs,
    ConcatenatedDataset,
    PackedDataset,
    RowIndices,
    split_holdout,
)
from trainer.data.store import MappedTokens


def make_tokens(documents: list[list[int]], seq_length: int, dtype: str = "<u2") -> MappedTokens:
    """Return documents as a token store."""
    ids = np.array([token for document in documents for token in document], dtype)
    ends = np.cumsum([len(document) for document in documents]).astype("<u8")
    return MappedTokens(ids=ids, ends=ends, identity="x", seq_length=seq_length)


def make_blocks(documents: list[list[int]], seq_length: int) -> PackedDataset:
    """Return all blocks of documents."""
    tokens = make_tokens(documents, seq_length)
    return PackedDataset(tokens, first_row=0, n_rows=tokens.n_blocks)


def reference_blocks(documents: list[list[int]], seq_length: int) -> list[list[int]]:
    """Return the blocks of documents, filled token by token."""
    blocks, block = [], []
    for document in documents:
        for token in document:
            block.append(token)
            if len(block) == seq_length:
                blocks.append(block)
                block = []
    return blocks


DOCUMENTS = st.lists(st.lists(st.integers(0, 60000), max_size=9), min_size=1, max_size=20)


@given(DOCUMENTS, st.integers(2, 7))
def test_packed_dataset_matches_reference_blocks(documents: list[list[int]], seq_length: int):
    blocks, evaluation = split_holdout(make_blocks(documents, seq_length), 0)
    expected = reference_blocks(documents, seq_length)
    assert evaluation is None
    assert blocks.n_rows == len(expected)
    assert blocks.get_batch(range(blocks.n_rows))["tokens"].tolist() == expected


WEIGHTED = st.lists(st.tuples(st.integers(0, 60000), st.integers(0, 1)), min_size=7, max_size=60)


@given(WEIGHTED, st.integers(2, 7), st.data())
def test_position_has_the_loss_weight_of_its_target(
    stored: list[tuple[int, int]], seq_length: int, data: st.DataObject
):
    ids, weights = zip(*stored)
    tokens = replace(make_tokens([[*ids]], seq_length), weight_codes=np.array(weights, np.uint8))
    rows = data.draw(st.lists(st.integers(-1, tokens.n_blocks - 1), max_size=5))
    batch = PackedDataset(tokens, first_row=0, n_rows=tokens.n_blocks).get_batch(rows)
    assert batch["weights"].dtype == np.float32
    for i, row in enumerate(rows):
        start = row * seq_length
        expected = [0] * seq_length if row < 0 else [*weights[start + 1 : start + seq_length], 0]
        assert batch["weights"][i].tolist() == expected


@given(DOCUMENTS, st.integers(2, 7))
def test_first_input_replaces_the_first_token_of_blocks(
    documents: list[list[int]], seq_length: int
):
    plain = make_blocks(documents, seq_length)
    rows = [-1, *range(plain.n_rows)]
    expected, batch = plain.get_batch(rows), replace(plain, first_input=9).get_batch(rows)
    expected["tokens"][1:, 0] = 9
    assert all((batch[name] == expected[name]).all() for name in expected)


@given(st.integers(2, 200), st.floats(0.01, 0.99))
def test_split_holdout_keeps_blocks_in_order(n: int, holdout: float):
    blocks = make_blocks([list(range(n * 3 + 1))], 3)
    if not 0 < round(n * holdout) < n:
        with pytest.raises(PrepError):
            split_holdout(blocks, holdout)
        return
    train, evaluation = split_holdout(blocks, holdout)
    assert evaluation is not None
    assert evaluation.n_rows == round(n * holdout)
    rows = [
        row
        for part in (train, evaluation)
        for row in part.get_batch(range(part.n_rows))["tokens"].tolist()
    ]
    assert rows == reference_blocks([list(range(n * 3))], 3)


@pytest.mark.parametrize(
    ("holdout", "what", "why"),
    [
        (0.1, "no sequence is left to evaluate on", "holdout 0.1 of 4 sequences is 0"),
        (0.9, "no sequence is left to train on", "holdout 0.9 of 4 sequences is 4"),
    ],
)
def test_split_holdout_rejects_empty_part(holdout: float, what: str, why: str):
    with pytest.raises(PrepError) as caught:
        split_holdout(make_blocks([[1] * 8], 2), holdout)
    assert (caught.value.what, caught.value.why) == (what, why)


@pytest.mark.parametrize("dtype", ["<u2", "<u4"])
def test_packed_dataset_returns_int32_tokens(dtype: str):
    blocks = PackedDataset(
        make_tokens([[*range(65526, 65536), 9]], 2, dtype), first_row=1, n_rows=4
    )
    tokens = blocks.get_batch([3, 0, 3])["tokens"]
    assert tokens.dtype == np.int32
    assert type(tokens) is np.ndarray
    assert tokens.tolist() == [[65534, 65535], [65528, 65529], [65534, 65535]]


@pytest.mark.parametrize("row", [-2, 2])
def test_packed_dataset_rejects_rows_out_of_range(row: int):
    with pytest.raises(IndexError):
        PackedDataset(make_tokens([[1] * 8], 2), first_row=1, n_rows=2).get_batch([0, row])


def test_packed_dataset_shifts_targets_and_weights_them():
    blocks = make_blocks([[1, 2, 3, 4, 5, 6]], 3)
    batch = blocks.get_batch([1, -1, 0])
    assert {name: (array.dtype.name, array.tolist()) for name, array in batch.items()} == {
        "tokens": ("int32", [[4, 5, 6], [0, 0, 0], [1, 2, 3]]),
        "targets": ("int32", [[5, 6, 0], [0, 0, 0], [2, 3, 0]]),
        "weights": ("float32", [[1, 1, 0], [0, 0, 0], [1, 1, 0]]),
    }


@given(st.integers(2, 6), st.lists(st.integers(-1, 4), max_size=8))
def test_packed_dataset_targets_are_next_tokens(seq_length: int, rows: list[int]):
    blocks = make_blocks([list(range(5 * seq_length))], seq_length)
    batch = blocks.get_batch(rows)
    has_target = batch["weights"] == 1
    assert (batch["targets"][has_target] == batch["tokens"][has_target] + 1).all()
    assert has_target.sum() == (seq_length - 1) * sum(row >= 0 for row in rows)


class Numbers:
    """A dataset whose rows are consecutive numbers."""

    first_row, seq_length = 0, 1

    def __init__(self, first: int, n_rows: int) -> None:
        self.first, self.n_rows = first, n_rows

    @property
    def columns(self) -> ColumnSpecs:
        return {"tokens": (1, np.dtype(np.int32))}

    def get_batch(self, rows: RowIndices, epochs: RowIndices | None = None) -> Arrays:
        return {"tokens": np.array([[self.first + row] for row in rows], np.int32)}


def test_concatenated_dataset_has_the_rows_of_its_parts():
    dataset = ConcatenatedDataset({"a": Numbers(100, 3), "b": Numbers(200, 2)})
    assert dataset.n_rows == 5
    assert dataset.get_batch([4, 0, -1, 2, 3])["tokens"].ravel().tolist() == [201, 100, 0, 102, 200]
    with pytest.raises(IndexError):
        dataset.get_batch([5])
