"""Values of a recipe that depend on the devices and the number of steps: batch shape and learning rate schedule."""

from __future__ import annotations

from dataclasses import dataclass

from prepcli.core.errors import Key, Text, text, usage_error
from trainer.recipe.optimizer_tables import PALM_WARMUP_STEPS, OptimizerTable, PalmTable
from trainer.recipe.tables import Batch

# The largest number of a step
MAX_INT32 = 2**31 - 1
# Schedules that never end.
OPEN_SCHEDULES = ("constant", "rsqrt")
# Length of the decay of wsd, as a fraction of the steps until its end.
DEFAULT_COOLDOWN = 0.1


@dataclass(frozen=True, slots=True)
class BatchShape:
    """Size of a training batch.

    Attributes:
        size: Sequences per step.
        accumulate: Micro-batches per step.
    """

    size: int
    accumulate: int

    @property
    def micro_batch_size(self) -> int:
        """Sequences of a micro-batch, over all devices."""
        return self.size // self.accumulate


def batch_shape(batch: Batch, *, n_devices: int, n_replicas: int) -> BatchShape:
    """Return the batch shape on a mesh.

    Args:
        batch: The recipe's `[batch]`.
        n_devices: Devices of the mesh.
        n_replicas: Data-parallel shards of a batch (dp x fsdp).

    Raises:
        UsageError: The batch is not a whole number of micro-batches, or a micro-batch does not
            divide among the replicas.
    """
    # E.g. per_device 2 on 8 devices is a micro-batch of 16. With size 64 it is accumulated 4 times,
    # and with accumulate 4 the size is 64.
    size = batch.size or _micro_batch_size(batch, n_devices, n_replicas) * (batch.accumulate or 1)
    shape = BatchShape(size, _accumulation_steps(batch, size, n_devices, n_replicas))
    if remainder := shape.micro_batch_size % n_replicas:
        equation = f"`batch.size` {size} / accumulate {shape.accumulate} = {shape.micro_batch_size}"
        raise usage_error(
            f"a micro-batch of {shape.micro_batch_size} does not divide among {n_replicas} replicas",
            f"{equation}; {shape.micro_batch_size} mod {n_replicas} = {remainder}",
            _set_hint("batch.size", _round_up(size, n_replicas * shape.accumulate)),
        )
    return shape


def _micro_batch_size(batch: Batch, n_devices: int, n_replicas: int) -> int:
    """Return the micro-batch size that `per_device` or `per_replica` sets, or 0 for neither."""
    return (batch.per_device or 0) * n_devices + (batch.per_replica or 0) * n_replicas


def _accumulation_steps(batch: Batch, size: int, n_devices: int, n_replicas: int) -> int:
    """Return the number of micro-batches of a step."""
    micro_size = _micro_batch_size(batch, n_devices, n_replicas)
    # With size 64, `micro_size` 16 gives 4 micro-batches, and `accumulate` 4 gives micro-batches of 16.
    # With neither, the step is one micro-batch.
    divisor = micro_size or batch.accumulate or size
    if size % divisor:
        what = f"`batch.size` {size} is not a whole number of micro-batches"
        why = f"{_micro_batch_text(batch, n_devices, n_replicas)}; {size} mod {divisor} = {size % divisor}"
        # Each of `accumulate` micro-batches needs a row per replica.
        multiple = divisor * n_replicas
        if micro_size:
            multiple = divisor
        better_size = _round_up(size, multiple)
        raise usage_error(what, why, _set_hint("batch.size", better_size))
    if micro_size:
        return size // micro_size
    return batch.accumulate or 1


def _micro_batch_text(batch: Batch, n_devices: int, n_replicas: int) -> str:
    """Return how the recipe sets the size of a micro-batch, for an error."""
    if batch.per_device:
        return (
            f"per_device {batch.per_device} x {n_devices} devices = {batch.per_device * n_devices}"
        )
    if batch.per_replica:
        return f"per_replica {batch.per_replica} x {n_replicas} replicas = {batch.per_replica * n_replicas}"
    return f"accumulate is {batch.accumulate}"


