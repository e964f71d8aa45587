"""Tests of chunks of a token axis that a mesh splits into shards of consecutive columns."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from trainer.nn.token_chunks import join_chunks, pad_tokens, split_chunks, unpad_tokens

X = jnp.asarray(np.arange(12, dtype=np.int32).reshape(1, 12))


def test_chunks_have_tokens_of_every_shard():
    chunks = split_chunks(X, 2, num_shards=2)
    assert chunks.tolist() == [[[0, 1, 6, 7]], [[2, 3, 8, 9]], [[4, 5, 10, 11]]]


def test_chunks_of_one_shard_are_consecutive():
    assert split_chunks(X, 4).tolist() == [[[0, 1, 2, 3]], [[4, 5, 6, 7]], [[8, 9, 10, 11]]]


@pytest.mark.parametrize(("chunk_size", "num_shards"), [(1, 1), (4, 1), (3, 2), (2, 3)])
def test_join_chunks_inverts_split_chunks(chunk_size: int, num_shards: int):
    x = jnp.arange(2 * 12 * 3).reshape(2, 12, 3)
    chunks = split_chunks(x, chunk_size, num_shards=num_shards)
    np.testing.assert_array_equal(join_chunks(chunks, num_shards=num_shards), x)


def test_padding_follows_the_tokens_of_each_shard():
    padded = pad_tokens(X, 1, -1, num_shards=3)
    assert padded.tolist() == [[0, 1, 2, 3, -1, 4, 5, 6, 7, -1, 8, 9, 10, 11, -1]]
    np.testing.assert_array_equal(unpad_tokens(padded, 1, num_shards=3), X)


def test_no_padding_returns_the_array():
    assert pad_tokens(X, 0) is X
    assert unpad_tokens(X, 0, num_shards=3) is X
