"""Tests of the sizes of chunks and blocks."""

from __future__ import annotations

import pytest

from prepcli.models.activation_memory import WHOLE, chunk_length, expert_block_length


@pytest.mark.parametrize(("chunk_size", "expected"), [(WHOLE, 10), (4, 4), (10, 10), (99, 10)])
def test_chunk_length_is_at_most_the_sequence(chunk_size: int, expected: int):
    assert chunk_length(chunk_size, 10) == expected


@pytest.mark.parametrize(
    ("num_tokens", "top_k", "num_experts", "expected"),
    [
        (1, 2, 8, 1),  # a decode step: no expert has more rows than there are tokens
        (9, 2, 8, 9),
        (64, 8, 128, 16),
        (2048, 2, 8, 128),
        (2047, 2, 8, 64),
        (8192, 8, 128, 128),
        (1 << 20, 2, 8, 512),
    ],
)
def test_block_has_a_quarter_of_the_mean_rows(
    num_tokens: int, top_k: int, num_experts: int, expected: int
):
    assert expert_block_length(num_tokens, top_k, num_experts) == expected
