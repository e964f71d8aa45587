"""Bytes that each device sends in a training step, by mesh axis, from shapes alone.

A ring of n devices sends (n - 1) / n of an array for an all-gather or a reduce-scatter, and twice that for an
all-reduce. Per micro-batch, in the dtype of the computation unless stated otherwise:

    fsdp   an all-gather of all parameters in the forward and in the backward pass, and a reduce-scatter of their
           gradients in float32
    dp     an all-reduce of the gradients in float32
    mp     in each layer, an all-gather of the residual stream [B, T, D] before attention and before the MLP, and a
           reduce-scatter after them, forward and backward, and once more if the layer is rematerialized. The same
           once for the embedding and the head
    sp     keys and values travel around the ring in the forward pass, and in the backward pass with their gradients
           in float32. In addition an all-reduce of the gradients of parameters in float32

An axis over s slices of m devices each is reduced within the slices first. A device then sends (s - 1) / s of its part,
1 / m of the array, over the slow network, and (m - 1) / m of the array within its slice.

XLA may merge or move collectives, and sends less where it reduces in a smaller dtype.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from prepcli.models.activation_memory import SAVES_ALL
from prepcli.models.layer_memory import LayerStack
from prepcli.models.memory_estimate import layer_stacks
from prepcli.models.memory_inputs import FLOAT32, MemoryInputs
from prepcli.models.mesh import ONE_SLICE, SliceCounts
from trainer.planning.step_flops import row_length

# All-gathers of a weight per micro-batch: in the forward and in the backward pass.
WEIGHT_GATHERS = 2
# Blocks with one gather and one scatter of the residual stream, for attention and MLP together.
ONE_STEP_BLOCKS = ("parallel", "parallel_one_norm", "single")
# Part of the paths of an MLP or experts.
MLP_PART = ".mlp."


@dataclass(frozen=True, slots=True)
class AxisTraffic:
    """The bytes that a device sends along a mesh axis in a step.

    Attributes:
        axis: Name of the axis.
        size: Devices along the axis.
        nbytes: Bytes sent within a slice.
        overlaps: Whether other work can hide the communication: the result is not needed at once.
        num_slices: Slices along the axis.
        slow_nbytes: Bytes sent between slices.
    """

    axis: str
    size: int
    nbytes: int
    overlaps: bool
    num_slices: int = 1
    slow_nbytes: int = 0


def axis_traffic(inputs: MemoryInputs, slices: SliceCounts = ONE_SLICE) -> list[AxisTraffic]:
    """Return the traffic of each mesh axis of more than one device, by the rules in this module's docstring.

    Args:
        inputs: Inputs of the estimates.
        slices: Number of slices along each axis.
    """
    counts = {"dp": _gradient_nbytes, "fsdp": _fsdp_nbytes, "mp": _mp_nbytes, "sp": _sp_nbytes}
    return [
        _divide_traffic(axis, inputs, inputs.accumulate * count(inputs), slices.get(axis, 1))
        for axis, count in counts.items()
        if inputs.axis_size(axis) > 1
    ]


def _divide_traffic(axis: str, inputs: MemoryInputs, nbytes: int, num_slices: int) -> AxisTraffic:
    """Divide the `nbytes` of all collectives of an axis into traffic within and between slices."""
    # E.g. 8 devices in 2 slices of m = 4: an array of N bytes is reduced to N/4 per device within
    # the slice (3/4 N sent), then each part crosses the slow network (1/2 of N/4).
    size = inputs.axis_size(axis)
    per_slice = size // num_slices
    return AxisTraffic(
        axis,
        size,
        nbytes * (per_slice - 1) // per_slice,
        axis != "mp",
        num_slices=num_slices,
        slow_nbytes=nbytes * (num_slices - 1) // (num_slices * per_slice),
    )


def _gradient_nbytes(inputs: MemoryInputs) -> int:
    """Return the bytes of an all-reduce of the gradients on each device, in rings."""
    return 2 * FLOAT32 * sum(map(inputs.local_leaf_size, inputs.leaves.values()))


def _fsdp_nbytes(inputs: MemoryInputs) -> int:
    """Return the bytes of all collectives over fsdp.

    A split leaf is all-gathered and its gradient reduce-scattered. The gradient of an unsplit leaf is
    all-reduced.
    """
    num_bytes = 0
    for leaf in inputs.leaves.values():
        gathered_size = inputs.local_leaf_size(leaf, is_gathered=True)
        local_size = inputs.local_leaf_size(leaf)
        if gathered_size > local_size:
            element_nbytes = WEIGHT_GATHERS * inputs.itemsize + FLOAT32
        else:
            # An all-reduce sends as much as a reduce-scatter and an all-gather, in float32.
            element_nbytes = 2 * FLOAT32
        num_bytes += gathered_size * element_nbytes
    return num_bytes


def _mp_nbytes(inputs: MemoryInputs) -> int:
    """Return the bytes of the residual stream in all all-gathers and reduce-scatters over mp."""
    # Encoder and decoder layers may have different lengths, so each stack is counted separately.
    layers = sum(_mp_residuals(inputs, stack) for stack in layer_stacks(inputs))
    # Embedding and head together: one gather and one scatter, forward and backward.
    head_and_embedding = 2 * 2 * _residual_size(inputs, inputs.seq_length)
    return inputs.itemsize * (layers + head_and_embedding)


def _mp_residuals(inputs: MemoryInputs, stack: LayerStack) -> int:
    """Return the elements that the layers of a stack gather and scatter."""
    num_blocks = stack.num_mixings
    if stack.arch_config.block_type in ONE_STEP_BLOCKS:
        num_blocks = 1
    elif any(MLP_PART in leaf.path for leaf in stack.layer_leaves()):
        num_blocks += 1
    # Passes: forward, backward, and the forward pass again if the layer is rematerialized. Each has a
    # gather and a scatter per block.
    num_passes = 2 if inputs.remat_policy in SAVES_ALL else 3
    return (
        2
        * num_passes
        * num_blocks
        * stack.num_layers
        * _residual_size(inputs, row_length(inputs, stack))
    )


def _residual_size(inputs: MemoryInputs, length: int) -> int:
    """Return the elements of the residual stream [B, T, D] that a device computes with."""
    return inputs.local_batch_size * length * inputs.embed_size // inputs.num_sequence_shards


def _sp_nbytes(inputs: MemoryInputs) -> int:
    """Return the bytes sent over sp: keys, values and their gradients in rings, and gradients of parameters."""
    return _gradient_nbytes(inputs) + sum(
        _ring_nbytes(inputs, stack) for stack in layer_stacks(inputs)
    )


def _ring_nbytes(inputs: MemoryInputs, stack: LayerStack) -> int:
    """Return the bytes of keys and values that a stack's layers send, or 0 if sp does not split them."""
    length = row_length(inputs, stack)
    if inputs.num_sequence_shards == 1:
        return 0
    # Keys and values [B, T, K, E] of the whole row pass each device once per pass. A rematerialized
    # layer repeats its forward pass. Their gradients are sent too, in float32.
    kv_heads = inputs.local_extent(stack.kv_heads) or inputs.local_extent("heads")
    num_passes = 2 if inputs.remat_policy in SAVES_ALL else 3
    head_size = inputs.local_extent(stack.head_dim) + stack.local_value_dim
    kv_size = inputs.local_batch_size * length * kv_heads * head_size
    return stack.num_layers * kv_size * (num_passes * inputs.itemsize + FLOAT32)


def axis_strides(inputs: MemoryInputs) -> Iterator[tuple[str, int]]:
    """Yield each mesh axis with the distance of neighbours along it, in devices."""
    # Devices are in row-major order of the mesh: with (dp, fsdp, mp) = (2, 4, 8) neighbours along
    # mp are 1 apart, along fsdp 8, along dp 32.
    stride = 1
    if inputs.mesh is None:
        return
    for axis in reversed(inputs.mesh.names):
        yield axis, stride
        stride *= inputs.axis_size(axis)
