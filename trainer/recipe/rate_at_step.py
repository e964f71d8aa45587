"""The learning rate of a step in plain Python, from the schedule in the manifest of a step. No jax."""

from __future__ import annotations

import math
from collections.abc import Mapping

from trainer.models.json_types import JsonValue


def rate_at_step(schedule: Mapping[str, JsonValue], step: int) -> float:
    """Return the learning rate of the update with index `step` (the first is 0).

    The formulas are those of `trainer.training.optimizers.lr_schedule.LRSchedule`.

    Args:
        schedule: Fields of the schedule, as `LRSchedule.manifest_fields` returns them.
        step: Index of the update.
    """
    peak = _number(schedule, "peak")
    warmup = int(_number(schedule, "warmup"))
    if step < warmup:
        initial = _number(schedule, "initial")
        return initial + (peak - initial) * step / warmup
    if schedule["kind"] == "rsqrt":
        start = max(warmup, 1)
        return peak * math.sqrt(start / max(step, start))
    return _rate_in_decay(schedule, step, peak)


def _rate_in_decay(schedule: Mapping[str, JsonValue], step: int, peak: float) -> float:
    """Return the learning rate of a step after warm-up, if the decay has an end."""
    stop = _number(schedule, "decay")
    start = _number(schedule, "warmup")
    if schedule["kind"] == "wsd":
        start = stop - _number(schedule, "cooldown")
    progress = min(max((step - start) / max(stop - start, 1), 0.0), 1.0)
    remaining = 1.0 - progress
    if schedule["kind"] == "cosine":
        remaining = 0.5 * (1.0 + math.cos(math.pi * progress))
    if schedule["kind"] == "constant":
        remaining = 1.0
    end = _number(schedule, "end")
    return end + (peak - end) * remaining


def _number(schedule: Mapping[str, JsonValue], name: str) -> float:
    """Return a field of a schedule. Fields at their default 0 are not recorded."""
    value = schedule.get(name, 0)
    assert isinstance(value, int | float)
    return value
