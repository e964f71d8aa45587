"""Memory estimate of a training step on one device, from shapes alone, without JAX or allocation.

Axes: B sequences of a micro-batch on one device, T tokens, S keys, H heads, E head width, D embedding width, F hidden
units of the MLP, V vocabulary. T, S, H, F and V count one device's share. Sizes are in bytes. `c` is the size of an
element in the dtype of the computation.

At its peak a step needs

    state                parameters and the optimizer state, split by the mesh: 12 bytes per parameter in float32 with
                         two moments in float32, 10 in bfloat16. With LoRA the parameters except the adapters keep
                         their dtype
    gradients            their sum and the update, float32: 8 bytes per trained parameter. XLA for CPUs updates in
                         place, but copies the moments during the whole step, and has the gradient of the LM head
                         too, float32. With exact reduction also
                         the unsplit sums of log2(n) + 1 subtrees, for n logical shards of the device, and with fsdp
                         the gathered parameters, float32: 4 bytes per parameter of the whole model each. Frozen
                         parameters have one copy instead of the sums
    batch                token ids, targets and weights of all micro-batches, segment ids and positions of packed
                         documents, and ids and weights of sources: 4 bytes each
    saved                for each layer the inputs of its backward pass (below), and its weights in the dtype `c`.
                         On CPUs, where weights are not cast, the same bytes are the gradients of the layers
    the larger of
      one layer's        the activations it reads; the larger of transient scores, B*H*T*S*4 once, or twice with
      backward pass      rematerialization, less the activations that are computed again later, and the gradients of
                         the MLP, 2*B*T*F*c, or 3 if it is gated; with fsdp its gathered weights and their gradients;
                         with experts the rows of all assignments (below). The backward passes of the layers of one
                         period of kinds of layers overlap: each other layer of the period adds what a layer
                         saves without rematerialization, and with rematerialization its transient dense scores.
                         So does each dense layer before the scan of MoE layers. In a period with both attention
                         and recurrent mixers each other layer adds the inputs of its backward pass that the
                         policy does not save, without two gradients of a gated MLP, and copies of what the loop of
                         its mixer or of its experts reads. On CPUs so does each layer outside the scan of such a
                         model, and the weights of all layers are sliced into copies, float32
      the LM head        logits of a chunk and their gradients: 2*B*chunk*V*4. With fsdp the gathered head, twice, and
                         its gradient before it is reduced: V*D*(2*c + 4). On CPUs also hidden states of all tokens with
                         their gradients, 2*B*T*D*c, and the layers outside the scan of a hybrid model, which XLA
                         computes again before the head has ended

The derivative of each operation determines the activations that the backward pass of a layer reads:

    scores               B*H*T*S*(4 + c): the softmax in float32 and in `c`, and 4 more with a softcap. On CPUs one byte
                         more for the mask, without rematerialization. T5 has a bias and its gradient, 2*H*T*T*4
                         Blockwise attention saves B*H*T*4. Transient are the scores of a tile, four times (on
                         accelerators once), the gradients of keys and values in float32, and
                         copies of queries, keys, values and gradients in tiles, which CPUs keep in bfloat16
                         With sp, two copies of the keys and values of another device with their float32 gradients
                         are transient, and B*T*H*E*4 for the gradient of queries so far
    heads                queries and attention output B*T*H*E*c each, keys and values likewise
    residual stream      3 arrays B*T*D per norm, 2 of them in float32, split along tokens over sp and mp,
                         and the unsplit input of each block, B*T*D*c
    MLP                  n*B*T*F*c with n by activation (`ACTIVATION_ARRAYS`), 2 more if it is gated
    latent attention     as heads, with the width of values in place of E where they differ
    recurrent mixers     in place of heads: 5*B*T*C*c of a short convolution of C channels. Of a gated delta net
                         or of Mamba-2, B*T*C*(7*c + 4) for the C channels of its convolutions, B*T*V*(2*c + 24) for
                         the V elements of its output, and one state per chunk of tokens, float32. Of Mamba,
                         B*T*C*(5*c + 48) for the C channels of its scan, and states of one chunk of tokens
    differential         as heads with values twice as wide, and the norm of the difference
    attention
    inputs from tokens   B*T*P*c of each layer with an input of P elements, and n + 1 such arrays of its gate
    experts              only the input, and the hidden units of shared experts as of an MLP. K outputs per token and
                         their gradients, 2*B*T*K*D*c, are transient, as are the matrices of one expert, gathered,
                         with their gradients, and a block of hidden units

Without rematerialization all of them are saved, except those of norms before projections and of activation functions,
which are computed again: of the MLP, the products with `up` and `gate` are saved, and of gated delta nets and Mamba-2
B*T*C*(2*c + 4), B*T*V*(2*c + 8) and the states. The inputs of blocks are saved split like the residual stream.

With chunks of tokens, T is the length of a chunk in the arrays of the MLP, of experts, and of norms before projections,
and two gradients of the residual stream, B*T*D*4 each, are transient. On accelerators they are transient in any case,
and mp does not split them. Without chunks they take the place of norms.

With a rematerialization policy a layer saves its input and the matrix products or activations that the policy names.
With `offload` the inputs of layers are saved in host memory, which the peak does not include.

The formula is fitted to XLA's memory plans for CPU devices. `python -m bench.memory_points` compares both. On a CPU
bfloat16 is widened to float32 and saved as float32, so `MemoryInputs.itemsize` is 4 for it. On accelerators the
weights of the next layer are gathered meanwhile. The terms for accelerators are fitted to the plans for TPUs of the
libtpu that jax 0.10.2 and jax 0.12.0.1 require, 0.0.42.1 and 0.0.50.1. libtpu 0.0.52, which neither requires, plans 25
to 28 % less for LLaMA 7B and 13B.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from prepcli.algebra.axis_map import DENSE_LAYERS, LAYERS, MIXER_LAYERS, WIDE_LAYERS
from prepcli.models.activation_memory import chunk_length
from prepcli.models.param_tree import ParamLeaf
from prepcli.models.parameters import DECODER, ENCODER
from trainer.planning.layer_memory import LayerStack
from trainer.planning.memory_inputs import FLOAT32, MemoryInputs

# Moments of a parameter in float32, if the inputs have no optimizer state.
MOMENTS = 2
# Copies of a gradient: itself and the update.
GRADIENT_COPIES = 2
LOGIT_COPIES = 2
# Logical dim without parameters.
NO_MLP = ""


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """The bytes that a training step needs on one device."""

    parameters: int  # Parameters of the whole model, split by the mesh
    moments: int  # Moments of the optimizer
    gradients: int  # Gradients and updates
    saved: int  # Activations saved by all layers for the backward pass, and the layers' weights
    layer: int  # Working set of one layer's backward pass
    head: int  # Working set of the LM head and the loss
    scores: int  # Attention scores of one layer or tile, float32 [B, H, T, S]. Part of `layer`.
    batch: int  # Token ids, targets and weights of a step
    offloaded: int = 0  # Activations saved in host memory. Not part of the peak.

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
        return self.state + self.gradients + self.batch + self.activations


def estimate_memory(inputs: MemoryInputs) -> MemoryEstimate:
    """Estimate the memory of a training step on one device by the formula in this module's docstring."""
    # Parameters that are trained as a whole, next to adapters, are among both.
    stored = {**inputs.leaves}
    for path in inputs.adapters or {}:
        stored.pop(path, None)
    num_stored = sum(inputs.local_leaf_size(leaf) for leaf in stored.values())
    num_adapters = sum(inputs.local_leaf_size(leaf) for leaf in (inputs.adapters or {}).values())
    stacks = list(layer_stacks(inputs))
    if inputs.optimizer_state is None:
        optimizer_nbytes = FLOAT32 * MOMENTS * _num_trained(inputs)
    else:
        optimizer_nbytes = sum(map(inputs.local_state_nbytes, inputs.optimizer_state))
    # Tokens, targets and weights, and for packed documents segment ids and positions. A source has ids
    # and weights. All are 4 bytes wide.
    num_columns = 5 if inputs.has_segments else 3
    num_bytes = FLOAT32 * (num_columns * inputs.seq_length + 2 * inputs.source_length)
    batch_nbytes = inputs.accumulate * inputs.local_batch_size * num_bytes
    return MemoryEstimate(
        parameters=inputs.adapter_itemsize * num_adapters + inputs.stored_itemsize * num_stored,
        moments=optimizer_nbytes,
        gradients=_gradients_nbytes(inputs),
        saved=sum(stack.num_layers * stack.saved_nbytes + stack.weight_nbytes for stack in stacks)
        + sum(stack.position_bias_nbytes for stack in stacks)
        + _layer_slices_nbytes(inputs),
        layer=max(stack.working_set_nbytes for stack in stacks)
        + _first_layers_nbytes(inputs)
        + _other_layers_nbytes(inputs),
        head=_lm_head_nbytes(inputs) + sum(_unscanned_nbytes(inputs)),
        scores=max(stack.score_nbytes for stack in stacks),
        batch=batch_nbytes,
        offloaded=sum(stack.num_layers * stack.offloaded_nbytes for stack in stacks),
    )


