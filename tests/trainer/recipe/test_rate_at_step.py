"""The learning rate in plain Python equals the one of the training step."""

from __future__ import annotations

import numpy as np
import pytest

from trainer.recipe.rate_at_step import rate_at_step
from trainer.training.optimizers.lr_schedule import LRSchedule

KINDS = ("linear", "cosine", "constant", "wsd", "rsqrt")


@pytest.mark.parametrize("warmup", [0, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_rate_equals_that_of_the_step(kind, warmup: int):
    schedule = LRSchedule(
        peak=3e-4, end=1e-5, kind=kind, warmup=warmup, decay=20, initial=1e-6, cooldown=6
    )
    fields = schedule.manifest_fields()
    for step in range(25):
        expected = float(schedule.learning_rate(np.int32(step)))  # pyright: ignore[reportArgumentType]
        assert rate_at_step(fields, step) == pytest.approx(expected, rel=1e-6)
