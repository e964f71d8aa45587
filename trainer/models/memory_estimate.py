"""Memory estimate of a training step on one device, from shapes alone, without JAX or allocation.

Axes: B sequences of a micro-batch on one device, T tokens, S keys, H heads, E head width, D embedding width, F hidden
units of the MLP, V vocabulary; H, F and V count one device's share. Sizes are in bytes; `c` is the size of an element
in the dtype of the computation.

At its peak a step needs

    state                parameters and two moments, float32, split by the mesh: 12 bytes per parameter
    gradients            their sum and the update, float32: 8 bytes per parameter
    saved                for each layer the inputs of its backward pass (below), and its weights in the dtype `c`
    the larger of
      one layer's        the activations it saves without rematerialization, times the layers of one period of the
      backward pass      sliding window pattern, because their backward passes overlap; transient scores, B*H*T*S*4
                         once, or twice with rematerialization; with fsdp its gathered weights and their gradients;
                         with experts the rows of all assignments (below)
      the LM head        logits of a chunk, their exponentials and their gradients: 3*B*chunk*V*4; the gathered head,
                         V*D*4

Without rematerialization the derivative of each operation determines the saved activations:

    scores               B*H*T*S*(4 + c): the softmax in float32 and in `c`; 4 more with a softcap. Blockwise attention
                         saves B*H*T*4; transient are the scores of a tile, four times, the gradients of keys and
                         values in float32, and copies of queries, keys, values and gradients in tiles
    heads                queries and attention output B*T*H*E*c each, keys and values likewise
    residual stream      3 arrays B*T*D per norm, 2 of them in float32, split along tokens over sp and mp;
                         and the unsplit input of each block, B*T*D*c
    MLP                  n*B*T*F*c with n by activation (`ACTIVATION_ARRAYS`), 2 more if it is gated; T is the length of
                         a chunk if the MLP is computed in chunks
    experts              nothing but the input: K outputs per token and their gradients, 2*B*T*K*D*c, are transient, as
                         are the matrices of one expert, gathered, with their gradients, and a block of hidden units

With a rematerialization policy a layer saves its input and the matrix products that the policy names.

The formula is fitted to XLA's memory plans for CPU devices (`python -m bench.compiled_memory` prints both). On a CPU
bfloat16 is widened to float32 and saved as float32, so `MemoryInputs.itemsize` is 4 for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from trainer.models.architecture import NO_SOFTCAP, ArchConfig, window_period
from trainer.models.chunk_sizes import WHOLE, chunk_length, expert_block_length
from trainer.models.mesh import Mesh
from trainer.models.param_tree import ParamLeaf
from trainer.models.parameters import DECODER, ENCODER
from trainer.models.partition import RESIDUAL_SEQ_CHOICES, Rules, partition_spec

FLOAT32 = 4
STATE_COPIES = 3  # a parameter and its two moments
GRADIENT_COPIES = 2  # a gradient and the update
LOGIT_COPIES = 3
ROW_COPIES = 2  # outputs of experts, and their gradients
TILE_COPIES = 4  # scores, probabilities and their gradients of a tile of blockwise attention
ACTIVATION_ARRAYS = {  # arrays [B, T, F] that the derivative of an MLP without a gate needs
    "gelu": 4, "gelu_new": 6, "gelu_pytorch_tanh": 6, "gelu_fast": 6, "quick_gelu": 4, "silu": 4, "swish": 4, "relu": 3,
}  # fmt: skip
NORMS_PER_BLOCK = {"pre": 2, "post": 2, "parallel": 2, "parallel_one_norm": 1, "sandwich": 4}  # by `block_type`
SAVES_ALL = ("none", "everything_saveable")
SAVES_DOTS = ("dots_saveable", "checkpoint_dots")
SAVES_SCORES = ("everything_saveable", *SAVES_DOTS)  # of all tiles, with blockwise attention
SAVES_WEIGHT_DOTS = ("dots_with_no_batch_dims_saveable", "checkpoint_dots_with_no_batch_dims")


@dataclass(frozen=True, slots=True)
class MemoryInputs:
    """The inputs of the memory estimate.

    Attributes:
        arch_config: The choices of the layers.
        leaves: Parameters by path.
        mesh: The mesh without open axes; None for one device.
        rules: Mesh axes of each logical dim.
        micro_batch_size: Sequences of a micro-batch, over all devices.
        seq_length: Tokens of a sequence, or of a target.
        source_length: Tokens of a source; 0 without an encoder.
        itemsize: Bytes per element in the dtype of the computation, as the devices store it.
        remat_policy: Rematerialization policy of the layers.
        head_chunk_size: Tokens per row whose logits exist at the same time; -1 for all.
        ffn_chunk_size: Tokens per row whose hidden units of the MLP exist at the same time; -1 for all.
        attention_tile: Queries and keys whose scores exist at the same time, -1 for all; None if scores are not tiled.
    """

    arch_config: ArchConfig
    leaves: Mapping[str, ParamLeaf]
    mesh: Mesh | None
    rules: Rules
    micro_batch_size: int
    seq_length: int
    source_length: int = 0
    itemsize: int = FLOAT32
    remat_policy: str = "none"
    head_chunk_size: int = 512
    ffn_chunk_size: int = -1
    attention_tile: tuple[int, int] | None = None

    @property
    def num_experts(self) -> int:
        """Experts per layer; 0 without experts."""
        return self._extent("experts")

    @property
    def embed_size(self) -> int:
        """Width of the residual stream, which no mesh axis splits."""
        return self._extent("embed")

    def local_extent(self, dim: str) -> int:
        """Return the extent of a logical dim of parameters on one device; 0 if no parameter has it."""
        return self._extent(dim) // self.num_shards(dim)

    def num_shards(self, dim: str) -> int:
        """Return the number of shards along a logical dim of activations."""
        return self._num_shards(dim, self._extent(dim), self.rules)

    @property
    def local_batch_size(self) -> int:
        """Sequences of a micro-batch on one device."""
        return self.micro_batch_size // (self.axis_size("dp") * self.axis_size("fsdp"))

    def num_residual_shards(self, length: int) -> int:
        """Return the number of shards of the residual stream along `length` tokens."""
        return self._num_shards("residual_seq", length, {"residual_seq": RESIDUAL_SEQ_CHOICES})

    def axis_size(self, axis: str) -> int:
        """Return the number of devices along a mesh axis."""
        return self.mesh.size(axis) if self.mesh else 1

    def local_leaf_size(self, leaf: ParamLeaf, is_gathered: bool = False) -> int:
        """Return the elements of a parameter on one device, after the all-gather over fsdp if `is_gathered`."""
        spec = partition_spec(leaf.dims, leaf.shape, self.mesh, self.rules) if self.mesh else None
        axes = [axis for dim_axes in spec.mesh_axes for axis in dim_axes] if spec else []
        split_axes = (axis for axis in axes if not (is_gathered and axis == "fsdp"))
        return math.prod(leaf.shape) // math.prod(map(self.axis_size, split_axes))

    def leaf_extent(self, leaf: ParamLeaf, dim_name: str) -> int:
        """Return the extent of a logical dim of one parameter; 1 if the parameter lacks it."""
        return math.prod(extent for dim, extent in zip(leaf.dims, leaf.shape) if dim and dim[0] == dim_name)

    def _extent(self, dim: str) -> int:
        """Return the extent of a logical dim in the first parameter with this dim; 0 if there is none."""
        extents = (
            self.leaf_extent(leaf, dim)
            for leaf in self.leaves.values()
            if (dim,) in [leaf_dim[:1] for leaf_dim in leaf.dims]
        )
        return next(extents, 0)

    def _num_shards(self, dim: str, extent: int, rules: Rules) -> int:
        """Return the number of shards along a dim by `rules`."""
        return partition_spec([(dim,)], (extent,), self.mesh, rules).shards_per_dim[0] if self.mesh and extent else 1


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """The bytes that a training step needs on one device.

    Attributes:
        parameters: Parameters of the whole model, split by the mesh.
        moments: Moments of the optimizer.
        gradients: Gradients and updates.
        saved: Activations saved by all layers for the backward pass, and the layers' weights.
        layer: Working set of one layer's backward pass.
        head: Working set of the LM head and the loss.
        scores: Attention scores of one layer or tile, float32 [B, H, T, S]; part of `layer`.
    """

    parameters: int
    moments: int
    gradients: int
    saved: int
    layer: int
    head: int
    scores: int

    @property
    def state(self) -> int:
        """Bytes of parameters and moments, which exist during the whole run."""
        return self.parameters + self.moments

    @property
    def activations(self) -> int:
        """Peak bytes of temporaries within a step, without gradients."""
        return self.saved + max(self.layer, self.head)

    @property
    def peak(self) -> int:
        """Peak bytes of a step."""
        return self.state + self.gradients + self.activations


def estimate_memory(inputs: MemoryInputs) -> MemoryEstimate:
    """Estimate the memory of a training step on one device by the formula in this module's docstring."""
    num_parameters = sum(inputs.local_leaf_size(leaf) for leaf in inputs.leaves.values())
    stacks = list(_layer_stacks(inputs))
    return MemoryEstimate(
        parameters=FLOAT32 * num_parameters,
        moments=FLOAT32 * (STATE_COPIES - 1) * num_parameters,
        gradients=FLOAT32 * GRADIENT_COPIES * num_parameters,
        saved=sum(stack.num_layers * stack.saved_nbytes + stack.weight_nbytes for stack in stacks),
        layer=max(stack.working_set_nbytes for stack in stacks),
        head=_lm_head_nbytes(inputs),
        scores=max(stack.score_nbytes for stack in stacks),
    )


