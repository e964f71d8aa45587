"""The Pallas kernel of splash attention and its mask. Importing this module loads Pallas.

Axes: T tokens, H query heads, K key and value heads, E head width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from jax import Array
from jax.experimental.pallas.ops.tpu import splash_attention as splash

from prepcli.models.architecture import FULL_ATTENTION, NO_SOFTCAP

# A vector register of a TPU has 128 lanes, and the length of a block is a multiple of it.
LANES = 128
# The largest block, in tokens.
MAX_BLOCK = 512
BLOCK_FIELDS = ("block_q", "block_kv", "block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq")

RowKernel = Callable[[Array, Array, Array, Array | None], Array]


class BlockMask(splash.LocalMask):
    """A causal mask with an optional window and a shortcut for uniform blocks.

    The kernel computes the mask of a block itself. It reads this mask only to find out whether any
    or all keys of a block are visible. Without the shortcut that takes minutes for 131,072 tokens.
    """

    def __init__(self, length: int, window: int) -> None:
        num_earlier = None if window == FULL_ATTENTION else window - 1
        super().__init__((length, length), (num_earlier, 0), 0)

    def __getitem__(self, idx: tuple[slice, slice]) -> np.ndarray:
        """Return the mask of a block, as an array of one element if all or no keys are visible."""
        queries, keys = idx
        # The distances between a query and a key of the block are from `nearest` to `farthest`,
        # e.g. queries 4 to 7 and keys 0 to 3 have distances from 1 to 7.
        nearest = queries.start - (keys.stop - 1)
        farthest = queries.stop - 1 - keys.start
        num_earlier = farthest if self.window_size[0] is None else self.window_size[0]
        if farthest < 0 or nearest > num_earlier:
            return np.zeros((1, 1), bool)
        if nearest >= 0 and farthest <= num_earlier:
            return np.ones((1, 1), bool)
        return super().__getitem__(idx)


def make_row_kernel(
    length: int, *, num_heads: int, window: int, softcap: float, interpret: bool
) -> RowKernel:
    """Return the kernel of one row.

    Args:
        length: Number of tokens, a multiple of LANES.
        num_heads: Number of query heads.
        window: Number of positions that a query attends to, or `FULL_ATTENTION`.
        softcap: Bound of the scores, or `NO_SOFTCAP`.
        interpret: Whether to run the kernel's operations one by one on any device.

    Returns:
        A function of queries [H, T, E], keys and values [K, T, E], and segment ids [T] or None.
    """
    kernel: Any = splash.make_splash_mha(
        splash.MultiHeadMask([BlockMask(length, window)] * num_heads),
        block_sizes=splash.BlockSizes(
            **dict.fromkeys(
                BLOCK_FIELDS,
                next(size for size in range(MAX_BLOCK, 0, -LANES) if length % size == 0),
            )
        ),
        head_shards=1,
        q_seq_shards=1,
        attn_logits_soft_cap=None if softcap == NO_SOFTCAP else softcap,
        interpret=interpret,
    )

    def attend_row(q: Array, k: Array, v: Array, segment_ids: Array | None) -> Array:
        return kernel(
            q, k, v, None if segment_ids is None else splash.SegmentIds(segment_ids, segment_ids)
        )

    return attend_row
