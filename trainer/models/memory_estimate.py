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

from trainer.models.architecture import NO_CAP, Traits, period
from trainer.models.mesh import RESIDUAL_SEQ, Mesh, Rules, spec
from trainer.models.parameters import DECODER, ENCODER
from trainer.models.tree import Leaf

FLOAT32 = 4
STATE_COPIES = 3  # a parameter and its two moments
GRADIENT_COPIES = 2  # a gradient and the update
LOGIT_COPIES = 3
ACTIVATION_ARRAYS = {  # arrays [B, T, F] that the derivative of a feed-forward part without a gate needs
    "gelu": 4, "gelu_new": 6, "gelu_pytorch_tanh": 6, "gelu_fast": 6, "quick_gelu": 4, "silu": 4, "swish": 4, "relu": 3,
}  # fmt: skip
NORMS = {"pre": 2, "post": 2, "parallel": 2, "parallel_one_norm": 1, "sandwich": 4}  # of a layer, by `Traits.residual`
SAVES_ALL = ("none", "everything_saveable")
SAVES_DOTS = ("dots_saveable", "checkpoint_dots")
SAVES_WEIGHT_DOTS = ("dots_with_no_batch_dims_saveable", "checkpoint_dots_with_no_batch_dims")


@dataclass(frozen=True, slots=True)
class Run:
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

    traits: Traits
    leaves: Mapping[str, Leaf]
    mesh: Mesh | None
    rules: Rules
    sequences: int
    length: int
    source_length: int = 0
    itemsize: int = FLOAT32
    remat: str = "none"
    head_chunk: int = 512

    @property
    def experts(self) -> int:
        """Experts of a layer; 0 without any."""
        return self._extent("experts")

    @property
    def embed(self) -> int:
        """The width of the residual stream, which is whole on each device."""
        return self._extent("embed")

    def local(self, name: str) -> int:
        """Extent on one device of a logical dim of the parameters; 0 if the model lacks it."""
        return self._extent(name) // self.parts(name)

    def parts(self, name: str) -> int:
        """Into how many parts the mesh splits a logical dim of activations."""
        return self._parts(name, self._extent(name), self.rules)

    @property
    def local_sequences(self) -> int:
        """Sequences of a micro-batch on one device."""
        return self.sequences // (self.size("dp") * self.size("fsdp"))

    def residual_parts(self, length: int) -> int:
        """Into how many parts the residual stream is split along tokens."""
        return self._parts("residual_seq", length, {"residual_seq": RESIDUAL_SEQ})

    def size(self, axis: str) -> int:
        """Devices along a mesh axis."""
        return self.mesh.size(axis) if self.mesh else 1

    def leaf_count(self, leaf: Leaf, gathered: bool = False) -> int:
        """Elements of a parameter on one device; `gathered`: after the all-gather over fsdp."""
        found = spec(leaf.dims, leaf.shape, self.mesh, self.rules) if self.mesh else None
        axes = [axis for dim in found.axes for axis in dim] if found else []
        return math.prod(leaf.shape) // math.prod(self.size(a) for a in axes if not (gathered and a == "fsdp"))

    def extent_of(self, leaf: Leaf, name: str) -> int:
        """Extent of a logical dim of one parameter; 1 if the parameter lacks it."""
        return math.prod(extent for dim, extent in zip(leaf.dims, leaf.shape) if dim and dim[0] == name)

    def _extent(self, name: str) -> int:
        extents = (self.extent_of(leaf, name) for leaf in self.leaves.values() if (name,) in [d[:1] for d in leaf.dims])
        return next(extents, 0)

    def _parts(self, name: str, extent: int, rules: Rules) -> int:
        return spec([(name,)], (extent,), self.mesh, rules).parts[0] if self.mesh and extent else 1


@dataclass(frozen=True, slots=True)
class Estimate:
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


def estimate(run: Run) -> Estimate:
    """Estimate what a training step needs on one device, by the formula of this module."""
    count = sum(run.leaf_count(leaf) for leaf in run.leaves.values())
    stacks = list(_stacks(run))
    return Estimate(
        parameters=FLOAT32 * count,
        moments=FLOAT32 * (STATE_COPIES - 1) * count,
        gradients=FLOAT32 * GRADIENT_COPIES * count,
        saved=sum(len(stack.traits.windows) * stack.saved + stack.weights for stack in stacks),
        layer=max(stack.work for stack in stacks),
        head=_head(run),
        scores=max(stack.scores for stack in stacks),
    )


def _head(run: Run) -> int:
    chunk = run.length if run.head_chunk == -1 else min(run.head_chunk, run.length)
    logits = run.local_sequences * chunk * run.local("vocab")
    head = run.leaves.get("head.weight") or run.leaves["embed.tokens"]
    return FLOAT32 * (LOGIT_COPIES * logits + run.leaf_count(head, gathered=True))


