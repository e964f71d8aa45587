"""Tests of the learning rate schedule against optax."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from trainer.recipe.optimizer_tables import AdamWTable
from trainer.training.optimizers.lr_schedule import LRSchedule, build_lr_schedule


def learning_rates(schedule: LRSchedule, *steps: int) -> list[float]:
    """Return the learning rate of each step."""
    return [float(schedule.learning_rate(jnp.int32(step))) for step in steps]


def test_cosine_schedule_matches_optax():
    schedule = LRSchedule(1e-2, 1e-3, "cosine", 2000, 500_000)
    optax_schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 2000, 500_000, 1e-3)
    steps = (0, 1, 1000, 2000, 251_000, 500_000, 600_000)
    expected = [float(np.asarray(optax_schedule(step))) for step in steps]
    assert learning_rates(schedule, *steps) == pytest.approx(expected, rel=1e-4)
    expected = [0.0, 5e-6, 5e-3, 1e-2, 5.5e-3]
    assert learning_rates(schedule, 0, 1, 1000, 2000, 251_000) == pytest.approx(expected, rel=1e-3)


def test_linear_schedule_stays_at_its_end():
    schedule = LRSchedule(1.0, 0.2, "linear", 0, 10)
    assert learning_rates(schedule, 0, 5, 10, 11) == pytest.approx([1.0, 0.6, 0.2, 0.2])


def test_constant_schedule_stays_at_its_peak_after_warmup():
    schedule = LRSchedule(1.0, 0.5, "constant", 4, 8)
    assert learning_rates(schedule, 0, 2, 4, 8, 100) == pytest.approx([0.0, 0.5, 1.0, 1.0, 1.0])


def test_lr_schedule_fields_match_saved_manifests():
    """Runs compare it with the one in their checkpoints when they resume (FIXED_ON_RESUME)."""
    table = AdamWTable(lr=3e-4, end_lr=1e-5, schedule="cosine", warmup_ratio=0.03)
    expected = {"peak": 0.0003, "end": 1e-05, "kind": "cosine", "warmup": 30, "decay": 1000}
    assert dataclasses.asdict(build_lr_schedule(table, 1000)) == expected
