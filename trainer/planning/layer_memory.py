"""The memory of the layers of a decoder or an encoder.

The docstring of `trainer.planning.memory_estimate` has the formula and its symbols.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from prepcli.algebra.axis_map import dim_name
from prepcli.models.activation_memory import (
    OFFLOAD_NONE,
    SAVES_ALL,
    SAVES_DOTS,
    chunk_length,
    expert_block_length,
    saved_activations,
)
from prepcli.models.architecture import NO_SOFTCAP, ArchConfig, BlockType
from prepcli.models.layer_config import RelativePositionBias
from prepcli.models.param_tree import HEAD_WIDTH_DIMS, KV_HEAD_DIMS, ParamLeaf
from trainer.planning.memory_inputs import FLOAT32, MemoryInputs
from trainer.planning.mixer_memory import MixerMemory

# Outputs of experts, and their gradients.
ROW_COPIES = 2
# Arrays of a tile of blockwise attention: scores, probabilities, and the gradients of both.
TILE_COPIES = 4
# As above on accelerators, where XLA fuses three of the four arrays into the products that read them.
FUSED_TILE_COPIES = 1
# Ring attention holds the current block of keys and values, and the next block while it is received.
RING_COPIES = 2
# Arrays [B, T, F] that the backward pass of an MLP without a gate reads. The numbers are fitted to
# XLA's memory plans (`python -m bench.memory_points`).
ACTIVATION_ARRAYS = {
    "gelu": 4,
    "gelu_new": 6,
    "gelu_pytorch_tanh": 6,
    "gelu_fast": 6,
    "quick_gelu": 4,
    "silu": 4,
    "swish": 4,
    "relu": 3,
    "relu2": 3,
    "xielu": 7,
}
# Norms of a layer by `block_type`, and how many of them follow a projection.
NORMS_PER_BLOCK: Mapping[BlockType, int] = {
    "pre": 2, "post": 2, "parallel": 2, "parallel_one_norm": 1, "sandwich": 4, "sandwich_input": 5, "output_norm": 2,
    "single": 1,
}  # fmt: skip
OUTPUT_NORMS_PER_BLOCK: Mapping[BlockType, int] = {
    "post": 2,
    "sandwich": 2,
    "sandwich_input": 3,
    "output_norm": 2,
}


@dataclass(frozen=True, slots=True)
class LayerStack:
    """Layers of the same kind in a decoder or an encoder, e.g. its dense layers or its MoE layers.

    Sizes (`_size`) are in elements on one device, `_nbytes` in bytes.
    """

    inputs: MemoryInputs  # Inputs of the estimate
    arch_config: ArchConfig  # The choices of these layers
    prefix: str  # Prefix of their paths
    seq_length: int  # Number of queries
    # Number of keys of each attention of a layer, by name. Empty for layers with a recurrent mixer.
    kv_lengths: Mapping[str, int]
    # Number of layers in each layer group with weights of these layers, by the group's dim. E.g. `{"layers": 32}`
    # for 32 equal layers.
    groups: Mapping[str, int]
    mlp_dim: str = "mlp"  # Logical dim of the hidden units

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self.arch_config.sliding_windows)

    @property
    def head_dim(self) -> str:
        """Logical dim of the elements of a head."""
        return self._dim_of_layers(HEAD_WIDTH_DIMS)

    @property
    def kv_heads(self) -> str:
        """Logical dim of the key and value heads."""
        return self._dim_of_layers(KV_HEAD_DIMS)

    @property
    def local_value_dim(self) -> int:
        """Width of the values of a head on one device. In latent and differential attention keys have another width."""
        width = self.inputs.local_extent("value_dim") or self.inputs.local_extent(self.head_dim)
        return width * self.arch_config.values_per_head

    def _dim_of_layers(self, names: tuple[str, ...]) -> str:
        """Return the first of some dims that a parameter of these layers has, or the first one."""
        dims = {dim_name(dim) for leaf in self.layer_leaves() for dim in leaf.dims}
        return next((name for name in names if name in dims), names[0])

    @property
    def score_nbytes(self) -> int:
        """Bytes of the largest float32 scores of a layer."""
        return FLOAT32 * max(map(self._score_size, self.kv_lengths.values()), default=0)

    @property
    def weight_nbytes(self) -> int:
        """Bytes of the weights of all layers in the dtype of the computation."""
        sizes = (
            self.share(leaf, self.inputs.local_leaf_size(leaf)) for leaf in self.layer_leaves()
        )
        return self.inputs.itemsize * sum(sizes)

    @property
    def saved_nbytes(self) -> int:
        """Bytes that one layer saves on the device for its backward pass by the policy, without weights."""
        policy = self.inputs.remat_policy
        if policy in SAVES_ALL:
            if policy == "everything_saveable":
                return self.backward_inputs_nbytes()
            gathered_nbytes = self._block_inputs_nbytes() * (
                1 - 1 / self.inputs.num_residual_shards(self.seq_length)
            )
            return self.backward_inputs_nbytes() - self._recomputed_nbytes() - int(gathered_nbytes)
        names = saved_activations(policy, has_experts=self.arch_config.experts_per_token > 0)
        if policy in SAVES_DOTS:
            score_size = sum(map(self._score_size, self.kv_lengths.values()))
        else:
            score_size = 0
        activations = sum(map(self._activation_nbytes, names)) + FLOAT32 * score_size
        if self._mixer is not None:
            activations += self._mixer.products_nbytes
        return (
            self._input_nbytes() - self.offloaded_nbytes + self._token_input_nbytes() + activations
        )

    @property
    def offloaded_nbytes(self) -> int:
        """Bytes that one layer saves in host memory."""
        if self.inputs.offload == OFFLOAD_NONE:
            return 0
        return self._input_nbytes()

    @property
    def working_set_nbytes(self) -> int:
        """Bytes of the working set of a layer's backward pass.

        The peak is in the attention or in the MLP. Recomputed norms and activation functions are not in memory while
        attention holds its transient scores, so their bytes are subtracted.
        """
        attention_nbytes = self._transient_scores_nbytes() - self._recomputed_nbytes()
        num_arrays = 2 + self.arch_config.has_gated_mlp
        mlp_gradient_nbytes = num_arrays * self.inputs.itemsize * self._saved_hidden_size()
        return (
            self.backward_inputs_nbytes()
            # The other layers of a period of kinds: 5 for 5 sliding layers and 1 full.
            + (self.arch_config.layer_schedule.period - 1) * self.nbytes_while_others_run()
            + max(attention_nbytes, mlp_gradient_nbytes)
            + self._expert_nbytes()
            + self._ring_nbytes()
            + self._residual_gradient_nbytes()
            + self._gathered_nbytes()
        )

    @property
    def position_bias_nbytes(self) -> int:
        """Bytes of the bias of dense attention by relative position, [H, T, T] in float32, and of its gradient."""
        bias = self.arch_config.score_bias
        if bias is None or self.inputs.attention_tile is not None:
            return 0
        # Only T5's bias has parameters.
        num_copies = 2 if isinstance(bias, RelativePositionBias) else 1
        num_scores = self.inputs.local_extent("heads") * self.seq_length**2
        return num_copies * FLOAT32 * num_scores

    @property
    def num_mixings(self) -> int:
        """Number of sublayers in which tokens read other tokens: attentions, or a recurrent mixer."""
        return max(1, len(self.kv_lengths))

    def _input_nbytes(self) -> int:
        """Return the bytes of the residual stream before a layer."""
        return (
            self._residual_size()
            * self.inputs.itemsize
            // self.inputs.num_residual_shards(self.seq_length)
        )

    def _activation_nbytes(self, name: str) -> int:
        """Return the bytes that saving a named activation takes in all attentions of a layer."""
        # A block's output is saved only if a norm follows it. Only this norm's backward pass reads it.
        itemsize = self.inputs.itemsize
        num_attentions = len(self.kv_lengths)
        block_type = self.arch_config.block_type
        match name:
            case "q":
                return itemsize * self._query_size() * num_attentions
            case "k" | "v":
                return itemsize * self._kv_size() // 2 * num_attentions
            case "attention_output":
                return itemsize * self._output_size() * num_attentions + self._normalizer_nbytes()
            case "o" if not block_type.startswith("parallel"):
                return self._input_nbytes() * num_attentions
            case "mlp_hidden":
                return itemsize * self._saved_hidden_size() * (1 + self.arch_config.has_gated_mlp)
            case "mlp_output" if block_type in OUTPUT_NORMS_PER_BLOCK:
                return self._input_nbytes()
            case _:
                return 0

    def backward_inputs_nbytes(self) -> int:
        """Return the bytes of all activations that a layer's backward pass reads."""
        # Queries and the attention output, and keys and values, which `_kv_size` counts together.
        heads_size = self._query_size() + self._output_size() + self._kv_size()
        heads = self.inputs.itemsize * heads_size * len(self.kv_lengths)
        hidden = self._mlp_nbytes(self._saved_hidden_size())
        if self._mixer is None:
            mixer_nbytes = 0
        else:
            mixer_nbytes = self._mixer.saved_nbytes + self._mixer.recomputed_nbytes
        return (
            self._saved_scores_nbytes()
            + heads
            + mixer_nbytes
            + self._norm_nbytes()
            + self._block_inputs_nbytes()
            + hidden
            + self._layer_input_nbytes()
            + self._inner_norm_nbytes()
        )

    def overlapping_nbytes(self, *, is_scanned: bool) -> int:
        """Return the bytes of a layer while the backward pass of another layer of a hybrid model runs.

        Args:
            is_scanned: Whether the layer is in the scan over periods, which saves arrays of all periods together.
        """
        inputs_nbytes = self._input_nbytes() + self._token_input_nbytes()
        # Arrays that the policy saves are read where they are.
        in_place_nbytes = self.saved_nbytes + self.offloaded_nbytes - inputs_nbytes
        if is_scanned and self._mixer is not None:
            # The loop of a mixer reads slices of them.
            in_place_nbytes -= self._mixer.saved_loop_inputs_nbytes
        nbytes = self.backward_inputs_nbytes() - in_place_nbytes
        # The backward pass of the MLP itself has not begun, which has the gradients of two products.
        if self.arch_config.has_gated_mlp:
            nbytes -= 2 * self.inputs.itemsize * self._saved_hidden_size()
        return nbytes

    def _inner_norm_nbytes(self) -> int:
        """Return the bytes that norms before the last matrices of attention and of the MLP read. 0 without them."""
        ends = {leaf.path.rpartition(".")[0].rpartition(".")[2] for leaf in self.layer_leaves()}
        size = self._output_size() if "o_norm" in ends else 0
        if self.arch_config.has_differential_attention:
            size += self._query_size()
        if "down_norm" in ends:
            size += self._saved_hidden_size()
        return (2 * FLOAT32 + self.inputs.itemsize) * size

    def _layer_input_nbytes(self) -> int:
        """Return the bytes that the gate of a layer's input from tokens reads, and the input. 0 without one."""
        if not self.arch_config.has_layer_inputs:
            return 0
        # Those of the activation, its product with the input, and the input.
        num_arrays = ACTIVATION_ARRAYS[self.arch_config.activation] + 2
        return num_arrays * self._token_input_nbytes()

    def _token_input_nbytes(self) -> int:
        """Return the bytes of the input of a layer from its tokens, [B, T, P]. 0 without one."""
        num_tokens = self.inputs.local_batch_size * self.seq_length
        return num_tokens * self.inputs.extent("layer_input") * self.inputs.itemsize

    @property
    def _mixer(self) -> MixerMemory | None:
        """The memory of the recurrent mixer of these layers, if they have one."""
        if self.arch_config.mixer is None:
            return None
        return MixerMemory(self.inputs, self.arch_config.mixer, self.seq_length)

    def _block_inputs_nbytes(self) -> int:
        """Return the bytes of the inputs of the attentions (or of the recurrent mixer) and of the MLP, not sharded."""
        return (1 + self.num_mixings) * self._residual_size() * self.inputs.itemsize

    # Sizes below: B sequences, T tokens, S keys, H heads, E head width, D embedding width, F hidden
    # units, all on one device.

    def nbytes_while_others_run(self) -> int:
        """Return the bytes that a layer takes while another layer of the same period, or of the scan, is computed."""
        has_transient_scores = (
            self.inputs.attention_tile is None and self.inputs.remat_policy not in SAVES_ALL
        )
        scores_nbytes = self._transient_scores_nbytes() if has_transient_scores else 0
        return self.backward_inputs_nbytes() - self._recomputed_nbytes() + scores_nbytes

    def _recomputed_nbytes(self) -> int:
        """Return the bytes of the activations that every policy may compute again."""
        # With chunks of tokens, only those of a mixer are among the inputs of the backward pass.
        mixer_nbytes = 0
        if self._mixer is not None:
            mixer_nbytes = self._mixer.recomputed_nbytes
        if self._chunk_length() != self.seq_length:
            return mixer_nbytes
        # The outputs of the up and gate projections are not among them, only activation functions
        # are.
        num_products = 1 + self.arch_config.has_gated_mlp
        hidden_size = self._saved_hidden_size()
        hidden = self._mlp_nbytes(hidden_size) - num_products * self.inputs.itemsize * hidden_size
        return mixer_nbytes + self._input_norm_nbytes() + hidden

    def _norm_nbytes(self) -> int:
        """Return the bytes that the derivatives of norms need."""
        num_norms = OUTPUT_NORMS_PER_BLOCK.get(self.arch_config.block_type, 0)
        return self._input_norm_nbytes() + self._norm_size_nbytes(num_norms * self._residual_size())

    def _input_norm_nbytes(self) -> int:
        """Return the bytes that the derivatives of norms before projections need, which run in chunks of tokens."""
        block_type = self.arch_config.block_type
        num_norms = (
            NORMS_PER_BLOCK[block_type]
            - OUTPUT_NORMS_PER_BLOCK.get(block_type, 0)
            + self.num_mixings
            - 1
        )
        # Norms before projections run chunk by chunk, so only one chunk counts: [B, chunk, D].
        size = self.inputs.local_batch_size * self._chunk_length() * self.inputs.embed_size
        return self._norm_size_nbytes(num_norms * size)

    def _norm_size_nbytes(self, size: int) -> int:
        """Return the bytes that the derivatives of norms of `size` elements need."""
        return (
            (2 * FLOAT32 + self.inputs.itemsize)
            * size
            // self.inputs.num_residual_shards(self.seq_length)
        )

    def _residual_gradient_nbytes(self) -> int:
        """Return the bytes of gradients of the residual stream."""
        # If the MLP is not computed in chunks, they reuse the memory of norms. Accelerators hold them for all tokens
        # of the rows, also if the mesh splits the residual stream.
        is_chunked = self._chunk_length() != self.seq_length
        if self.inputs.plans_for_cpu and not is_chunked:
            return 0
        nbytes = 2 * FLOAT32 * self._residual_size()
        if self.inputs.plans_for_cpu:
            return nbytes // self.inputs.num_residual_shards(self.seq_length)
        reused_nbytes = 0 if is_chunked else self._norm_nbytes()
        return max(0, nbytes - reused_nbytes)

    def _saved_scores_nbytes(self) -> int:
        """Return the bytes of attention scores saved for the backward pass. Tiled attention saves only log-sum-exps."""
        if self.inputs.attention_tile is not None:
            return self._normalizer_nbytes()
        # The softmax in float32 and in the dtype of the products, and the capped scores before it.
        num_scores = sum(map(self._score_size, self.kv_lengths.values()))
        softcap_nbytes = FLOAT32 if self.arch_config.attn_logit_softcap != NO_SOFTCAP else 0
        return num_scores * (FLOAT32 + self.inputs.itemsize + softcap_nbytes)

    def _normalizer_nbytes(self) -> int:
        """Return the bytes of one log-sum-exp per query, in self- and cross-attention. 0 without tiles."""
        if self.inputs.attention_tile is None or not self.kv_lengths:
            return 0
        return (
            FLOAT32
            * self._query_size()
            // self.inputs.local_extent(self.head_dim)
            * len(self.kv_lengths)
        )

    def _transient_scores_nbytes(self) -> int:
        """Return the bytes of scores that exist only during a layer's backward pass. 0 without attention."""
        if not self.kv_lengths:
            return 0
        if self.inputs.attention_tile is not None:
            itemsize = self.inputs.tile_itemsize or self.inputs.itemsize
            tiled_copies = itemsize * (3 * self._query_size() + self._kv_size())
            num_copies = TILE_COPIES if self.inputs.plans_for_cpu else FUSED_TILE_COPIES
            return num_copies * self.score_nbytes + FLOAT32 * self._kv_size() + tiled_copies
        num_copies = 1 if self.inputs.remat_policy in SAVES_ALL else 2
        return num_copies * self.score_nbytes + self._mask_nbytes()

    def _mask_nbytes(self) -> int:
        """Return the bytes of the mask of dense attention, one per score, which a step without rematerialization saves.

        Accelerators compute it with the scores.
        """
        if not self.inputs.plans_for_cpu or self.inputs.remat_policy not in SAVES_ALL:
            return 0
        return self.score_nbytes // FLOAT32

    def _ring_nbytes(self) -> int:
        """Return the bytes of ring attention: copies of other devices' keys and values, and partial gradients."""
        if self.inputs.num_sequence_shards == 1:
            return 0
        copies_nbytes = RING_COPIES * (self.inputs.itemsize + FLOAT32) * self._kv_size()
        return copies_nbytes + FLOAT32 * self._query_size()

    def _expert_nbytes(self) -> int:
        """Return the working set of an MoE layer's experts, or 0 without experts. One expert is computed at a time."""
        inputs = self.inputs
        top_k = self.arch_config.experts_per_token
        if not top_k:
            return 0
        # Each token gives `top_k` rows, one per expert that it is sent to. Weights are gathered in the dtype of the
        # computation, twice, and their gradient is float32 until it is reduced.
        num_tokens = inputs.local_batch_size * self._chunk_length()
        num_rows = expert_block_length(num_tokens, top_k, inputs.num_experts)
        rows = ROW_COPIES * num_tokens * top_k * inputs.embed_size * inputs.itemsize
        matrices = (2 * inputs.itemsize + FLOAT32) * self._gathered_size(of_expert=True)
        expert_mlp = inputs.local_extent("expert_mlp") or inputs.local_extent("mlp")
        return rows + matrices + self._mlp_nbytes(num_rows * expert_mlp)

    def _mlp_nbytes(self, hidden_size: int) -> int:
        """Return the bytes that the backward pass of one MLP needs."""
        num_arrays = (
            ACTIVATION_ARRAYS[self.arch_config.activation] + 2 * self.arch_config.has_gated_mlp
        )
        return num_arrays * self.inputs.itemsize * hidden_size

    def _gathered_nbytes(self) -> int:
        """Return the bytes of a layer's weights after the all-gather over fsdp, and of their unreduced gradients."""
        # Accelerators gather the weights of the next layer meanwhile.
        if self.inputs.axis_size("fsdp") == 1:
            return 0
        num_copies = 1 if self.inputs.plans_for_cpu else 2
        element_nbytes = num_copies * self.inputs.itemsize + FLOAT32
        return element_nbytes * self._gathered_size(of_expert=False)

    def _gathered_size(self, *, of_expert: bool) -> int:
        """Return the elements of one expert after the all-gather over fsdp, or of the layer's other weights."""
        inputs = self.inputs
        size = 0
        for leaf in self.layer_leaves():
            num_experts = leaf.extent("experts")
            if (num_experts > 1) == of_expert:
                gathered = inputs.local_leaf_size(leaf, is_gathered=True)
                size += self.share(leaf, gathered) // num_experts
        return size // self.num_layers

    def share(self, leaf: ParamLeaf, count: int) -> int:
        """Return the part of a count (elements or FLOPs) of a stacked leaf that belongs to these layers.

        E.g. a quarter of it for 2 layers of a group of 8.
        """
        return count * self.num_layers // self.groups[self._layer_group(leaf.path)]

    def layer_leaves(self) -> list[ParamLeaf]:
        """Return the parameters of these layers, without adapters."""
        return self._leaves_in_layers(self.inputs.leaves)

    def layer_adapters(self) -> list[ParamLeaf]:
        """Return the adapters of these layers."""
        return self._leaves_in_layers(self.inputs.adapters or {})

    def _leaves_in_layers(self, leaves: Mapping[str, ParamLeaf]) -> list[ParamLeaf]:
        return [leaf for path, leaf in leaves.items() if self._layer_group(path) in self.groups]

    def _layer_group(self, path: str) -> str:
        """Return the part of a path after the prefix, or "" for a path without the prefix."""
        if not path.startswith(self.prefix):
            return ""
        return path.removeprefix(self.prefix).partition(".")[0]

    def _residual_size(self) -> int:
        """Return the number of elements of [B, T, D] with this device's rows B, and T and D unsplit."""
        return self.inputs.local_batch_size * self.seq_length * self.inputs.embed_size

    def _query_size(self) -> int:
        """Return the elements of queries [B, T, H, E]."""
        heads_size = self.inputs.local_extent("heads") * self.inputs.local_extent(self.head_dim)
        return self.inputs.local_batch_size * self.seq_length * heads_size

    def _output_size(self) -> int:
        """Return the elements of the output of attention [B, T, H, V]."""
        heads_size = self.inputs.local_extent("heads") * self.local_value_dim
        return self.inputs.local_batch_size * self.seq_length * heads_size

    def _kv_size(self) -> int:
        """Return the elements of keys and values, repeated per query head if the mesh splits query heads only."""
        inputs = self.inputs
        is_repeated = inputs.num_shards(self.kv_heads) != inputs.num_shards("heads")
        kv_heads = 0 if is_repeated else inputs.local_extent(self.kv_heads)
        num_heads = kv_heads or inputs.local_extent("heads")
        head_size = inputs.local_extent(self.head_dim) + self.local_value_dim
        return inputs.local_batch_size * self.seq_length * num_heads * head_size

    def _saved_hidden_size(self) -> int:
        """Return the elements of hidden units for all tokens: of a dense MLP or of shared experts."""
        dim = self.mlp_dim
        if self.arch_config.experts_per_token and not self.inputs.extent("expert_mlp"):
            dim = "shared_mlp"
        num_tokens = self.inputs.local_batch_size * self._chunk_length()
        return num_tokens * self.inputs.local_extent(dim)

    def _chunk_length(self) -> int:
        """Return the tokens per row of a chunk."""
        return chunk_length(self.inputs.ffn_chunk_size, self.seq_length)

    def _score_size(self, kv_length: int) -> int:
        """Return the elements of scores [B, H, T, S], or of a tile's."""
        num_scores = math.prod(self.inputs.score_tile(self.seq_length, kv_length))
        return self.inputs.local_batch_size * self.inputs.local_extent("heads") * num_scores
