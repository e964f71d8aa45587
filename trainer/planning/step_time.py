"""Estimated time of a training step on a kind of accelerator: a roofline of compute, memory and communication.

    step = max(compute, memory, overlapped) + exposed

    compute     executed operations of a device / (peak * COMPUTE_EFFICIENCY)
    memory      bytes that pass between a device and its memory: state and gradients once each way, the gathered
                weights in three passes, and saved activations both ways
    overlapped  the slowest mesh axis among dp, fsdp and sp, in parallel with other work
    exposed     communication over mp, on whose results the next operation waits

The estimate ignores elementwise work, kernel launches, the pipeline's fill, compile time, input and checkpoints, and
contention between axes. Peaks are for bfloat16. float32 computes at a fraction of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from prepcli.models.memory_estimate import MemoryEstimate
from prepcli.models.memory_inputs import MemoryInputs
from trainer.planning.accelerators import Accelerator
from trainer.planning.collectives import AxisTraffic, axis_strides
from trainer.planning.step_flops import StepFlops

# Share of the peak that large matrix products reach. Published model FLOPs utilizations of whole steps are 0.33 to
# 0.42 on H100 (torchtitan, Llama 3.1 8B) and 0.65 on v5p (MaxText, Llama 2 70B).
COMPUTE_EFFICIENCY = 0.6
# Passes over the weights: forward, gradients of inputs, gradients of weights.
WEIGHT_READS = 3


@dataclass(frozen=True, slots=True)
class StepTime:
    """The estimated time of a step, in seconds.

    Attributes:
        compute_s: Computation.
        memory_s: Traffic with the device's memory.
        overlapped_s: Communication in parallel with other work.
        exposed_s: Communication that other work waits for.
    """

    compute_s: float
    memory_s: float
    overlapped_s: float
    exposed_s: float

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
    """Return the tokens of a step. With an encoder, only the targets count."""
    return inputs.accumulate * inputs.micro_batch_size * inputs.seq_length


def compute_shards(inputs: MemoryInputs) -> int:
    """Return the number of devices among which the computation is divided."""
    num_batch_shards = inputs.micro_batch_size // inputs.local_batch_size
    return num_batch_shards * inputs.axis_size("mp") * inputs.num_sequence_shards


def _memory_traffic(inputs: MemoryInputs, memory: MemoryEstimate) -> int:
    """Return the bytes that pass between a device and its memory in a step."""
    # Per step the state and the gradients are read and written once. Per micro-batch the gathered
    # weights are read in three passes, and saved activations are written and read.
    weights = sum(inputs.local_leaf_size(leaf, is_gathered=True) for leaf in inputs.leaves.values())
    micro_batch_nbytes = WEIGHT_READS * weights * inputs.itemsize + 2 * memory.saved
    return 2 * (memory.state + memory.gradients) + inputs.accumulate * micro_batch_nbytes
