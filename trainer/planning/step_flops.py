"""Floating-point operations of a training step, from shapes alone.

A product of a matrix with N parameters takes 2*N operations per token in the forward pass and 4*N
in the backward pass, or 2*N if the matrix is frozen: it has no gradient. Attention takes 4*H*E per
visible pair of query and key, and 8*H*E in the backward pass (Chowdhery et al. 2022,
https://arxiv.org/abs/2204.02311, appendix B). Embedding lookups, norms, activations, softmax and
the optimizer are not counted. An expert's matrices count for the tokens that it is expected to get.
Adapters (LoRA) count as two matrices each. A recurrent mixer with states [N, P] takes 2*N*P per head and token for
each product with the state: to update it, to read it, and to predict values in the gated delta rule. They count as
attention.

`attention_full` counts all keys of a layer's sliding window, or all keys, as published MFU figures
do. `attention_causal` counts only the visible ones.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from prepcli.models.activation_memory import (
    NO_SCORES,
    SAVES_ALL,
    SAVES_DOTS,
    SAVES_WEIGHT_DOTS,
    chunk_length,
    saved_activations,
)
from prepcli.models.architecture import FULL_ATTENTION
from prepcli.models.param_tree import ParamLeaf
from trainer.planning.layer_memory import LayerStack
from trainer.planning.memory_estimate import layer_stacks
from trainer.planning.memory_inputs import MemoryInputs

# For y = x W: y in the forward pass, dx = dy W^T and dW = x^T dy in the backward pass. Each is a
# product of 2 * N operations per token for N weights.
TRAINING_PASSES = 3
# A frozen weight has no dW.
INPUT_PASSES = 2
HEAD = "head.weight"
EMBEDDING = "embed.tokens"
EXPERTS = "experts"
# Parts of the paths of matrices that multiply the encoder's output.
SOURCE_PROJECTIONS = (".cross.k.", ".cross.v.")


@dataclass(frozen=True, slots=True)
class StepFlops:
    """The operations of a step on all devices."""

    matmul: int  # Products with parameters
    attention_full: int  # Products of queries, keys and values, with masked pairs
    attention_causal: int  # The same without masked pairs
    # Operations on masked pairs that the kernel computes. A kernel with tiles skips the tiles without a visible
    # pair.
    masked: int
    recomputed: int  # Operations that the backward pass repeats

    @property
    def model_flops_of_all_pairs(self) -> int:
        """Operations that MFU counts, with masked pairs."""
        return self.matmul + self.attention_full

    @property
    def model_flops_of_visible_pairs(self) -> int:
        """Operations that MFU counts, without masked pairs."""
        return self.matmul + self.attention_causal

    @property
    def executed(self) -> int:
        """Operations that the devices execute."""
        return self.model_flops_of_visible_pairs + self.masked + self.recomputed


@dataclass(frozen=True, slots=True)
class _ForwardFlops:
    """Operations of one forward pass through a stack of layers, for all sequences in a step."""

    projections: int  # Products with parameters
    trained_projections: int  # Products with parameters that are trained
    attention_full: int  # Products of queries, keys and values, with masked pairs
    attention_causal: int  # The same without masked pairs
    attention_computed: int  # The same with the masked pairs that the kernel computes


def count_step_flops(inputs: MemoryInputs) -> StepFlops:
    """Count the operations of a step on all devices by the rules in this module's docstring."""
    stacks = [_count_stack(inputs, stack) for stack in layer_stacks(inputs)]
    num_tokens = inputs.accumulate * inputs.micro_batch_size * inputs.seq_length
    # A tied head has no leaf: the embedding matrix [V, D] multiplies the hidden states.
    head = inputs.leaves.get(HEAD) or inputs.leaves[EMBEDDING]
    head_flops = 2 * math.prod(head.shape) * num_tokens
    trained_head_flops = head_flops if head.path in inputs.trained_leaves else 0
    causal = sum(stack.attention_causal for stack in stacks)
    computed = sum(stack.attention_computed for stack in stacks)
    return StepFlops(
        matmul=INPUT_PASSES * (head_flops + sum(stack.projections for stack in stacks))
        + trained_head_flops
        + sum(stack.trained_projections for stack in stacks),
        attention_full=TRAINING_PASSES * sum(stack.attention_full for stack in stacks),
        attention_causal=TRAINING_PASSES * causal,
        masked=TRAINING_PASSES * (computed - causal),
        recomputed=sum(_recomputed_flops(inputs, stack) for stack in stacks),
    )