def step_gradients_nbytes(inputs: MemoryInputs) -> int:
    """Return the bytes of gradients and updates of a whole step, and of the sums of an exact reduction."""
    return FLOAT32 * GRADIENT_COPIES * _num_trained(inputs) + _exact_reduction_nbytes(inputs)


def _gradients_nbytes(inputs: MemoryInputs) -> int:
    """Return the bytes of gradients and updates, and on CPUs of the gradient of the LM head and copies of moments."""
    nbytes = step_gradients_nbytes(inputs)
    head = _head_leaf(inputs)
    if inputs.plans_for_cpu and head.path in inputs.trained_leaves:
        nbytes += FLOAT32 * inputs.local_leaf_size(head)
    return nbytes


def _num_trained(inputs: MemoryInputs) -> int:
    """Return the number of trained parameters on one device."""
    return sum(map(inputs.local_leaf_size, inputs.trained_leaves.values()))


def _first_layers_nbytes(inputs: MemoryInputs) -> int:
    """Return the working set of the dense layers before the scan. XLA for CPUs computes them again during the scan."""
    # `_other_layers_nbytes` counts them for hybrid models.
    if not inputs.arch_config.dense_layers or not inputs.plans_for_cpu or _is_hybrid(inputs):
        return 0
    dense = next(stack for stack in layer_stacks(inputs) if DENSE_LAYERS in stack.groups)
    return inputs.arch_config.layer_schedule.num_first * dense.nbytes_while_others_run()