def _set_hint(key: str, value: object) -> Text:
    return text("{}", Key(key, value, is_override=True))


def _round_up(number: int, multiple: int) -> int:
    # E.g. 60 in multiples of 16: -60 // 16 = -4, and 4 * 16 = 64.
    return -(-number // multiple) * multiple


@dataclass(frozen=True, slots=True)
class WarmupDecay:
    """Steps of the learning rate schedule.

    Attributes:
        warmup_steps: Steps in which the learning rate rises to its peak.
        decay_steps: Step at which the decay ends, counted from 0.
        cooldown_steps: Steps of the decay of wsd, or 0 for other schedules.
    """

    warmup_steps: int
    decay_steps: int
    cooldown_steps: int = 0


def warmup_decay(optimizer: OptimizerTable, n_steps: int) -> WarmupDecay:
    """Return the learning rate schedule of a run.

    Args:
        optimizer: The recipe's `[optimizer]`.
        n_steps: Steps of the run.

    Raises:
        UsageError: The decay would end before the warm-up does, or has more cycles than steps.
    """
    warmup_steps = warmup_steps_of(optimizer, n_steps)
    decay_steps = optimizer.decay_steps or n_steps
    if optimizer.schedule in OPEN_SCHEDULES:
        return WarmupDecay(warmup_steps, decay_steps)
    if decay_steps <= warmup_steps:
        if optimizer.decay_steps:
            end = f"`optimizer.decay_steps` is {decay_steps}"
        else:
            end = f"the run has {n_steps} steps"
        key = "warmup_ratio"
        if optimizer.warmup_steps:
            key = "warmup_steps"
        raise usage_error(
            f"`optimizer.{key}` leaves no steps for the decay",
            f"warm-up takes the first {warmup_steps} steps, and {end}, warm-up included",
            text("use fewer warm-up steps, or {}", _set_hint("optimizer.schedule", "constant")),
        )
    if optimizer.schedule == "cosine_restarts":
        _check_cycles(optimizer.cycles or 1, decay_steps - warmup_steps)
    if optimizer.schedule != "wsd":
        return WarmupDecay(warmup_steps, decay_steps)
    cooldown_steps = optimizer.cooldown_steps or max(1, round(decay_steps * DEFAULT_COOLDOWN))
    if warmup_steps + cooldown_steps > decay_steps:
        why = f"warm-up takes {warmup_steps} steps, the decay {cooldown_steps}, which ends at step {decay_steps}"
        hint = _set_hint("optimizer.cooldown_steps", decay_steps - warmup_steps)
        raise usage_error("warm-up and decay of `wsd` overlap", why, hint)
    return WarmupDecay(warmup_steps, decay_steps, cooldown_steps)


def _check_cycles(cycles: int, n_steps: int) -> None:
    """Raise UsageError if a decay of this many steps cannot have as many cycles."""
    # The step multiplies its number by the cycles in int32.
    maximum = min(n_steps, MAX_INT32 // n_steps)
    if cycles > maximum:
        what = f"`optimizer.cycles` is {cycles:,}"
        why = f"the decay takes {n_steps:,} steps, for which the maximum is {maximum:,}"
        raise usage_error(what, why, _set_hint("optimizer.cycles", maximum))


def warmup_steps_of(optimizer: OptimizerTable, n_steps: int) -> int:
    """Return the steps of warm-up, from its steps, its ratio, or the default of the optimizer."""
    if optimizer.warmup_steps is not None:
        return optimizer.warmup_steps
    if optimizer.warmup_ratio is not None:
        return round(optimizer.warmup_ratio * n_steps)
    if isinstance(optimizer, PalmTable):
        return PALM_WARMUP_STEPS
    return 0
