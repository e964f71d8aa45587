"""The learning rate schedule of an optimizer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import jax.numpy as jnp
from jax import Array

from trainer.recipe import warmup_decay
from trainer.recipe.optimizer_tables import OptimizerTable


@dataclass(frozen=True, slots=True)
class LRSchedule:
    """A learning rate schedule: linear warmup from 0 to `peak`, then decay to `end`.

    Attributes:
        peak: Learning rate after warmup.
        end: Learning rate from step `decay` on.
        kind: Shape of the decay; `constant` keeps `peak`.
        warmup: Steps of warmup.
        decay: Step at which the decay ends, counted from 0 with warmup included.
    """

    peak: float
    end: float
    kind: Literal["linear", "cosine", "constant"]
    warmup: int
    decay: int

    def learning_rate(self, step: Array) -> Array:
        """Compute the learning rate, float32 [], of the update with index `step` (the first is 0)."""
        step = jnp.asarray(step, jnp.float32)
        progress = jnp.clip((step - self.warmup) / max(self.decay - self.warmup, 1), 0.0, 1.0)
        remaining = {
            "linear": 1.0 - progress,
            "cosine": 0.5 * (1.0 + jnp.cos(math.pi * progress)),
            "constant": jnp.ones_like(progress),
        }
        decayed = self.end + (self.peak - self.end) * remaining[self.kind]
        return jnp.where(step < self.warmup, self.peak * step / max(self.warmup, 1), decayed)


def build_lr_schedule(table: OptimizerTable, steps: int) -> LRSchedule:
    """Build the schedule of a run of `steps` steps.

    Raises:
        UsageError: The decay would end before the warm-up does.
    """
    schedule = warmup_decay(table, steps)
    return LRSchedule(
        peak=table.lr,
        end=table.end_lr,
        kind=table.schedule,
        warmup=schedule.warmup_steps,
        decay=schedule.decay_steps,
    )