def _other_layers_nbytes(inputs: MemoryInputs) -> int:
    """Return the inputs of the other backward passes that overlap in a model with layers of several shapes."""
    scanned = _scanned_layers(inputs)
    period = list(scanned[: inputs.arch_config.layer_schedule.period])
    sizes = _overlapping_nbytes(inputs, period, is_scanned=True) + _unscanned_nbytes(inputs)
    return sum(sizes) - max(sizes, default=0)


def _unscanned_nbytes(inputs: MemoryInputs) -> list[int]:
    """Return the inputs of the backward pass of each layer outside the scan of a hybrid model, for CPUs."""
    # XLA for CPUs ignores the barriers around the layers, and computes them again early.
    if not inputs.plans_for_cpu:
        return []
    scanned = _scanned_layers(inputs)
    layers = range(len(inputs.arch_config.sliding_windows))
    outside = [layer for layer in layers if layer not in scanned]
    return _overlapping_nbytes(inputs, outside, is_scanned=False)


def _overlapping_nbytes(
    inputs: MemoryInputs, layers: Iterable[int], *, is_scanned: bool
) -> list[int]:
    """Return the inputs of the backward pass of each of some layers of a hybrid model."""
    if not _is_hybrid(inputs):
        return []
    stacks = _stacks_by_kind(inputs)
    kinds = [tuple(inputs.arch_config.group_indices[layer]) for layer in layers]
    return [stacks[kind].overlapping_nbytes(is_scanned=is_scanned) for kind in kinds]


