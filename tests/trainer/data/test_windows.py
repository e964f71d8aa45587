"""Windows with a stride: each token is a target once, as in the perplexity of transformers' documentation."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.data.packing import PackedDataset, with_stride
from trainer.data.store import MappedTokens


def make_tokens(count: int, length: int, weights: np.ndarray | None = None) -> MappedTokens:
    ids = np.arange(100, 100 + count).astype("<u2")
    return MappedTokens(ids, np.array([count], "<u8"), "identity", length, weights)


def documented_targets(count: int, length: int, stride: int) -> list[list[int]]:
    """Return the targets of each window by the loop of transformers' page "Perplexity of fixed-length models"."""
    windows: list[list[int]] = []
    previous_end = 0
    for begin in range(0, count, stride):
        end = min(begin + length, count)
        # The first token of a window has no token before it: the model shifts labels by one.
        windows.append(list(range(max(previous_end, begin + 1), end)))
        previous_end = end
        if end == count:
            break
    return windows


@given(st.integers(2, 60), st.integers(2, 12), st.data())
def test_windows_have_the_documented_targets(count: int, length: int, data: st.DataObject):
    stride = data.draw(st.integers(1, length))
    tokens = make_tokens(count, length)
    dataset = with_stride(PackedDataset(tokens, 0, tokens.n_blocks), stride)
    expected = documented_targets(count, length, stride)
    assert dataset.n_rows == len(expected)
    batch = dataset.get_batch(range(dataset.n_rows))
    for row, targets in enumerate(expected):
        mask = batch["weights"][row] > 0
        assert (batch["targets"][row][mask] - 100).tolist() == targets
        begin = row * stride
        end = min(begin + length, count)
        assert (batch["tokens"][row][: end - begin] - 100).tolist() == [*range(begin, end)]


def test_windows_of_the_last_blocks_start_at_their_first_token():
    tokens = make_tokens(23, 4)
    dataset = with_stride(PackedDataset(tokens, first_row=3, n_rows=2), 3)
    batch = dataset.get_batch([0, dataset.n_rows - 1, -1])
    assert batch["tokens"][0].tolist() == [112, 113, 114, 115]
    assert batch["targets"][1][batch["weights"][1] > 0].tolist()[-1] == 122
    assert not batch["tokens"][2].any()


def test_windows_keep_the_weights_of_the_store():
    weights = (np.arange(11) % 2).astype(np.uint8)
    tokens = make_tokens(11, 4, weights)
    dataset = with_stride(PackedDataset(tokens, 0, tokens.n_blocks), 2)
    batch = dataset.get_batch(range(dataset.n_rows))
    targets = np.sort(batch["targets"][batch["weights"] > 0] - 100)
    assert targets.tolist() == [1, 3, 5, 7, 9]


@pytest.mark.parametrize("stride", [None])
def test_dataset_without_a_stride_stays_as_it_is(stride: None):
    tokens = make_tokens(8, 4)
    dataset = PackedDataset(tokens, 0, 2)
    assert with_stride(dataset, stride) is dataset
