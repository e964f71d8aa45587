"""The time of a step: communication by mesh axis, and the rates of each kind of accelerator."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from prepcli.core.errors import Option, text, usage_error
from prepcli.core.formatting import did_you_mean_start
from prepcli.models.activation_memory import SAVES_ALL
from prepcli.models.attention_kernels import DeviceKind
from prepcli.models.mesh import MAX_DEVICES, ONE_SLICE, SliceCounts
from trainer.planning.layer_memory import LayerStack
from trainer.planning.memory_estimate import MemoryEstimate, layer_stacks, step_gradients_nbytes
from trainer.planning.memory_inputs import FLOAT32, MemoryInputs
from trainer.planning.step_flops import StepFlops, row_length

# Accelerators for which a training step can be planned, as data from their vendors.
#
# Memory is in decimal gigabytes although some vendors mean binary ones: the runtime keeps the
# difference for itself. Peaks are for dense bfloat16 matrix products. Bandwidths are in bytes
# per second that one device sends.
#
# Sources:
#     TPU memory, memory bandwidth, peak and pod size: Cloud TPU docs, "TPU v4", "TPU v5e", "TPU v5p",
#         "TPU v6e", "TPU7x" (https://docs.cloud.google.com/tpu/docs/v5p and its sibling pages). A
#         chip of TPU7x is two devices. Each has half of its memory and bandwidths.
#     TPU links along one axis of the torus, both directions, and data center network per chip: Austin
#         et al., "How to Scale Your Model", chapter 2 (https://jax-ml.github.io/scaling-book/tpus).
#         A TPU7x chip has links as fast as a v5p chip (Cloud TPU docs, "TPU7x").
#     GPU memory, memory bandwidth, peak and NVLink (half of the published figure, for one direction):
#         NVIDIA's data sheets of A100, H100 and H200, and of DGX B200 for one of its eight GPUs
#         (https://www.nvidia.com/en-us/data-center).
#     GPU network: the network cards of DGX A100 (200 Gb/s), DGX H100, H200 and B200 (400 Gb/s), one
#     per GPU.


GB = 10**9
TERA = 10**12
TPU = DeviceKind("tpu")
AMPERE, HOPPER, BLACKWELL = (DeviceKind("cuda", (major, 0)) for major in (8, 9, 10))


@dataclass(frozen=True, slots=True)
class Accelerator:
    """A kind of accelerator."""

    name: str  # Name in `--devices`
    device: DeviceKind  # Platform and compute capability, which decide on the attention kernel
    memory_nbytes: int  # Memory of one device
    peak_flops: float  # Dense bfloat16 operations per second
    memory_bandwidth: float  # Bytes per second between a device and its memory
    # Bytes per second that a device sends along one mesh axis within a domain
    link_bandwidth: float
    domain_size: int  # Devices that links connect: the chips of a pod, or the GPUs of a node
    network_bandwidth: float  # Bytes per second that a device sends to other domains

    def axis_bandwidth(self, size: int, stride: int) -> float:
        """Return the bytes per second that a device sends in a ring over a mesh axis.

        A ring inside one domain uses the links. A ring over several domains uses the network connections of all its
        devices in a domain.

        Args:
            size: Devices along the axis.
            stride: Distance of neighbours along the axis, in devices.
        """
        # E.g. nodes of 8 GPUs with a network card each, and an axis of 16 devices. With stride 1 a ring
        # has all 8 GPUs of a node, and their 8 // 1 = 8 cards. With stride 4 a ring has 2 GPUs of a
        # node, such as 0 and 4, and their 8 // 4 = 2 cards.
        if size * stride <= self.domain_size:
            return self.link_bandwidth
        return min(self.link_bandwidth, self.network_bandwidth * max(1, self.domain_size // stride))


_KINDS = (
    Accelerator("v4", TPU, 32 * GB, 275 * TERA, 1228 * GB, 90 * GB, 4096, 6.25 * GB),
    Accelerator("v5e", TPU, 16 * GB, 197 * TERA, 819 * GB, 90 * GB, 256, 3.125 * GB),
    Accelerator("v5p", TPU, 95 * GB, 459 * TERA, 2765 * GB, 180 * GB, 8960, 6.25 * GB),
    Accelerator("v6e", TPU, 32 * GB, 918 * TERA, 1640 * GB, 180 * GB, 256, 12.5 * GB),
    # A pod of 9,216 chips has 18,432 devices.
    Accelerator("tpu7x", TPU, 96 * GB, 1153.5 * TERA, 3690 * GB, 90 * GB, 18432, 6.25 * GB),
    Accelerator("A100-40", AMPERE, 40 * GB, 312 * TERA, 1555 * GB, 300 * GB, 8, 25 * GB),
    Accelerator("A100-80", AMPERE, 80 * GB, 312 * TERA, 2039 * GB, 300 * GB, 8, 25 * GB),
    Accelerator("H100", HOPPER, 80 * GB, 989 * TERA, 3350 * GB, 450 * GB, 8, 50 * GB),
    Accelerator("H200", HOPPER, 141 * GB, 989 * TERA, 4800 * GB, 450 * GB, 8, 50 * GB),
    Accelerator("B200", BLACKWELL, 180 * GB, 2250 * TERA, 8000 * GB, 900 * GB, 8, 50 * GB),
)
ACCELERATORS = {kind.name: kind for kind in _KINDS}
# `device_kind` of JAX -> name. PCIe and NVL cards are missing: they have other peaks.
JAX_KINDS = {
    "TPU v4": "v4",
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
    "TPU v6e": "v6e",
    "TPU7x": "tpu7x",
    "NVIDIA A100-SXM4-40GB": "A100-40",
    "NVIDIA A100-SXM4-80GB": "A100-80",
    "NVIDIA H100 80GB HBM3": "H100",
    "NVIDIA H200": "H200",
    "NVIDIA B200": "B200",
}


def accelerator_of(device_kind: str) -> Accelerator | None:
    """Return the accelerator that JAX calls `device_kind`, or None if it is unknown."""
    name = JAX_KINDS.get(device_kind)
    if name:
        return ACCELERATORS[name]
    return None


def _count_hint(devices: str, kinds: Mapping[str, str]) -> str:
    """Return the option for `8xH100` or `H100x8`, or an empty text for other values."""
    count = "([1-9][0-9]{0,6})"
    match = re.fullmatch(f"(?:{count} ?x ?)?(.+?)(?: ?x ?{count})?", devices.lower())
    if match is None or match[2] not in kinds:
        return ""
    return text("{}", Option("devices", f"{kinds[match[2]]}:{match[1] or match[3]}"))


def parse_devices(devices: str) -> tuple[Accelerator | None, int | None]:
    """Parse `KIND`, `KIND:NUMBER` or `NUMBER`, such as `v5p:256`.

    Returns:
        The kind and the number of devices, or None for the one that is not given.

    Raises:
        UsageError: The kind is unknown, or the number is not an integer from 1 to MAX_DEVICES.
    """
    option = Option("devices", f"{devices:.60}")
    is_number = devices.isdecimal()
    name, colon, number = ("", ":", devices) if is_number else devices.partition(":")
    kinds = {known.lower(): known for known in ACCELERATORS}
    if not is_number and name.lower() not in kinds:
        why = f"known: {', '.join(ACCELERATORS)}"
        hint = _count_hint(name, kinds) or did_you_mean_start(name, ACCELERATORS)
        raise usage_error(text("{}: unknown kind `{:.60}`", option, name), why, hint)
    # `isdecimal` above accepts numbers of any length and digits of other scripts. `int` must get neither.
    if colon and not (re.fullmatch("[0-9]{1,7}", number) and 1 <= int(number) <= MAX_DEVICES):
        why = f"it takes KIND, KIND:NUMBER or NUMBER, at most {MAX_DEVICES:,} devices"
        hint = text("{}", Option("devices", "v5p:256"))
        raise usage_error(text("{} is invalid", option), why, hint)
    return None if is_number else ACCELERATORS[kinds[name.lower()]], int(number) if colon else None


# Bytes that each device sends in a training step, by mesh axis, from shapes alone.
#
# A ring of n devices sends (n - 1) / n of an array for an all-gather or a reduce-scatter, and twice that for an
# all-reduce. Per micro-batch, in the dtype of the computation unless stated otherwise:
#
#     fsdp   an all-gather of all parameters in the forward and in the backward pass, and a reduce-scatter of the
#            gradients of trained parameters in float32
#     dp     an all-reduce of the gradients in float32
#     mp     in each layer, an all-gather of the residual stream [B, T, D] before attention and before the MLP, and a
#            reduce-scatter after them, forward and backward, and once more if the layer is rematerialized. The same
#            once for the embedding and the head
#     sp     keys and values travel around the ring in the forward pass, and in the backward pass with their gradients
#            in float32. In addition an all-reduce of the gradients of parameters in float32
#
# An axis over s slices of m devices each is reduced within the slices first. A device then sends (s - 1) / s of its
# part, 1 / m of the array, over the slow network, and (m - 1) / m of the array within its slice.
#
# XLA may merge or move collectives, and sends less where it reduces in a smaller dtype.

# All-gathers of a weight per micro-batch: in the forward and in the backward pass.
WEIGHT_GATHERS = 2
# Blocks with one gather and one scatter of the residual stream, for attention and MLP together.
ONE_STEP_BLOCKS = ("parallel", "parallel_one_norm", "single")
# Part of the paths of an MLP or experts.
MLP_PART = ".mlp."


@dataclass(frozen=True, slots=True)
class AxisTraffic:
    """The bytes that a device sends along a mesh axis in a step."""

    axis: str  # Name of the axis
    size: int  # Devices along the axis
    nbytes: int  # Bytes sent within a slice
    # Whether other work can hide the communication: the result is not needed at once
    overlaps: bool
    num_slices: int = 1  # Slices along the axis
    slow_nbytes: int = 0  # Bytes sent between slices


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
    return 2 * FLOAT32 * sum(map(inputs.local_leaf_size, inputs.trained_leaves.values()))


def _fsdp_nbytes(inputs: MemoryInputs) -> int:
    """Return the bytes of all collectives over fsdp."""
    # A split leaf is all-gathered and its gradient reduce-scattered. The gradient of an unsplit leaf is all-reduced.
    # Frozen leaves have no gradient.
    trained = inputs.trained_leaves
    num_bytes = 0
    for path, leaf in inputs.all_leaves.items():
        gathered_size = inputs.local_leaf_size(leaf, is_gathered=True)
        is_split = gathered_size > inputs.local_leaf_size(leaf)
        element_nbytes = 0
        if is_split:
            element_nbytes += WEIGHT_GATHERS * inputs.itemsize
        if path in trained:
            # An all-reduce sends as much as a reduce-scatter and an all-gather, in float32.
            element_nbytes += FLOAT32 if is_split else 2 * FLOAT32
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


# Estimated time of a training step on a kind of accelerator: a roofline of compute, memory and communication.
#
#     step = max(compute, memory, overlapped) + exposed
#
#     compute     executed operations of a device / (peak * COMPUTE_EFFICIENCY)
#     memory      bytes that pass between a device and its memory: trained parameters, moments and gradients once each
#                 way, the gathered weights in three passes, or two if they are frozen, and saved activations both ways
#     overlapped  the slowest mesh axis among dp, fsdp and sp, in parallel with other work
#     exposed     communication over mp, on whose results the next operation waits
#
# The estimate ignores elementwise work, kernel launches, the pipeline's fill, compile time, input and checkpoints, and
# contention between axes. Peaks are for bfloat16. float32 computes at a fraction of them.

# Share of the peak that large matrix products reach. Published model FLOPs utilizations of whole steps are 0.33 to
# 0.42 on H100 (torchtitan, Llama 3.1 8B) and 0.65 on v5p (MaxText, Llama 2 70B).
COMPUTE_EFFICIENCY = 0.6
# Passes over all weights: forward, gradients of inputs. The gradients of trained weights are a third pass.
INPUT_READS = 2


@dataclass(frozen=True, slots=True)
class StepTime:
    """The estimated time of a step, in seconds."""

    compute_s: float  # Computation
    memory_s: float  # Traffic with the device's memory
    overlapped_s: float  # Communication in parallel with other work
    exposed_s: float  # Communication that other work waits for

    @property
    def step_s(self) -> float:
        """Time of the step."""
        # Compute, memory traffic and overlapped communication run in parallel, so the slowest one
        # counts.
        return max(self.compute_s, self.memory_s, self.overlapped_s) + self.exposed_s

    @property
    def bound(self) -> str:
        """Name of the part that takes longest."""
        parts = {
            "compute": self.compute_s,
            "memory": self.memory_s,
            "overlapped communication": self.overlapped_s,
            "mp communication": self.exposed_s,
        }
        return max(parts, key=lambda name: parts[name])


def estimate_step_time(
    inputs: MemoryInputs,
    kind: Accelerator,
    *,
    memory: MemoryEstimate,
    flops: StepFlops,
    traffic: Sequence[AxisTraffic],
) -> StepTime:
    """Estimate the time of a step by the formula in this module's docstring.

    Args:
        inputs: Inputs of the estimates.
        kind: The accelerators.
        memory: Memory of the step.
        flops: Operations of the step.
        traffic: Communication of the step.
    """
    strides = dict(axis_strides(inputs))
    seconds = [(_axis_seconds(axis, kind, strides[axis.axis]), axis.overlaps) for axis in traffic]
    return StepTime(
        compute_s=flops.executed / compute_shards(inputs) / (kind.peak_flops * COMPUTE_EFFICIENCY),
        memory_s=_memory_traffic(inputs, memory) / kind.memory_bandwidth,
        overlapped_s=max((axis_s for axis_s, overlaps in seconds if overlaps), default=0.0),
        exposed_s=sum(axis_s for axis_s, overlaps in seconds if not overlaps),
    )


def _axis_seconds(axis: AxisTraffic, kind: Accelerator, stride: int) -> float:
    """Return the seconds of an axis's communication: within slices, then between them over the network."""
    within_s = axis.nbytes / kind.axis_bandwidth(axis.size // axis.num_slices, stride)
    return within_s + axis.slow_nbytes / kind.network_bandwidth


def tokens_per_step(inputs: MemoryInputs) -> int:
    """Return the tokens of a step: targets and sources, with padding."""
    length = inputs.seq_length + inputs.source_length
    return inputs.accumulate * inputs.micro_batch_size * length


def compute_shards(inputs: MemoryInputs) -> int:
    """Return the number of devices among which the computation is divided."""
    num_batch_shards = inputs.micro_batch_size // inputs.local_batch_size
    return num_batch_shards * inputs.axis_size("mp") * inputs.num_sequence_shards


def _memory_traffic(inputs: MemoryInputs, memory: MemoryEstimate) -> int:
    """Return the bytes that pass between a device and its memory in a step."""
    # Per step the trained parameters, the moments and the gradients are read and written once. Per micro-batch the
    # gathered weights are read in two passes, and trained ones in a third. Saved activations are written and read.
    trained = inputs.trained_leaves.values()
    trained_itemsize = inputs.stored_itemsize
    if inputs.adapters is not None:
        trained_itemsize = inputs.adapter_itemsize
    updated_nbytes = trained_itemsize * sum(map(inputs.local_leaf_size, trained))
    reads = INPUT_READS * sum(
        inputs.local_leaf_size(leaf, is_gathered=True) for leaf in inputs.all_leaves.values()
    )
    reads += sum(inputs.local_leaf_size(leaf, is_gathered=True) for leaf in trained)
    micro_batch_nbytes = reads * inputs.itemsize + 2 * memory.saved
    step_nbytes = 2 * (updated_nbytes + memory.moments + step_gradients_nbytes(inputs))
    return step_nbytes + inputs.accumulate * micro_batch_nbytes