def _stacks_by_kind(inputs: MemoryInputs) -> dict[tuple[str, ...], LayerStack]:
    """Return the layers of each kind by the groups of their parameters."""
    return {tuple(stack.groups): stack for stack in layer_stacks(inputs)}


def _scanned_layers(inputs: MemoryInputs) -> range:
    """Return the layers of the scan over periods. A single period is no loop."""
    schedule = inputs.arch_config.layer_schedule
    if schedule.num_periods > 1:
        return range(schedule.num_first, schedule.stop)
    return range(0)


def _is_hybrid(inputs: MemoryInputs) -> bool:
    """Return whether the model has layers of several shapes, e.g. with attention and with a recurrent mixer."""
    arch_config = inputs.arch_config
    return MIXER_LAYERS in arch_config.layer_groups or bool(arch_config.shape_groups)


def _layer_slices_nbytes(inputs: MemoryInputs) -> int:
    """Return the bytes of the weights of the layers of a hybrid model that overlap, for CPUs.

    XLA for CPUs slices them from the stacked weights. The loop over experts has gradients of the same size.
    """
    if not inputs.plans_for_cpu or not _is_hybrid(inputs):
        return 0
    scanned = _scanned_layers(inputs)
    period = scanned[: inputs.arch_config.layer_schedule.period]
    stacks = _stacks_by_kind(inputs)
    nbytes = 0
    for layer, kind in enumerate(map(tuple, inputs.arch_config.group_indices)):
        stack = stacks[kind]
        slice_nbytes = stack.weight_nbytes // stack.num_layers
        if layer in period and stack.arch_config.experts_per_token:
            nbytes += 2 * slice_nbytes
        elif layer in period or layer not in scanned:
            nbytes += slice_nbytes
    return nbytes


def _exact_reduction_nbytes(inputs: MemoryInputs) -> int:
    """Return the bytes of unsplit gradients and parameters of an exact reduction, or 0 for a fast one."""
    if not inputs.is_exact:
        return 0
    leaves = inputs.all_leaves.values()
    num_parameters = sum(math.prod(leaf.shape) for leaf in leaves)
    num_trained = sum(math.prod(leaf.shape) for leaf in inputs.trained_leaves.values())
    is_split = num_parameters > sum(inputs.local_leaf_size(leaf) for leaf in leaves)
    # log2(shards of the device) + 1: one sum per level of the tree, and the running one.
    num_sums = inputs.accumulate.bit_length()
    # XLA keeps another copy of frozen parameters during the loop over shards.
    num_copied = num_parameters - num_trained + num_parameters * is_split
    return FLOAT32 * (num_trained * num_sums + num_copied)


def _lm_head_nbytes(inputs: MemoryInputs) -> int:
    """Return the working set of the LM head and the loss."""
    length = inputs.local_length(inputs.seq_length)
    num_tokens = inputs.local_batch_size * chunk_length(inputs.head_chunk_size, length)
    num_logits = num_tokens * inputs.local_extent("vocab")
    nbytes = FLOAT32 * LOGIT_COPIES * num_logits
    if inputs.plans_for_cpu:
        # Hidden states of all tokens, and their gradients.
        nbytes += 2 * inputs.itemsize * inputs.local_batch_size * length * inputs.embed_size
    if inputs.axis_size("fsdp") == 1:
        return nbytes
    weight_size = inputs.local_leaf_size(_head_leaf(inputs), is_gathered=True)
    return nbytes + (2 * inputs.itemsize + FLOAT32) * weight_size