def _lm_head_nbytes(inputs: MemoryInputs) -> int:
    """Return the working set of the LM head and the loss."""
    num_tokens = inputs.local_batch_size * chunk_length(inputs.head_chunk_size, inputs.seq_length)
    num_logits = num_tokens * inputs.local_extent("vocab")
    head = inputs.leaves.get("head.weight") or inputs.leaves["embed.tokens"]
    return FLOAT32 * (LOGIT_COPIES * num_logits + inputs.local_leaf_size(head, is_gathered=True))


def _layer_stacks(inputs: MemoryInputs) -> Iterable[_LayerStack]:
    """Yield the decoder's layers, and the encoder's if there is one."""
    encoder = inputs.arch_config.encoder
    yield _LayerStack(
        inputs=inputs,
        arch_config=inputs.arch_config,
        prefix=f"{DECODER}." if encoder else "",
        seq_length=inputs.seq_length,
        kv_lengths={"attn": inputs.seq_length} | ({"cross": inputs.source_length} if encoder else {}),
    )
    if encoder:
        yield _LayerStack(
            inputs=inputs,
            arch_config=encoder,
            prefix=f"{ENCODER}.",
            seq_length=inputs.source_length,
            kv_lengths={"attn": inputs.source_length},
        )


@dataclass(frozen=True, slots=True)
class _LayerStack:
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
            + self._gathered_nbytes()
        )

    def _saved_without_remat_nbytes(self) -> int:
        """Return the bytes that a layer saves without rematerialization."""
        inputs, residual_size, num_attentions = self.inputs, self._residual_size(), len(self.kv_lengths)
        heads = 2 * inputs.itemsize * (self._query_size() + self._kv_size() // 2) * num_attentions
        num_norms = NORMS_PER_BLOCK[self.arch_config.block_type] + num_attentions - 1
        num_shards = inputs.num_residual_shards(self.seq_length)
        norms = num_norms * residual_size * (2 * FLOAT32 + inputs.itemsize) // num_shards
        block_inputs = (1 + num_attentions) * residual_size * inputs.itemsize
        hidden = 0 if self.arch_config.experts_per_token else self._mlp_nbytes(self._mlp_hidden_size())
        return self._saved_scores_nbytes() + heads + norms + block_inputs + hidden

    def _saved_scores_nbytes(self) -> int:
        """Return the bytes of scores that the derivative of attention needs, or of their log-sum-exp and tiles."""
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
        num_tokens = inputs.local_batch_size * chunk_length(inputs.ffn_chunk_size, self.seq_length)
        num_rows = expert_block_length(num_tokens, top_k, inputs.num_experts)
        rows = ROW_COPIES * num_tokens * top_k * inputs.embed_size * inputs.itemsize
        matrices = (2 * inputs.itemsize + FLOAT32) * self._gathered_size(of_expert=True)
        return rows + matrices + self._mlp_nbytes(num_rows * inputs.local_extent("mlp"))

    def _mlp_nbytes(self, hidden_size: int) -> int:
        """Return the bytes that the derivative of one MLP needs."""
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
        length = chunk_length(self.inputs.ffn_chunk_size, self.seq_length)
        return self.inputs.local_batch_size * length * self.inputs.local_extent("mlp")

    def _score_size(self, kv_length: int) -> int:
        """Return the elements of scores [B, H, T, S], or of a tile's."""
        q_size, k_size = self.inputs.attention_tile or (WHOLE, WHOLE)
        num_scores = chunk_length(q_size, self.seq_length) * chunk_length(k_size, kv_length)
        return self.inputs.local_batch_size * self.inputs.local_extent("heads") * num_scores
