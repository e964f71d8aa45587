"""How a step bounds the memory of activations: chunks of tokens, rematerialization and offload. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Literal, get_args

from prepcli.core.errors import usage_error
from prepcli.core.formatting import did_you_mean

# A chunk of all tokens.
WHOLE = -1


# Attention tile of a kernel that keeps scores on the chip.
NO_SCORES = (0, 0)


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
    """
    # E.g. 4096 tokens, top 2 of 8 experts: 1024 rows per expert on average, a quarter is 256 = 2^8.
    quarter = num_tokens * top_k // (4 * num_experts)
    return min(num_tokens, 1 << max(4, min(9, quarter.bit_length() - 1)))


# Rematerialization policies and offload: which activations a layer saves for its backward pass, and where.

PolicyName = Literal[
    "none",
    "nothing_saveable",
    "everything_saveable",
    "dots_saveable",
    "checkpoint_dots",
    "dots_with_no_batch_dims_saveable",
    "checkpoint_dots_with_no_batch_dims",
]
ActivationName = Literal["q", "k", "v", "attention_output", "o", "mlp_hidden", "mlp_output"]
Offload = Literal["none", "residuals"]
# A PolicyName, or the ActivationNames to save in addition to the input of each layer.
RematPolicy = str | tuple[str, ...]

REMAT_NONE = "none"
SAVES_INPUT = "nothing_saveable"
# Names of jax.checkpoint_policies.
REMAT_POLICIES = tuple(name for name in get_args(PolicyName) if name != REMAT_NONE)
ACTIVATION_NAMES: tuple[str, ...] = get_args(ActivationName)
OFFLOAD_NONE = "none"

SAVES_ALL = (REMAT_NONE, "everything_saveable")
SAVES_DOTS = ("dots_saveable", "checkpoint_dots")
# Policies that save attention scores. With blockwise attention they save the scores of all tiles.
SAVES_SCORES = ("everything_saveable", *SAVES_DOTS)
SAVES_WEIGHT_DOTS = ("dots_with_no_batch_dims_saveable", "checkpoint_dots_with_no_batch_dims")


def check_remat(
    policy: RematPolicy, offload: str = OFFLOAD_NONE, *, ffn_chunk_size: int = WHOLE
) -> None:
    """Check a rematerialization policy, alone and with the options that it depends on.

    Raises:
        UsageError: The policy or one of its activations is unknown, or an option conflicts with it.
    """
    _check_names(policy)
    what = f"`model.remat_policy` is {json.dumps(policy)}"
    hint = f'`model.remat_policy = "{SAVES_INPUT}"`'
    if ffn_chunk_size != WHOLE and "mlp_hidden" in _listed_activations(policy):
        what = f"{what}, and `model.ffn_chunk_size` {ffn_chunk_size}"
        raise usage_error(
            what,
            "mlp_hidden exists for one chunk of tokens at a time",
            "`model.ffn_chunk_size = -1`",
        )
    if offload != OFFLOAD_NONE and isinstance(policy, str) and policy != SAVES_INPUT:
        what = f'`model.offload` is "{offload}", and `model.remat_policy` {json.dumps(policy)}'
        raise usage_error(what, "it goes with nothing_saveable or a list of activations", hint)


def _check_names(policy: RematPolicy) -> None:
    """Raise UsageError if a policy or an activation is unknown."""
    if isinstance(policy, str) and policy not in (REMAT_NONE, *REMAT_POLICIES):
        supported = f"{', '.join((REMAT_NONE, *REMAT_POLICIES))}, or a list of {', '.join(ACTIVATION_NAMES)}"
        what = f"unknown `model.remat_policy` {policy!r:.60}"
        raise usage_error(what, f"supported: {supported}", '`model.remat_policy = "none"`')
    for name in _listed_activations(policy):
        if name not in ACTIVATION_NAMES:
            what = f"unknown activation {name!r:.60} in `model.remat_policy`"
            raise usage_error(
                what, f"known: {', '.join(ACTIVATION_NAMES)}", did_you_mean(name, ACTIVATION_NAMES)
            )


def _listed_activations(policy: RematPolicy) -> Sequence[str]:
    if isinstance(policy, str):
        return ()
    return policy


def saved_activations(policy: RematPolicy, *, has_experts: bool) -> frozenset[str]:
    """Return the names of the activations that a policy saves. The caller handles policies that save all activations.

    MoE layers have matrix products that no policy of `jax.checkpoint_policies` saves.
    """
    if not isinstance(policy, str):
        return frozenset(policy)
    if policy not in SAVES_DOTS + SAVES_WEIGHT_DOTS:
        return frozenset()
    excluded = {"mlp_hidden", "mlp_output"} if has_experts else set[str]()
    # The products of scores and values have batch dims (rows and heads), so that policies without
    # batch dims do not save them. The projections have none.
    excluded |= set() if policy in SAVES_DOTS else {"attention_output"}
    return frozenset(ACTIVATION_NAMES) - excluded
