"""The meaning of chunk sizes in recipes, and the sizes that no recipe sets."""

from __future__ import annotations

from prepcli.core.errors import usage_error

# A chunk of all tokens.
WHOLE = -1
# Blocks of a row on each device of a mesh that splits tokens. A tile of attention is within one.
RING_BLOCKS = 2
# Tokens of a chunk of a linear recurrence, as in the kernels of flash-linear-attention.
SCAN_CHUNK_SIZE = 64
# Tokens of a chunk of a selective scan. Each token of a chunk has a state of all channels in memory.
SELECTIVE_SCAN_CHUNK_SIZE = 32


def chunk_length(chunk_size: int, length: int) -> int:
    """Return how many tokens a chunk has if a sequence has `length` tokens."""
    if chunk_size == WHOLE:
        return length
    return min(chunk_size, length)


def check_ring_blocks(length: int, num_shards: int) -> None:
    """Raise UsageError if a row of `length` tokens cannot be cut into RING_BLOCKS equal blocks per shard."""
    num_blocks = RING_BLOCKS * num_shards
    if num_shards > 1 and length % num_blocks:
        what = f"{length} tokens cannot be split over sp {num_shards}"
        why = f"each device holds {RING_BLOCKS} equal blocks: {length} mod {num_blocks} = {length % num_blocks}"
        raise usage_error(what, why, f"use a multiple of {num_blocks} tokens, or a mesh without sp")


def expert_block_length(num_tokens: int, top_k: int, num_experts: int) -> int:
    """Return the rows that an expert of an MoE layer computes together.

    The last block of an expert is half empty on average, and each block reads the expert's
    matrices. A quarter of the average number of rows, rounded down to a power of two from 16 to
    512, keeps both costs small.

    Args:
        num_tokens: Tokens of the device.
        top_k: Experts per token.
        num_experts: Experts of the layer.
    """
    # E.g. 4096 tokens, top 2 of 8 experts: 1024 rows per expert on average, a quarter is 256 = 2^8.
    quarter = num_tokens * top_k // (4 * num_experts)
    return min(num_tokens, 1 << max(4, min(9, quarter.bit_length() - 1)))
