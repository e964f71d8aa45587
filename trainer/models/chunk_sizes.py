"""The meaning of chunk sizes in recipes, and the sizes that no recipe sets."""

from __future__ import annotations

WHOLE = -1  # a chunk of all tokens
RING_BLOCKS = 2  # blocks of a row on each device of a mesh that splits tokens; a tile of attention lies in one


def chunk_length(chunk_size: int, length: int) -> int:
    """Return the tokens of a chunk of a sequence of `length` tokens."""
    return length if chunk_size == WHOLE else min(chunk_size, length)


def expert_block_length(num_tokens: int, top_k: int, num_experts: int) -> int:
    """Return the rows that an expert of an MoE layer computes together.

    The last block of an expert is half empty on average, and each block reads the expert's matrices: a quarter of the
    average number of rows, rounded down to a power of two from 16 to 512, keeps both costs small.

    Args:
        num_tokens: Tokens of the device.
        top_k: Experts per token.
        num_experts: Experts of the layer.
    """
    quarter = num_tokens * top_k // (4 * num_experts)
    return min(num_tokens, 1 << max(4, min(9, quarter.bit_length() - 1)))
