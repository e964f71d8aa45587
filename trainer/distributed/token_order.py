"""The order of the columns of a batch on a mesh that splits the tokens of a row."""

from __future__ import annotations

import numpy as np
from jax import Array

from trainer.distributed.sharding import ShardingContext
from trainer.models.chunk_sizes import RING_BLOCKS, check_ring_blocks


def token_order(length: int, sharding: ShardingContext) -> np.ndarray:
    """Return the position of the token in each column of a row; without a split of tokens, 0 to `length` - 1.

    Of 2n equal blocks of a row, shard i of n holds blocks i and 2n - 1 - i. Under a causal mask all shards then have
    equally many visible keys, for their own queries and for those of any other shard.

    Args:
        length: Tokens of a row.
        sharding: The device mesh.

    Returns:
        int32 [length].

    Raises:
        UsageError: The mesh does not divide the row into such blocks.
    """
    positions, num_shards = np.arange(length, dtype=np.int32), sharding.sequence_parallel_size
    if num_shards == 1:
        return positions
    check_ring_blocks(length, num_shards)
    blocks = positions.reshape(RING_BLOCKS * num_shards, -1)
    first, second = blocks[:num_shards], blocks[num_shards:][::-1]
    return np.stack([first, second], axis=1).reshape(-1)


def order_tokens(x: Array, sharding: ShardingContext) -> Array:
    """Return an array [T, ...] of positions 0 to T - 1 in the order of columns."""
    return x if sharding.sequence_parallel_size == 1 else x[token_order(len(x), sharding)]
