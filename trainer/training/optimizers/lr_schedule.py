"""The learning rate schedule of an optimizer."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax.numpy as jnp
from jax import Array

from trainer.models.json_types import JsonObject
from trainer.recipe import warmup_decay
from trainer.recipe.optimizer_tables import PALM_REFERENCE_LR, OptimizerTable, PalmTable
from trainer.recipe.resolve import OPEN_SCHEDULES

# Absent in the manifests of earlier versions. At their defaults they are not written.
LATER_FIELDS = ("initial", "cooldown")
# Fields without effect in schedules that never end (`constant` and `rsqrt`).
OPEN_FIELDS = ("end", "decay")


@dataclass(frozen=True, slots=True)
class LRSchedule:
    """A learning rate schedule: linear warmup from `initial` to `peak`, then decay to `end`.

    Attributes:
        peak: Learning rate after warmup.
        end: Learning rate from step `decay` on. Not used by `constant` and `rsqrt`.
        kind: Shape of the decay. `constant` keeps `peak`, `wsd` keeps it until the last `cooldown`
            steps, and `rsqrt` multiplies it by sqrt(warmup / step).
        warmup: Steps of warmup.
        decay: Step at which the decay ends, counted from 0 with warmup included.
        initial: Learning rate of step 0, if there is warmup.
        cooldown: Steps of the linear decay of `wsd`.
    """

    peak: float
    end: float
    kind: Literal["linear", "cosine", "constant", "wsd", "rsqrt"]
    warmup: int
    decay: int
    initial: float = 0.0
    cooldown: int = 0

    def learning_rate(self, step: Array) -> Array:
        """Compute the learning rate, float32 [], of the update with index `step` (the first is 0)."""
        step = jnp.asarray(step, jnp.float32)
        # The divisor 1 without warmup avoids 0 / 0. `where` below then never selects the rise.
        rise = self.initial + (self.peak - self.initial) * step / max(self.warmup, 1)
        return jnp.where(step < self.warmup, rise, self._after_warmup(step))

    def _after_warmup(self, step: Array) -> Array:
        """Return the learning rate of a step after warm-up."""
        if self.kind == "rsqrt":
            start = float(max(self.warmup, 1))
            # peak * sqrt(warmup / step): at step = warmup it is `peak`, at step = 4 * warmup half
            # of it.
            return self.peak * math.sqrt(start) / jnp.sqrt(jnp.maximum(step, start))
        # With warmup 100 and decay 1,000, `linear` and `cosine` fall from step 100 to step 1,000. With
        # a cooldown of 200, `wsd` (warmup, stable, decay: arXiv:2404.06395) falls from step 800.
        start = self.warmup
        if self.kind == "wsd":
            start = self.decay - self.cooldown
        progress = jnp.clip((step - start) / max(self.decay - start, 1), 0.0, 1.0)
        remaining = {
            "linear": 1.0 - progress,
            "wsd": 1.0 - progress,
            # arXiv:1608.03983, equation 5, without restarts
            "cosine": 0.5 * (1.0 + jnp.cos(math.pi * progress)),
            "constant": jnp.ones_like(progress),
        }
        return self.end + (self.peak - self.end) * remaining[self.kind]

    def manifest_fields(self) -> JsonObject:
        """Return the fields for a manifest, without later fields at their defaults, so that earlier runs resume."""
        fields = dataclasses.asdict(self)
        return {name: value for name, value in fields.items() if value or name not in LATER_FIELDS}


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
        UsageError: The decay would end before the warm-up does.
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
    )
