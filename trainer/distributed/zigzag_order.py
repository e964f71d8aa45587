"""The order of the columns of a batch on a mesh that splits the tokens of a row."""

from __future__ import annotations

import numpy as np
from jax import Array

from prepcli.models.activation_memory import RING_BLOCKS, check_ring_blocks
from trainer.distributed.sharding import ShardingContext


def zigzag_order(length: int, sharding: ShardingContext) -> np.ndarray:
    """Return the position of the token in each column of a row.

    Without a split of tokens the order is 0 to `length` - 1. Otherwise the row is cut into 2n equal
    blocks for n shards, and shard i holds blocks i and 2n - 1 - i (zigzag ring attention).

    Args:
        length: Tokens of a row.
        sharding: The device mesh.

    Returns:
        int32 [length].

    Raises:
        UsageError: The mesh does not divide the row into such blocks.
    """
    positions = np.arange(length, dtype=np.int32)
    num_shards = sharding.sequence_parallel_size
    if num_shards == 1:
        return positions
    check_ring_blocks(length, num_shards)
    # Under a causal mask block b sees b earlier blocks, so consecutive blocks would leave shard 0
    # almost idle. A pair (i, 2n - 1 - i) sees 2n - 1 earlier blocks for every i.
    # Example: 8 tokens on n = 2 shards are the blocks [0 1] [2 3] [4 5] [6 7]. Shard 0 holds blocks
    # 0 and 3, shard 1 holds blocks 1 and 2: the columns are 0 1 6 7 | 2 3 4 5.
    blocks = positions.reshape(RING_BLOCKS * num_shards, -1)
    first = blocks[:num_shards]
    last = blocks[num_shards:][::-1]
    return np.stack([first, last], axis=1).reshape(-1)


def order_tokens(x: Array, sharding: ShardingContext) -> Array:
    """Reorder an array [T, ...] of positions 0 to T - 1 to the order of columns."""
    if sharding.sequence_parallel_size == 1:
        return x
    return x[zigzag_order(len(x), sharding)]