def _head_leaf(inputs: MemoryInputs) -> ParamLeaf:
    """Return the matrix of the LM head, which may be the embedding."""
    return inputs.leaves.get("head.weight") or inputs.leaves["embed.tokens"]


def largest_scores(inputs: MemoryInputs) -> list[int]:
    """Return the shape [B, H, T, S] of the largest attention scores that are in memory at once."""
    stack = max(layer_stacks(inputs), key=lambda stack: stack.score_nbytes)
    tile = inputs.score_tile(stack.seq_length, max(stack.kv_lengths.values()))
    return [inputs.local_batch_size, inputs.local_extent("heads"), *tile]


def layer_stacks(inputs: MemoryInputs) -> Iterable[LayerStack]:
    """Yield the decoder's layers, and the encoder's if there is one. Layers of different kinds are separate."""
    encoder = inputs.arch_config.encoder
    length = inputs.local_length(inputs.seq_length)
    source_length = inputs.local_length(inputs.source_length)
    decoder = LayerStack(
        inputs=inputs,
        arch_config=inputs.arch_config,
        prefix=f"{DECODER}." if encoder else "",
        seq_length=length,
        kv_lengths={"attn": length} | ({"cross": source_length} if encoder else {}),
        groups={LAYERS: len(inputs.arch_config.sliding_windows)},
    )
    if inputs.arch_config.layer_groups or inputs.arch_config.mixer_layers:
        yield from _split_by_group(decoder)
    else:
        yield decoder
    if encoder:
        yield LayerStack(
            inputs=inputs,
            arch_config=encoder,
            prefix=f"{ENCODER}.",
            seq_length=source_length,
            kv_lengths={"attn": source_length},
            groups={LAYERS: len(encoder.sliding_windows)},
        )


def _split_by_group(stack: LayerStack) -> Iterable[LayerStack]:
    """Yield the layers of each kind of a stack: dense and MoE layers, layers with attention and with a mixer."""
    arch_config = stack.arch_config
    layers_by_kind: dict[tuple[str, ...], list[int]] = {}
    for layer, indices in enumerate(arch_config.group_indices):
        layers_by_kind.setdefault(tuple(indices), []).append(layer)
    members = {**stack.groups, **{g: len(m) for g, m in arch_config.layer_groups.items()}}
    for kind, layers in layers_by_kind.items():
        is_dense = DENSE_LAYERS in kind
        has_mixer = layers[0] in arch_config.mixer_layers
        has_attention = layers[0] in arch_config.attention_layers
        has_mlp = arch_config.block_type != "single" or layers[0] in arch_config.feed_forward_layers
        has_experts = has_mlp and not is_dense
        yield replace(
            stack,
            arch_config=replace(
                arch_config,
                sliding_windows=tuple(arch_config.sliding_windows[layer] for layer in layers),
                dense_layers=(),
                experts_per_token=arch_config.experts_per_token if has_experts else 0,
                feed_forward_layers=(),
                mixer=arch_config.mixer if has_mixer else None,
                mixer_layers=tuple(range(len(layers))) if has_mixer else (),
                reusing_layers=(),
                shape_groups=(),
            ),
            kv_lengths=stack.kv_lengths if has_attention else {},
            groups={group: members[group] for group in kind},
            mlp_dim=_mlp_dim(stack.inputs, kind, has_mlp=has_mlp),
        )


def _mlp_dim(inputs: MemoryInputs, kind: tuple[str, ...], *, has_mlp: bool) -> str:
    """Return the logical dim of the hidden units of layers, by their groups. No parameter has the dim of NO_MLP."""
    if not has_mlp:
        return NO_MLP
    # The dense layers of Jamba are as wide as its experts.
    if DENSE_LAYERS in kind and inputs.extent("dense_mlp"):
        return "dense_mlp"
    return "wide_mlp" if WIDE_LAYERS in kind else "mlp"