def _count_stack(inputs: MemoryInputs, stack: LayerStack) -> _ForwardFlops:
    """Count the operations of the forward pass of a decoder's or an encoder's layers."""
    num_sequences = inputs.accumulate * inputs.micro_batch_size
    length = row_length(inputs, stack)
    leaves = stack.layer_leaves() + stack.layer_adapters()
    trained = inputs.trained_leaves
    leaf_flops = {leaf.path: stack.share(leaf, _leaf_flops(inputs, stack, leaf)) for leaf in leaves}
    trained_flops = [flops for path, flops in leaf_flops.items() if path in trained]
    # q k^T and p v: 2 * H * E and 2 * H * V operations per pair of a query and a key.
    head_dim = inputs.extent(stack.head_dim)
    value_dim = (inputs.extent("value_dim") or head_dim) * stack.arch_config.values_per_head
    pair_flops = 2 * num_sequences * inputs.extent("heads") * (head_dim + value_dim)
    full = causal = computed = 0
    for name in stack.kv_lengths:
        kv_length = length if name == "attn" else inputs.source_length
        is_causal = name == "attn" and not is_encoder(inputs, stack)
        kinds = Counter((kind.window, kind.chunk) for kind in stack.arch_config.layer_kinds)
        for (window, chunk), num_layers in kinds.items():
            # Chunks of positions are like shorter rows, e.g. 10 tokens in chunks of 4: 4, 4 and 2.
            for rows, queries in _chunk_lengths(length, chunk):
                keys = queries if chunk else kv_length
                window_pairs = queries * min(window or keys, keys)
                # Only self-attention of a decoder is causal. Elsewhere each key of the window is
                # visible.
                visible = _visible_pairs(queries, window) if is_causal else window_pairs
                full += num_layers * rows * window_pairs
                causal += num_layers * rows * visible
                computed += (
                    num_layers
                    * rows
                    * _computed_pairs(
                        inputs, (queries, keys), window=window, visible=visible, is_causal=is_causal
                    )
                )
    scan_flops = num_sequences * length * stack.num_layers * _scan_flops(inputs, stack)
    return _ForwardFlops(
        projections=num_sequences * sum(leaf_flops.values()),
        trained_projections=num_sequences * sum(trained_flops),
        attention_full=pair_flops * full + scan_flops,
        attention_causal=pair_flops * causal + scan_flops,
        attention_computed=pair_flops * computed + scan_flops,
    )


def _scan_flops(inputs: MemoryInputs, stack: LayerStack) -> int:
    """Return the operations of the state of a layer's recurrent mixer per token."""
    mixer = stack.arch_config.mixer
    if mixer is None or not mixer.has_state:
        return 0
    if mixer.kind == "mamba":
        return 2 * 2 * inputs.extent("mixer_channels") * inputs.extent("mixer_state")
    heads = inputs.extent("mixer_groups") * inputs.extent("group_heads")
    state_size = heads * inputs.extent("mixer_state") * inputs.extent("mixer_head_dim")
    num_products = 3 if mixer.kind == "gated_delta" else 2
    return 2 * num_products * state_size


def is_encoder(inputs: MemoryInputs, stack: LayerStack) -> bool:
    """Return whether layers belong to the encoder."""
    return stack.arch_config is inputs.arch_config.encoder


def row_length(inputs: MemoryInputs, stack: LayerStack) -> int:
    """Return the tokens in a whole row of the batch, on all devices along sp together."""
    if is_encoder(inputs, stack):
        return inputs.source_length
    return inputs.seq_length


def _leaf_flops(inputs: MemoryInputs, stack: LayerStack, leaf: ParamLeaf) -> int:
    """Return the operations of a parameter for one sequence in the forward pass, or 0 if it is not a matrix."""
    if leaf.role != "matrix":
        return 0
    size = math.prod(leaf.shape)
    is_of_source = any(part in leaf.path for part in SOURCE_PROJECTIONS)
    # Each token passes `experts_per_token` experts, and the whole router.
    if (EXPERTS,) in leaf.dims and ".router." not in leaf.path:
        size = size * inputs.arch_config.experts_per_token // leaf.extent(EXPERTS)
    # A multiplication and an addition per element of the weight and token.
    length = row_length(inputs, stack)
    if is_of_source:
        length = inputs.source_length
    return 2 * size * length


