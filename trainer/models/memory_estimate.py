"""Estimate the memory that a training step needs on one device, from shapes alone. Pure: no jax, nothing is allocated.

Axes: B sequences of a micro-batch on one device, T tokens, S keys, H heads, D embedding, F hidden units, V vocabulary;
H, F and V are those of one device. Sizes are in bytes; `c` is the size of an element in the dtype of the computation.

A step needs, at its peak,

    state                parameters and two moments, float32, as the mesh splits them: 12 bytes a parameter
    gradients            their sum and the update made of them, float32: 8 bytes a parameter
    saved                for each layer what its backward pass needs (below), and its weights in the dtype `c`
    the larger of
      one layer at work  what it saves without rematerialisation, times the layers of one period of the window
                         pattern, since their backward passes overlap; transient scores, B*H*T*S*4 once, or twice with
                         rematerialisation; with fsdp its gathered weights and their gradients
      the head at work   logits of a chunk, their exponentials and their slopes: 3*B*chunk*V*4; the gathered head, V*D*4

What a layer saves without rematerialisation follows from the derivative of each operation:

    scores               B*H*T*S*(4 + c): the softmax in float32 and in `c`; 4 more where scores have a cap
    heads                queries and mixed values B*T*H*E*c each, keys and values likewise
    residual stream      3 arrays B*T*D for each norm, of which 2 in float32, split along tokens over sp and mp;
                         and the whole input of each block, B*T*D*c
    feed-forward         n*B*T*F*c, n by the activation (`ACTIVATION_ARRAYS`), 2 more with a gate

With a policy of rematerialisation it saves its input and the matrix products that the policy names.

The formula was fitted to what XLA plans for CPU devices (`python -m bench.compiled_memory` prints both). There
bfloat16 is widened to float32 and saved so, which is why `Run.itemsize` is 4 for it on a CPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from trainer.models.architecture import NO_SOFTCAP, ArchConfig, window_period
from trainer.models.mesh import RESIDUAL_SEQ_CHOICES, Mesh, Rules, partition_spec
from trainer.models.param_tree import ParamLeaf
from trainer.models.parameters import DECODER, ENCODER

FLOAT32 = 4
STATE_COPIES = 3  # a parameter and its two moments
GRADIENT_COPIES = 2  # a gradient and the update
LOGIT_COPIES = 3
ACTIVATION_ARRAYS = {  # arrays [B, T, F] that the derivative of a feed-forward part without a gate needs
    "gelu": 4, "gelu_new": 6, "gelu_pytorch_tanh": 6, "gelu_fast": 6, "quick_gelu": 4, "silu": 4, "swish": 4, "relu": 3,
}  # fmt: skip
NORMS_PER_BLOCK = {
    "pre": 2,
    "post": 2,
    "parallel": 2,
    "parallel_one_norm": 1,
    "sandwich": 4,
}  # of a layer, by `Traits.residual`
SAVES_ALL = ("none", "everything_saveable")
SAVES_DOTS = ("dots_saveable", "checkpoint_dots")
SAVES_WEIGHT_DOTS = ("dots_with_no_batch_dims_saveable", "checkpoint_dots_with_no_batch_dims")


@dataclass(frozen=True, slots=True)
class MemoryInputs:
    """What the memory of a training step depends on.

    Attributes:
        leaves: The model's parameters by path.
        mesh: The mesh, resolved; None for one device.
        rules: How the mesh splits logical dims.
        sequences: Sequences of a micro-batch, over all devices.
        length: Tokens of a sequence, or of a target.
        source_length: Tokens that an encoder reads; 0 without one.
        itemsize: Bytes of an element in the dtype of the computation, as the devices store it.
        remat: The rematerialisation policy of layers.
        head_chunk: Tokens of a row whose logits exist at a time; -1 for all.
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

    @property
    def num_experts(self) -> int:
        """Experts of a layer; 0 without any."""
        return self._extent("experts")

    @property
    def embed_size(self) -> int:
        """The width of the residual stream, which is whole on each device."""
        return self._extent("embed")

    def local_extent(self, dim: str) -> int:
        """Extent on one device of a logical dim of the parameters; 0 if the model lacks it."""
        return self._extent(dim) // self.num_shards(dim)

    def num_shards(self, dim: str) -> int:
        """Into how many parts the mesh splits a logical dim of activations."""
        return self._num_shards(dim, self._extent(dim), self.rules)

    @property
    def local_batch_size(self) -> int:
        """Sequences of a micro-batch on one device."""
        return self.micro_batch_size // (self.axis_size("dp") * self.axis_size("fsdp"))

    def num_residual_shards(self, length: int) -> int:
        """Into how many parts the residual stream is split along tokens."""
        return self._num_shards("residual_seq", length, {"residual_seq": RESIDUAL_SEQ_CHOICES})

    def axis_size(self, axis: str) -> int:
        """Devices along a mesh axis."""
        return self.mesh.size(axis) if self.mesh else 1

    def local_leaf_size(self, leaf: ParamLeaf, is_gathered: bool = False) -> int:
        """Elements of a parameter on one device; `gathered`: after the all-gather over fsdp."""
        found = partition_spec(leaf.dims, leaf.shape, self.mesh, self.rules) if self.mesh else None
        axes = [axis for dim in found.mesh_axes for axis in dim] if found else []
        return math.prod(leaf.shape) // math.prod(self.axis_size(a) for a in axes if not (is_gathered and a == "fsdp"))

    def leaf_extent(self, leaf: ParamLeaf, dim_name: str) -> int:
        """Extent of a logical dim of one parameter; 1 if the parameter lacks it."""
        return math.prod(extent for dim, extent in zip(leaf.dims, leaf.shape) if dim and dim[0] == dim_name)

    def _extent(self, dim: str) -> int:
        extents = (self.leaf_extent(leaf, dim) for leaf in self.leaves.values() if (dim,) in [d[:1] for d in leaf.dims])
        return next(extents, 0)

    def _num_shards(self, dim: str, extent: int, rules: Rules) -> int:
        return partition_spec([(dim,)], (extent,), self.mesh, rules).shards_per_dim[0] if self.mesh and extent else 1


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes that one device needs for a training step.

    Attributes:
        parameters, moments, gradients: Of the whole model, as the mesh splits it.
        saved: Activations of all layers that wait for the backward pass, and the layers' weights.
        layer: The working set of one layer's backward pass.
        head: The working set of head and loss.
        scores: Attention scores of one layer, [batch, heads, queries, keys] in float32; part of `layer`.
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
        """Parameters and moments: they exist all the time."""
        return self.parameters + self.moments

    @property
    def activations(self) -> int:
        """What comes and goes within a step, gradients apart, at its peak."""
        return self.saved + max(self.layer, self.head)

    @property
    def peak(self) -> int:
        """All of it."""
        return self.state + self.gradients + self.activations


