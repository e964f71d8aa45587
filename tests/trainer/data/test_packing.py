"""Blocks are what joining all documents and cutting them by hand gives."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.data.packing import PackedDataset, split_holdout
from trainer.data.store import MappedTokens
from trainer.models.errors import PrepError


def tokens_of(documents: list[list[int]], seq_length: int, dtype: str = "<u2") -> MappedTokens:
    ids = np.array([token for document in documents for token in document], dtype)
    return MappedTokens(ids, np.cumsum([len(document) for document in documents]).astype("<u8"), "x", seq_length)


def blocks_of(documents: list[list[int]], seq_length: int) -> PackedDataset:
    tokens = tokens_of(documents, seq_length)
    return PackedDataset(tokens, 0, tokens.n_blocks)


def naive(documents: list[list[int]], seq_length: int) -> list[list[int]]:
    """Token by token: a block whenever one is full."""
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
def test_grouping_is_that_of_the_naive_version(documents: list[list[int]], seq_length: int):
    blocks, held = split_holdout(blocks_of(documents, seq_length), 0)
    wanted = naive(documents, seq_length)
    assert held is None
    assert blocks.n_rows == len(wanted)
    assert blocks.get_batch(range(blocks.n_rows))["tokens"].tolist() == wanted


@given(st.integers(2, 200), st.floats(0.01, 0.99))
def test_a_split_keeps_every_block_in_order(n: int, holdout: float):
    blocks = blocks_of([list(range(n * 3 + 1))], 3)
    if not 0 < round(n * holdout) < n:
        with pytest.raises(PrepError):
            split_holdout(blocks, holdout)
        return
    train, held = split_holdout(blocks, holdout)
    assert held is not None
    assert held.n_rows == round(n * holdout)
    both = [row for part in (train, held) for row in part.get_batch(range(part.n_rows))["tokens"].tolist()]
    assert both == naive([list(range(n * 3))], 3)


@pytest.mark.parametrize(
    ("holdout", "what", "why"),
    [
        (0.1, "no sequence is left to evaluate on", "holdout 0.1 of 4 sequences is 0"),
        (0.9, "no sequence is left to train on", "holdout 0.9 of 4 sequences is 4"),
    ],
)
def test_a_split_that_leaves_one_side_empty(holdout: float, what: str, why: str):
    with pytest.raises(PrepError) as caught:
        split_holdout(blocks_of([[1] * 8], 2), holdout)
    assert (caught.value.what, caught.value.why) == (what, why)


@pytest.mark.parametrize("dtype", ["<u2", "<u4"])
def test_tokens_of_any_rows_are_int32(dtype: str):
    blocks = PackedDataset(tokens_of([[*range(65526, 65536), 9]], 2, dtype), first_row=1, n_rows=4)
    found = blocks.get_batch([3, 0, 3])["tokens"]
    assert found.dtype == np.int32
    assert type(found) is np.ndarray
    assert found.tolist() == [[65534, 65535], [65528, 65529], [65534, 65535]]


@pytest.mark.parametrize("row", [-2, 2])
def test_rows_outside_are_refused(row: int):
    with pytest.raises(IndexError):
        PackedDataset(tokens_of([[1] * 8], 2), first_row=1, n_rows=2).get_batch([0, row])


def test_examples_shift_targets_and_weigh_what_has_one():
    blocks = blocks_of([[1, 2, 3, 4, 5, 6]], 3)
    found = blocks.get_batch([1, -1, 0])
    assert {name: (array.dtype.name, array.tolist()) for name, array in found.items()} == {
        "tokens": ("int32", [[4, 5, 6], [0, 0, 0], [1, 2, 3]]),
        "targets": ("int32", [[5, 6, 0], [0, 0, 0], [2, 3, 0]]),
        "weights": ("float32", [[1, 1, 0], [0, 0, 0], [1, 1, 0]]),
    }


@given(st.integers(2, 6), st.lists(st.integers(-1, 4), max_size=8))
def test_each_weighed_target_is_the_next_token(seq_length: int, rows: list[int]):
    blocks = blocks_of([list(range(5 * seq_length))], seq_length)
    found = blocks.get_batch(rows)
    weighed = found["weights"] == 1
    assert (found["targets"][weighed] == found["tokens"][weighed] + 1).all()
    assert weighed.sum() == (seq_length - 1) * sum(row >= 0 for row in rows)