def _stacks(run: Run) -> Iterable[_Stack]:
    """The layers of a decoder, and those of the encoder before it."""
    encoder = run.traits.encoder
    keys = {"attn": run.length} | ({"cross": run.source_length} if encoder else {})
    yield _Stack(run, run.traits, f"{DECODER}." if encoder else "", run.length, keys)
    if encoder:
        length = run.source_length
        yield _Stack(run, encoder, f"{ENCODER}.", length, {"attn": length})


@dataclass(frozen=True, slots=True)
class _Stack:
    """The layers of one half of a model, of `length` tokens; `keys`: tokens that each attention of a layer sees."""

    run: Run
    traits: Traits
    prefix: str
    length: int
    keys: Mapping[str, int]

    @property
    def scores(self) -> int:
        """The largest scores of a layer, float32."""
        return FLOAT32 * max(map(self._score_count, self.keys.values()))

    @property
    def weights(self) -> int:
        """The weights of all layers, as they are computed in."""
        return self.run.itemsize * sum(map(self.run.leaf_count, self._layer_leaves()))

    @property
    def saved(self) -> int:
        """What one layer keeps for its backward pass, by the policy; its weights apart."""
        run, stream = self.run, self._stream()
        if run.remat in SAVES_ALL:
            return self._all()
        kept = stream * run.itemsize // run.residual_parts(self.length)
        if run.remat in SAVES_DOTS + SAVES_WEIGHT_DOTS:
            experts = run.experts if self.traits.experts_per_token else 1
            kept += run.itemsize * experts * (stream + self._hidden_count() * (1 + self.traits.gated))
            kept += run.itemsize * stream * len(self.keys)
            kept += run.itemsize * (self._queries() + self._keys_values()) * len(self.keys)
        if run.remat in SAVES_DOTS:
            kept += sum(
                self._score_count(keys) * FLOAT32 + self._queries() * run.itemsize for keys in self.keys.values()
            )
        return kept

    @property
    def work(self) -> int:
        """The working set of a layer's backward pass."""
        transient = self.scores * (1 if self.run.remat in SAVES_ALL else 2)
        return period(self.traits.windows) * self._all() + self._expert() + transient + self._gathered()

    def _all(self) -> int:
        """What a layer saves without rematerialisation."""
        run, stream = self.run, self._stream()
        scores = sum(map(self._score_count, self.keys.values()))
        per_score = FLOAT32 + run.itemsize + (FLOAT32 if self.traits.score_cap != NO_CAP else 0)
        heads = 2 * run.itemsize * (self._queries() + self._keys_values() // 2) * len(self.keys)
        norms = NORMS[self.traits.residual] + len(self.keys) - 1
        split = norms * stream * (2 * FLOAT32 + run.itemsize) // run.residual_parts(self.length)
        whole = (1 + len(self.keys)) * stream * run.itemsize
        hidden = 0 if self.traits.experts_per_token else self._hidden()
        return scores * per_score + heads + split + whole + hidden

    def _expert(self) -> int:
        """Hidden units of the one expert at work."""
        return self._hidden() if self.traits.experts_per_token else 0

    def _hidden(self) -> int:
        arrays = ACTIVATION_ARRAYS[self.traits.activation] + 2 * self.traits.gated
        return arrays * self.run.itemsize * self._hidden_count()

    def _gathered(self) -> int:
        """Weights of a layer after the all-gather over fsdp, and their gradients before the reduction; of experts, of
        which one is at work at a time, one."""
        run, layers = self.run, len(self.traits.windows)
        if run.size("fsdp") == 1:
            return 0
        counts = (
            run.leaf_count(leaf, gathered=True) // run.extent_of(leaf, "experts") for leaf in self._layer_leaves()
        )
        return (run.itemsize + FLOAT32) * sum(counts) // layers

    def _layer_leaves(self) -> list[Leaf]:
        above = f"{self.prefix}layers."
        return [leaf for path, leaf in self.run.leaves.items() if path.startswith(above)]

    def _stream(self) -> int:
        return self.run.local_sequences * self.length * self.run.embed

    def _queries(self) -> int:
        return self.run.local_sequences * self.length * self.run.local("heads") * self.run.local("head_dim")

    def _keys_values(self) -> int:
        """Keys and values together; each head's own where the mesh splits heads but not those of keys."""
        run = self.run
        heads = run.local("kv_heads") if run.parts("kv_heads") == run.parts("heads") else run.local("heads")
        heads = heads or run.local("heads")
        return 2 * run.local_sequences * self.length * heads * run.local("head_dim")

    def _hidden_count(self) -> int:
        return self.run.local_sequences * self.length * self.run.local("mlp")

    def _score_count(self, keys: int) -> int:
        return self.run.local_sequences * self.run.local("heads") * self.length * keys
