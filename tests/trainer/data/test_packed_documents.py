"""Tests of batches of whole documents: no target, segment or position crosses a document."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.trainer.data.test_packing import make_tokens
from trainer.data.packing import DocumentDataset, document_dataset, split_holdout

DOCUMENTS = st.lists(st.lists(st.integers(1, 60000), max_size=15), min_size=1, max_size=15).filter(
    any
)
PACKINGS = st.sampled_from(["documents", "none"])


def make_dataset(
    documents: list[list[int]], seq_length: int, packing: str, seed: int = 0
) -> DocumentDataset:
    """Return all rows of documents, with random loss weights."""
    tokens = make_tokens(documents, seq_length)
    weights = np.random.default_rng(seed).integers(0, 2, tokens.n_tokens).astype(np.uint8)
    return document_dataset(replace(tokens, weight_codes=weights), packing)


def expected_pieces(dataset: DocumentDataset) -> list[list[tuple[int, int, int]]]:
    """Return token, target and weight of the tokens of each piece of a document, from the store."""
    tokens, pieces, low = dataset.tokens, [], 0
    assert tokens.weight_codes is not None
    for end in tokens.ends[:].tolist():
        for start in range(low, end, dataset.seq_length):
            stop = min(end, start + dataset.seq_length)
            ids, weights = tokens.ids[start:stop].tolist(), tokens.weight_codes[start:stop].tolist()
            pieces.append([*zip(ids, [*ids[1:], 0], [*weights[1:], 0])])
        low = end
    return pieces


@given(DOCUMENTS, st.integers(2, 9), PACKINGS)
def test_batches_have_each_piece_once(documents: list[list[int]], seq_length: int, packing: str):
    dataset = make_dataset(documents, seq_length, packing)
    batch = dataset.get_batch(range(dataset.n_rows))
    assert {name: (array.shape, array.dtype) for name, array in batch.items()} == {
        name: ((dataset.n_rows, length), dtype) for name, (length, dtype) in dataset.columns.items()
    }
    segment_ids = batch.get("segment_ids", (batch["tokens"] > 0).astype(np.int32))
    pieces = []
    for row in range(dataset.n_rows):
        for segment in range(1, segment_ids[row].max() + 1):
            (columns,) = np.nonzero(segment_ids[row] == segment)
            assert (np.diff(columns) == 1).all()
            if "positions" in batch:
                assert batch["positions"][row, columns].tolist() == [*range(len(columns))]
            pieces.append(
                [
                    *zip(
                        *(
                            batch[name][row, columns].tolist()
                            for name in ("tokens", "targets", "weights")
                        )
                    )
                ]
            )
    assert sorted(pieces) == sorted(expected_pieces(dataset))
    assert not any(array[segment_ids == 0].any() for array in batch.values())


@given(DOCUMENTS, st.integers(2, 9), PACKINGS, st.data())
def test_rows_do_not_depend_on_the_batch(
    documents: list[list[int]], seq_length: int, packing: str, data: st.DataObject
):
    dataset, again = (make_dataset(documents, seq_length, packing) for _ in range(2))
    rows = data.draw(st.lists(st.integers(-1, dataset.n_rows - 1), max_size=5))
    batch = dataset.get_batch(rows)
    for i, row in enumerate(rows):
        for name, array in again.get_batch([row]).items():
            np.testing.assert_array_equal(batch[name][i], array[0])
    with pytest.raises(IndexError):
        dataset.get_batch([dataset.n_rows])


def test_first_input_replaces_the_first_token_of_each_piece():
    tokens = make_tokens([[1, 2, 3, 4, 5], [6], [7, 8]], 3)
    batch = document_dataset(tokens, "documents", first_input=9).get_batch(range(3))
    assert batch["tokens"].tolist() == [[9, 2, 3], [9, 5, 0], [9, 9, 8]]
    assert batch["targets"].tolist() == [[2, 3, 0], [5, 0, 0], [0, 8, 0]]
    assert batch["segment_ids"].tolist() == [[1, 1, 1], [1, 1, 0], [1, 2, 2]]
    assert batch["weights"].tolist() == [[1, 1, 0], [1, 0, 0], [0, 1, 0]]


def test_split_holdout_takes_the_last_rows():
    dataset = document_dataset(make_tokens([[n] * 3 for n in range(1, 21)], 3), "documents")
    train, evaluation = split_holdout(dataset, 0.2)
    assert evaluation is not None
    assert (train.n_rows, evaluation.n_rows) == (16, 4)
    assert evaluation.get_batch([0])["tokens"].tolist() == [[17, 17, 17]]