def estimate_memory(inputs: MemoryInputs) -> MemoryEstimate:
    """Estimate what a training step needs on one device, by the formula of this module."""
    count = sum(inputs.local_leaf_size(leaf) for leaf in inputs.leaves.values())
    stacks = list(_layer_stacks(inputs))
    return MemoryEstimate(
        parameters=FLOAT32 * count,
        moments=FLOAT32 * (STATE_COPIES - 1) * count,
        gradients=FLOAT32 * GRADIENT_COPIES * count,
        saved=sum(
            len(stack.arch_config.sliding_windows) * stack.saved_nbytes + stack.weight_nbytes for stack in stacks
        ),
        layer=max(stack.working_set_nbytes for stack in stacks),
        head=_lm_head_nbytes(inputs),
        scores=max(stack.score_nbytes for stack in stacks),
    )


def _lm_head_nbytes(inputs: MemoryInputs) -> int:
    chunk = inputs.seq_length if inputs.head_chunk_size == -1 else min(inputs.head_chunk_size, inputs.seq_length)
    logits = inputs.local_batch_size * chunk * inputs.local_extent("vocab")
    head = inputs.leaves.get("head.weight") or inputs.leaves["embed.tokens"]
    return FLOAT32 * (LOGIT_COPIES * logits + inputs.local_leaf_size(head, is_gathered=True))


def _layer_stacks(inputs: MemoryInputs) -> Iterable[_LayerStack]:
    """The layers of a decoder, and those of the encoder before it."""
    encoder = inputs.arch_config.encoder
    keys = {"attn": inputs.seq_length} | ({"cross": inputs.source_length} if encoder else {})
    yield _LayerStack(inputs, inputs.arch_config, f"{DECODER}." if encoder else "", inputs.seq_length, keys)
    if encoder:
        length = inputs.source_length
        yield _LayerStack(inputs, encoder, f"{ENCODER}.", length, {"attn": length})


