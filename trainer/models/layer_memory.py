"""The memory of the layers of a decoder or an encoder; `trainer.models.memory_estimate` has the formula."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from trainer.models.architecture import NO_SOFTCAP, ArchConfig, window_period
from trainer.models.chunk_sizes import WHOLE, chunk_length, expert_block_length
from trainer.models.memory_inputs import FLOAT32, SAVES_ALL, SAVES_DOTS, SAVES_WEIGHT_DOTS, MemoryInputs
from trainer.models.param_tree import ParamLeaf

ROW_COPIES = 2  # outputs of experts, and their gradients
TILE_COPIES = 4  # scores, probabilities and their gradients of a tile of blockwise attention
ACTIVATION_ARRAYS = {  # arrays [B, T, F] that the backward pass of an MLP without a gate needs
    "gelu": 4, "gelu_new": 6, "gelu_pytorch_tanh": 6, "gelu_fast": 6, "quick_gelu": 4, "silu": 4, "swish": 4, "relu": 3,
}  # fmt: skip
NORMS_PER_BLOCK = {"pre": 2, "post": 2, "parallel": 2, "parallel_one_norm": 1, "sandwich": 4}  # by `block_type`
OUTPUT_NORMS_PER_BLOCK = {"post": 2, "sandwich": 2}  # norms that are not before a projection


@dataclass(frozen=True, slots=True)
class LayerStack:
    """The layers of a decoder or an encoder.

    Sizes (`_size`) are in elements on one device, `_nbytes` in bytes.

    Attributes:
        inputs: Inputs of the estimate.
        arch_config: The choices of these layers.
        prefix: Prefix of their paths.
        seq_length: Number of queries.
        kv_lengths: Number of keys of each attention of a layer, by name.
    """

    inputs: MemoryInputs
    arch_config: ArchConfig
    prefix: str
    seq_length: int
    kv_lengths: Mapping[str, int]

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self.arch_config.sliding_windows)

    @property
    def score_nbytes(self) -> int:
        """Bytes of the largest float32 scores of a layer."""
        return FLOAT32 * max(map(self._score_size, self.kv_lengths.values()))

    @property
    def weight_nbytes(self) -> int:
        """Bytes of the weights of all layers in the dtype of the computation."""
        return self.inputs.itemsize * sum(map(self.inputs.local_leaf_size, self._layer_leaves()))

    @property
    def saved_nbytes(self) -> int:
        """Bytes that one layer saves for its backward pass by the policy, without weights."""
        inputs, residual_size = self.inputs, self._residual_size()
        if inputs.remat_policy in SAVES_ALL:
            return self._saved_without_remat_nbytes()
        num_attentions = len(self.kv_lengths)
        saved = residual_size * inputs.itemsize // inputs.num_residual_shards(self.seq_length)
        if inputs.remat_policy in SAVES_DOTS + SAVES_WEIGHT_DOTS:
            mlp_size = residual_size + self._mlp_hidden_size() * (1 + self.arch_config.has_gated_mlp)
            saved += 0 if self.arch_config.experts_per_token else inputs.itemsize * mlp_size
            saved += inputs.itemsize * residual_size * num_attentions
            saved += inputs.itemsize * (self._query_size() + self._kv_size()) * num_attentions
        if inputs.remat_policy in SAVES_DOTS:
            for kv_length in self.kv_lengths.values():
                saved += self._score_size(kv_length) * FLOAT32 + self._query_size() * inputs.itemsize
        return saved

    @property
    def working_set_nbytes(self) -> int:
        """Bytes of the working set of a layer's backward pass."""
        return (
            window_period(self.arch_config.sliding_windows) * self._saved_without_remat_nbytes()
            + self._expert_nbytes()
            + self._transient_scores_nbytes()
            + self._residual_gradient_nbytes()
            + self._gathered_nbytes()
            - self._absent_block_nbytes()
        )

    def _absent_block_nbytes(self) -> int:
        """Return the working set of attention or of the MLP, whichever is smaller, if both never exist at once."""
        inputs = self.inputs
        if inputs.blocks_overlap or inputs.remat_policy in SAVES_ALL:
            return 0
        attention = self._transient_scores_nbytes()
        mlp = self._mlp_nbytes(self._mlp_hidden_size()) if not self.arch_config.experts_per_token else 0
        block_input = self._residual_size() * inputs.itemsize + self._norm_nbytes() // 2
        return block_input + min(attention, mlp + self._expert_nbytes())

    def _saved_without_remat_nbytes(self) -> int:
        """Return the bytes that a layer saves without rematerialization."""
        inputs, residual_size, num_attentions = self.inputs, self._residual_size(), len(self.kv_lengths)
        heads = 2 * inputs.itemsize * (self._query_size() + self._kv_size() // 2) * num_attentions
        block_inputs = (1 + num_attentions) * residual_size * inputs.itemsize
        hidden = 0 if self.arch_config.experts_per_token else self._mlp_nbytes(self._mlp_hidden_size())
        return self._saved_scores_nbytes() + heads + self._norm_nbytes() + block_inputs + hidden

    def _norm_nbytes(self) -> int:
        """Return the bytes that the derivatives of norms need; those before projections run in chunks of tokens."""
        block_type, residual_size = self.arch_config.block_type, self._residual_size()
        num_output_norms = OUTPUT_NORMS_PER_BLOCK.get(block_type, 0)
        num_input_norms = NORMS_PER_BLOCK[block_type] - num_output_norms + len(self.kv_lengths) - 1
        input_size = self.inputs.local_batch_size * self._chunk_length() * self.inputs.embed_size
        num_bytes = 2 * FLOAT32 + self.inputs.itemsize
        norm_size = num_output_norms * residual_size + num_input_norms * input_size
        return num_bytes * norm_size // self.inputs.num_residual_shards(self.seq_length)

    def _residual_gradient_nbytes(self) -> int:
        """Return the bytes of gradients of the residual stream; without chunks they take the place of norms."""
        if self._chunk_length() == self.seq_length:
            return 0
        return 2 * FLOAT32 * self._residual_size() // self.inputs.num_residual_shards(self.seq_length)

    def _saved_scores_nbytes(self) -> int:
        """Return the bytes of attention scores saved for the backward pass; in tiles, of their log-sum-exp."""
        if self.inputs.attention_tile is not None:
            normalizers = FLOAT32 * self._query_size() // self.inputs.local_extent("head_dim")
            return normalizers * len(self.kv_lengths)
        num_scores = sum(map(self._score_size, self.kv_lengths.values()))
        softcap_nbytes = FLOAT32 if self.arch_config.attn_logit_softcap != NO_SOFTCAP else 0
        return num_scores * (FLOAT32 + self.inputs.itemsize + softcap_nbytes)

    def _transient_scores_nbytes(self) -> int:
        """Return the bytes of scores that exist only during a layer's backward pass."""
        if self.inputs.attention_tile is not None:
            tiled_copies = self.inputs.itemsize * (3 * self._query_size() + self._kv_size())
            return TILE_COPIES * self.score_nbytes + FLOAT32 * self._kv_size() + tiled_copies
        return self.score_nbytes * (1 if self.inputs.remat_policy in SAVES_ALL else 2)

    def _expert_nbytes(self) -> int:
        """Return the working set of an MoE layer's experts, of which one is computed at a time; 0 without experts."""
        inputs, top_k = self.inputs, self.arch_config.experts_per_token
        if not top_k:
            return 0
        num_tokens = inputs.local_batch_size * self._chunk_length()
        num_rows = expert_block_length(num_tokens, top_k, inputs.num_experts)
        rows = ROW_COPIES * num_tokens * top_k * inputs.embed_size * inputs.itemsize
        matrices = (2 * inputs.itemsize + FLOAT32) * self._gathered_size(of_expert=True)
        return rows + matrices + self._mlp_nbytes(num_rows * inputs.local_extent("mlp"))

    def _mlp_nbytes(self, hidden_size: int) -> int:
        """Return the bytes that the backward pass of one MLP needs."""
        num_arrays = ACTIVATION_ARRAYS[self.arch_config.activation] + 2 * self.arch_config.has_gated_mlp
        return num_arrays * self.inputs.itemsize * hidden_size

    def _gathered_nbytes(self) -> int:
        """Return the bytes of a layer's weights after the all-gather over fsdp, and of their unreduced gradients."""
        if self.inputs.axis_size("fsdp") == 1:
            return 0
        return (self.inputs.itemsize + FLOAT32) * self._gathered_size(of_expert=False)

    def _gathered_size(self, *, of_expert: bool) -> int:
        """Return the elements of one expert after the all-gather over fsdp, or of the layer's other weights."""
        inputs = self.inputs
        num_experts = {leaf: inputs.leaf_extent(leaf, "experts") for leaf in self._layer_leaves()}
        sizes = (
            inputs.local_leaf_size(leaf, is_gathered=True) // count
            for leaf, count in num_experts.items()
            if (count > 1) == of_expert
        )
        return sum(sizes) // self.num_layers

    def _layer_leaves(self) -> list[ParamLeaf]:
        """Return the parameters of these layers."""
        prefix = f"{self.prefix}layers."
        return [leaf for path, leaf in self.inputs.leaves.items() if path.startswith(prefix)]

    def _residual_size(self) -> int:
        """Return the elements of the unsplit residual stream [B, T, D]."""
        return self.inputs.local_batch_size * self.seq_length * self.inputs.embed_size

    def _query_size(self) -> int:
        """Return the elements of queries [B, T, H, E]."""
        heads_size = self.inputs.local_extent("heads") * self.inputs.local_extent("head_dim")
        return self.inputs.local_batch_size * self.seq_length * heads_size

    def _kv_size(self) -> int:
        """Return the elements of keys and values, repeated per query head if the mesh splits query heads only."""
        inputs = self.inputs
        is_repeated = inputs.num_shards("kv_heads") != inputs.num_shards("heads")
        kv_heads = 0 if is_repeated else inputs.local_extent("kv_heads")
        num_heads = kv_heads or inputs.local_extent("heads")
        return 2 * inputs.local_batch_size * self.seq_length * num_heads * inputs.local_extent("head_dim")

    def _mlp_hidden_size(self) -> int:
        """Return the elements of an MLP's hidden units [B, T, F], or of a chunk's."""
        return self.inputs.local_batch_size * self._chunk_length() * self.inputs.local_extent("mlp")

    def _chunk_length(self) -> int:
        """Return the tokens per row of a chunk."""
        return chunk_length(self.inputs.ffn_chunk_size, self.seq_length)

    def _score_size(self, kv_length: int) -> int:
        """Return the elements of scores [B, H, T, S], or of a tile's."""
        q_size, k_size = self.inputs.attention_tile or (WHOLE, WHOLE)
        num_scores = chunk_length(q_size, self.seq_length) * chunk_length(k_size, kv_length)
        return self.inputs.local_batch_size * self.inputs.local_extent("heads") * num_scores