def _chunk_lengths(length: int, chunk: int) -> list[tuple[int, int]]:
    """Return the number of chunks of a row and their lengths, e.g. 10 tokens in chunks of 4: 2 of 4 and 1 of 2."""
    if not chunk or length <= chunk:
        return [(1, length)]
    whole, rest = divmod(length, chunk)
    if rest == 0:
        return [(whole, chunk)]
    return [(whole, chunk), (1, rest)]


def _visible_pairs(length: int, window: int) -> int:
    """Return the number of (query, key) pairs of causal attention with a sliding window."""
    if window == FULL_ATTENTION or window >= length:
        return length * (length + 1) // 2
    # The first `window` queries see 1, 2, ..., window keys, all later ones see `window`.
    return window * (window + 1) // 2 + (length - window) * window


def _computed_pairs(
    inputs: MemoryInputs, lengths: tuple[int, int], *, window: int, visible: int, is_causal: bool
) -> int:
    """Return the number of pairs that a kernel computes: all pairs, tiles with a visible pair, or visible pairs."""
    num_queries, num_keys = lengths
    if inputs.attention_tile == NO_SCORES:
        return visible
    if inputs.attention_tile is None or not num_queries * num_keys:
        return num_queries * num_keys
    # A row of tiles with the queries [start, stop) has visible keys from start - first to stop - 1,
    # rounded outwards to tiles of `kv_size`.
    q_size, kv_size = inputs.score_tile(*map(inputs.local_length, lengths))
    first = window - 1 if is_causal and window != FULL_ATTENTION else num_queries
    num_rows = math.ceil(num_queries / q_size)
    # Tiles of keys that end before all rows and before the windows of the rows
    if is_causal:
        num_tiles = _floor_sum(num_rows - 1, kv_size, q_size, q_size + kv_size - 1)
        num_tiles += math.ceil(num_queries / kv_size)
    else:
        num_tiles = num_rows * math.ceil(num_keys / kv_size)
    first_row = math.ceil(first / q_size)
    num_tiles -= _floor_sum(num_rows - first_row, kv_size, q_size, first_row * q_size - first)
    return num_tiles * q_size * kv_size


def _floor_sum(count: int, divisor: int, slope: int, offset: int) -> int:
    """Return the sum of (slope * i + offset) // divisor for i from 0 to count - 1, without a loop over i.

    The steps are those of Euclid's algorithm for slope and divisor (`floor_sum` of AtCoder Library).
    """
    total = 0
    while count > 0:
        total += count * (count - 1) // 2 * (slope // divisor) + count * (offset // divisor)
        slope %= divisor
        # Count the points below the line by columns instead of rows, where the axes have changed places.
        count, offset = divmod(slope * count + offset % divisor, divisor)
        slope, divisor = divisor, slope
    return total


def _recomputed_flops(inputs: MemoryInputs, stack: _ForwardFlops) -> int:
    """Return the operations of a stack that the backward pass repeats."""
    # The rematerialization policy repeats layers or only attention, chunks of tokens repeat their products, and tiled
    # attention repeats its scores. If the policy and the chunks both repeat a layer, it is counted once: XLA removes
    # most of one repetition as dead code.
    attention = stack.attention_computed
    saves_projections = inputs.remat_policy in SAVES_ALL + SAVES_DOTS + SAVES_WEIGHT_DOTS
    is_chunked = chunk_length(inputs.ffn_chunk_size, inputs.seq_length) < inputs.seq_length
    # Chunks of tokens compute their products again even if the policy saves them.
    recomputed = 0
    if is_chunked or not saves_projections:
        recomputed += stack.projections
    is_saved = "attention_output" in saved_activations(inputs.remat_policy, has_experts=False)
    if not is_saved and inputs.remat_policy not in SAVES_ALL:
        recomputed += attention
    # Tiled kernels save no scores: the backward pass computes q k^T again, half of attention.
    if inputs.attention_tile:
        recomputed += attention // 2
    return recomputed