@dataclass(frozen=True, slots=True)
class _LayerStack:
    """The layers of one half of a model, of `length` tokens; `keys`: tokens that each attention of a layer sees."""

    inputs: MemoryInputs
    arch_config: ArchConfig
    prefix: str
    seq_length: int
    kv_lengths: Mapping[str, int]

    @property
    def score_nbytes(self) -> int:
        """The largest scores of a layer, float32."""
        return FLOAT32 * max(map(self._score_size, self.kv_lengths.values()))

    @property
    def weight_nbytes(self) -> int:
        """The weights of all layers, as they are computed in."""
        return self.inputs.itemsize * sum(map(self.inputs.local_leaf_size, self._layer_leaves()))

    @property
    def saved_nbytes(self) -> int:
        """What one layer keeps for its backward pass, by the policy; its weights apart."""
        run, stream = self.inputs, self._residual_size()
        if run.remat_policy in SAVES_ALL:
            return self._saved_without_remat_nbytes()
        kept = stream * run.itemsize // run.num_residual_shards(self.seq_length)
        if run.remat_policy in SAVES_DOTS + SAVES_WEIGHT_DOTS:
            experts = run.num_experts if self.arch_config.experts_per_token else 1
            kept += run.itemsize * experts * (stream + self._mlp_hidden_size() * (1 + self.arch_config.has_gated_mlp))
            kept += run.itemsize * stream * len(self.kv_lengths)
            kept += run.itemsize * (self._query_size() + self._kv_size()) * len(self.kv_lengths)
        if run.remat_policy in SAVES_DOTS:
            kept += sum(
                self._score_size(keys) * FLOAT32 + self._query_size() * run.itemsize
                for keys in self.kv_lengths.values()
            )
        return kept

    @property
    def working_set_nbytes(self) -> int:
        """The working set of a layer's backward pass."""
        transient = self.score_nbytes * (1 if self.inputs.remat_policy in SAVES_ALL else 2)
        return (
            window_period(self.arch_config.sliding_windows) * self._saved_without_remat_nbytes()
            + self._expert_nbytes()
            + transient
            + self._gathered_nbytes()
        )

    def _saved_without_remat_nbytes(self) -> int:
        """What a layer saves without rematerialisation."""
        run, stream = self.inputs, self._residual_size()
        scores = sum(map(self._score_size, self.kv_lengths.values()))
        per_score = FLOAT32 + run.itemsize + (FLOAT32 if self.arch_config.attn_logit_softcap != NO_SOFTCAP else 0)
        heads = 2 * run.itemsize * (self._query_size() + self._kv_size() // 2) * len(self.kv_lengths)
        norms = NORMS_PER_BLOCK[self.arch_config.block_type] + len(self.kv_lengths) - 1
        split = norms * stream * (2 * FLOAT32 + run.itemsize) // run.num_residual_shards(self.seq_length)
        whole = (1 + len(self.kv_lengths)) * stream * run.itemsize
        hidden = 0 if self.arch_config.experts_per_token else self._mlp_nbytes()
        return scores * per_score + heads + split + whole + hidden

    def _expert_nbytes(self) -> int:
        """Hidden units of the one expert at work."""
        return self._mlp_nbytes() if self.arch_config.experts_per_token else 0

    def _mlp_nbytes(self) -> int:
        arrays = ACTIVATION_ARRAYS[self.arch_config.activation] + 2 * self.arch_config.has_gated_mlp
        return arrays * self.inputs.itemsize * self._mlp_hidden_size()

    def _gathered_nbytes(self) -> int:
        """Weights of a layer after the all-gather over fsdp, and their gradients before the reduction; of experts, of
        which one is at work at a time, one."""
        run, layers = self.inputs, len(self.arch_config.sliding_windows)
        if run.axis_size("fsdp") == 1:
            return 0
        counts = (
            run.local_leaf_size(leaf, is_gathered=True) // run.leaf_extent(leaf, "experts")
            for leaf in self._layer_leaves()
        )
        return (run.itemsize + FLOAT32) * sum(counts) // layers

    def _layer_leaves(self) -> list[ParamLeaf]:
        above = f"{self.prefix}layers."
        return [leaf for path, leaf in self.inputs.leaves.items() if path.startswith(above)]

    def _residual_size(self) -> int:
        return self.inputs.local_batch_size * self.seq_length * self.inputs.embed_size

    def _query_size(self) -> int:
        return (
            self.inputs.local_batch_size
            * self.seq_length
            * self.inputs.local_extent("heads")
            * self.inputs.local_extent("head_dim")
        )

    def _kv_size(self) -> int:
        """Keys and values together; each head's own where the mesh splits heads but not those of keys."""
        run = self.inputs
        heads = (
            run.local_extent("kv_heads")
            if run.num_shards("kv_heads") == run.num_shards("heads")
            else run.local_extent("heads")
        )
        heads = heads or run.local_extent("heads")
        return 2 * run.local_batch_size * self.seq_length * heads * run.local_extent("head_dim")

    def _mlp_hidden_size(self) -> int:
        return self.inputs.local_batch_size * self.seq_length * self.inputs.local_extent("mlp")

    def _score_size(self, kv_length: int) -> int:
        return self.inputs.local_batch_size * self.inputs.local_extent("heads") * self.seq_length * kv_length
