"""What a recipe says once devices and steps are known."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.models.errors import usage_error
from trainer.recipe.tables import Batch, Optimizer


@dataclass(frozen=True, slots=True)
class BatchShape:
    """Sequences a step, and in how many micro-batches."""

    size: int
    accumulate: int

    @property
    def micro_batch_size(self) -> int:
        """Sequences of a micro-batch, over all devices."""
        return self.size // self.accumulate


def batch_shape(batch: Batch, n_devices: int, n_replicas: int) -> BatchShape:
    """The sequences of a step on `n_devices` with `n_replicas` parts of a batch (dp x fsdp).

    A usage error where a step is not a whole number of micro-batches, or a micro-batch does not divide among replicas.
    """
    size = batch.size or _micro_batch_size(batch, n_devices, n_replicas) * (batch.accumulate or 1)
    shape = BatchShape(size, _accumulation_steps(batch, size, n_devices, n_replicas))
    if remainder := shape.micro_batch_size % n_replicas:
        source = f"`batch.size` {size} / accumulate {shape.accumulate} = {shape.micro_batch_size}"
        raise usage_error(
            f"a micro-batch of {shape.micro_batch_size} does not divide among {n_replicas} replicas",
            f"{source}; {shape.micro_batch_size} mod {n_replicas} = {remainder}",
            f"`--set batch.size={_round_up(size, n_replicas * shape.accumulate)}`",
        )
    return shape


def _micro_batch_size(batch: Batch, n_devices: int, n_replicas: int) -> int:
    return (batch.per_device or 0) * n_devices + (batch.per_replica or 0) * n_replicas


def _accumulation_steps(batch: Batch, size: int, n_devices: int, n_replicas: int) -> int:
    micro = _micro_batch_size(batch, n_devices, n_replicas)
    unit = micro or batch.accumulate or size
    if size % unit:
        what = f"`batch.size` {size} is not a whole number of micro-batches"
        arithmetic = f"{_micro_batch_text(batch, n_devices, n_replicas)}; {size} mod {unit} = {size % unit}"
        raise usage_error(
            what, arithmetic, f"`--set batch.size={_round_up(size, unit if micro else unit * n_replicas)}`"
        )
    return size // micro if micro else batch.accumulate or 1


def _micro_batch_text(batch: Batch, n_devices: int, n_replicas: int) -> str:
    if batch.per_device:
        return f"per_device {batch.per_device} x {n_devices} devices = {batch.per_device * n_devices}"
    if batch.per_replica:
        return f"per_replica {batch.per_replica} x {n_replicas} replicas = {batch.per_replica * n_replicas}"
    return f"accumulate is {batch.accumulate}"


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


@dataclass(frozen=True, slots=True)
class WarmupDecay:
    """Of the learning rate: it rises for `warmup` steps, then decays until step `decay`, counted from 0."""

    warmup_steps: int
    decay_steps: int


def warmup_decay(optimizer: Optimizer, n_steps: int) -> WarmupDecay:
    """The schedule of a run of `n_steps`; a usage error where it would have decayed before it is warm."""
    warmup = optimizer.warmup_steps or round((optimizer.warmup_ratio or 0.0) * n_steps)
    decay = optimizer.decay_steps or n_steps
    if optimizer.schedule != "constant" and decay <= warmup:
        end = f"`optimizer.decay_steps` is {decay}" if optimizer.decay_steps else f"the run has {decay} steps"
        name = "warmup_steps" if optimizer.warmup_steps else "warmup_ratio"
        raise usage_error(
            f"`optimizer.{name}` leaves no steps for the decay",
            f"warm-up takes {warmup} steps, and {end}, counted from 0, warm-up included",
            "fewer steps of warm-up, or `--set optimizer.schedule=constant`",
        )
    return WarmupDecay(warmup, decay)
