"""The learning rate schedule of an optimizer, for arrays of JAX and for numbers of NumPy. No jax."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from prepcli.core.json_values import JsonObject
from prepcli.planning.manifest_fields import ScheduleRecord
from trainer.recipe.optimizer_tables import (
    PALM_REFERENCE_LR,
    OptimizerTable,
    PalmTable,
    RampShape,
    ScheduleKind,
)
from trainer.recipe.resolve import OPEN_SCHEDULES, warmup_decay

# Fields without effect in schedules that never end (`constant` and `rsqrt`).
OPEN_FIELDS = ("end", "decay")
# A cosine falls once in half a wave.
HALF_WAVE = 0.5


@dataclass(frozen=True, slots=True)
class LRSchedule:
    """A learning rate schedule: warm-up from `initial` to `peak`, then decay to `end`.

    Attributes:
        peak: Learning rate after warm-up.
        end: Learning rate from step `decay` on. Not used by `constant` and `rsqrt`.
        kind: Shape of the decay. `constant` keeps `peak`, `wsd` keeps it until the last `cooldown`
            steps, `cosine_restarts` falls to `end` `cycles` times, and `rsqrt` multiplies it by
            sqrt(warmup / step).
        warmup: Steps of warm-up.
        decay: Step at which the decay ends, counted from 0 with warm-up included.
        initial: Learning rate of step 0, if there is warm-up.
        cooldown: Steps of the decay of `wsd`.
        warmup_shape: Shape of the rise.
        cooldown_shape: Shape of the decay of `wsd`.
        cooldown_waves: Waves of the decay of `wsd` with the shape `cosine`.
        cycles: Falls of `cosine_restarts`.
    """

    peak: float
    end: float
    kind: ScheduleKind
    warmup: int
    decay: int
    initial: float = 0.0
    cooldown: int = 0
    warmup_shape: RampShape = "linear"
    cooldown_shape: RampShape = "linear"
    cooldown_waves: float = HALF_WAVE
    cycles: int = 1

    def learning_rate(self, step: Any) -> Any:
        """Compute the learning rate [] of the update with index `step` (the first is 0).

        Args:
            step: Integer array [] of JAX, for a float32 result, or of NumPy, for a float64 result.
        """
        xp = step.__array_namespace__()
        float_step = xp.asarray(step, dtype=float)
        return xp.where(
            step < self.warmup,
            self._in_warmup(float_step, xp),
            self._after_warmup(step, float_step, xp),
        )

    def _in_warmup(self, step: Any, xp: Any) -> Any:
        """Return the learning rate of a step of warm-up."""
        # Without warm-up, the divisor 1 avoids 0 / 0, and no step is selected.
        length = max(self.warmup, 1)
        rise = self.peak - self.initial
        if self.warmup_shape == "linear":
            return self.initial + rise * step / length
        # Later steps are not selected. They are clipped for the square root.
        remaining = 1.0 - xp.clip(step / length, 0.0, 1.0)
        return self.initial + rise * _fall(remaining, self.warmup_shape, HALF_WAVE, xp)

    def _after_warmup(self, step: Any, float_step: Any, xp: Any) -> Any:
        """Return the learning rate of a step after warm-up."""
        if self.kind == "rsqrt":
            start = float(max(self.warmup, 1))
            # peak * sqrt(warmup / step): at step = warmup it is `peak`, at step = 4 * warmup half
            # of it.
            return self.peak * math.sqrt(start) / xp.sqrt(xp.maximum(float_step, start))
        # With warmup 100 and decay 1,000, `linear` and `cosine` fall from step 100 to step 1,000. With
        # a cooldown of 200, `wsd` (warmup, stable, decay: arXiv:2404.06395) falls from step 800.
        start = self.warmup
        if self.kind == "wsd":
            start = self.decay - self.cooldown
        length = max(self.decay - start, 1)
        progress = xp.clip((float_step - start) / length, 0.0, 1.0)
        if self.kind == "constant":
            remaining = xp.ones_like(progress)
        elif self.kind == "wsd":
            remaining = _fall(progress, self.cooldown_shape, self.cooldown_waves, xp)
            # Other waves than half ones do not end at 0.
            remaining = xp.where(progress < 1.0, remaining, 0.0)
        elif self.kind == "cosine_restarts":
            remaining = _fall(self._cycle_progress(step, length, xp), "cosine", HALF_WAVE, xp)
        else:
            remaining = _fall(progress, self.kind, HALF_WAVE, xp)
        return self.end + (self.peak - self.end) * remaining

    def _cycle_progress(self, step: Any, length: int, xp: Any) -> Any:
        """Return the fraction of its cycle that a step has done, e.g. 0.5 in the middle (arXiv:1608.03983)."""
        # In integers: 3 cycles of 10 steps restart at step 10, where 3 * (10 / 30) may round to less than 1.
        done = xp.clip(step - self.warmup, 0, length)
        fraction = xp.asarray(done * self.cycles % length, dtype=float) / length
        return xp.where(done < length, fraction, 1.0)

    def manifest_fields(self) -> ScheduleRecord:
        """Return the fields for a manifest, without optional fields at their defaults, so that earlier runs resume."""
        kept: JsonObject = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value != field.default:
                kept[field.name] = value
        return cast("ScheduleRecord", kept)


def _fall(progress: Any, shape: RampShape, waves: float, xp: Any) -> Any:
    """Return the part of a fall that remains: 1 at its start, and 0 at its end with half a wave."""
    if shape == "linear":
        return 1.0 - progress
    if shape == "cosine":
        return 0.5 * (1.0 + xp.cos(2.0 * waves * math.pi * progress))
    return 1.0 - xp.sqrt(progress)


def rate_at_step(schedule: Mapping[str, object], step: int) -> float:
    """Return the learning rate of the update with index `step` (the first is 0).

    Args:
        schedule: Fields of the schedule, as `LRSchedule.manifest_fields` returns them.
        step: Index of the update.
    """
    # Schedules of other frameworks lack the fields without effect.
    fields: dict[str, Any] = {"warmup": 0, "decay": 0, "end": 0.0}
    for field in dataclasses.fields(LRSchedule):
        if field.name in schedule:
            fields[field.name] = schedule[field.name]
    return float(LRSchedule(**fields).learning_rate(np.int64(step)))


def changed_fields(
    before: Mapping[str, object], after: Mapping[str, object]
) -> dict[str, tuple[Any, Any]]:
    """Return the fields in which two schedules of manifests differ, except fields without effect in both.

    Args:
        before: Fields of the manifest of a checkpoint.
        after: Fields of the resuming run.

    Returns:
        The value before and after, by field. None if the field is missing.
    """
    is_open = {before.get("kind"), after.get("kind")} <= {*OPEN_SCHEDULES}
    changed: dict[str, tuple[Any, Any]] = {}
    for name in {**before, **after}:
        has_effect = not (is_open and name in OPEN_FIELDS)
        if has_effect and before.get(name) != after.get(name):
            changed[name] = (before.get(name), after.get(name))
    return changed


def build_lr_schedule(table: OptimizerTable, steps: int) -> LRSchedule:
    """Build the schedule of a run of `steps` steps.

    Raises:
        UsageError: The decay would end before the warm-up does, or has more cycles than steps.
    """
    schedule = warmup_decay(table, steps)
    peak = table.lr
    initial = table.init_lr
    if isinstance(table, PalmTable) and table.schedule == "rsqrt":
        peak = initial = table.lr / PALM_REFERENCE_LR / math.sqrt(max(schedule.warmup_steps, 1))
    return LRSchedule(
        peak=peak,
        end=table.end_lr,
        kind=table.schedule,
        warmup=schedule.warmup_steps,
        decay=schedule.decay_steps,
        initial=initial,
        cooldown=schedule.cooldown_steps,
        warmup_shape=table.warmup_shape,
        cooldown_shape=table.cooldown_shape or "linear",
        cooldown_waves=table.cooldown_waves or HALF_WAVE,
        cycles=table.cycles or 1,
    )
