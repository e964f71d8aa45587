"""Training in float16 with a loss scale."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.helpers import runs
from tests.helpers.optimizers import compile_step, take_steps
from trainer.training import feed
from trainer.training.checkpoint import host_leaves, restore_state
from trainer.training.step import GROWTH_STEPS, MAX_SCALE, LossScale, ScaleState, StepSetup

DYNAMIC = LossScale()


def make_setup(
    scale: LossScale | None = DYNAMIC, dtype: str = "float16", **options: Any
) -> StepSetup:
    """Return a setup in float16."""
    return dataclasses.replace(runs.make_setup(dtype=dtype, **options), loss_scale=scale)


def scale_and_steps(state: ScaleState) -> tuple[float, int]:
    """Return the dynamic scale of a state, and the steps since its last change."""
    assert "loss_scale" in state
    assert "loss_scale_steps" in state
    return float(state["loss_scale"]), int(state["loss_scale_steps"])


@cache
def losses(scale: LossScale | None, dtype: str = "float16", accumulate: int = 1) -> list[float]:
    """Return the mean losses of 8 steps."""
    setup = make_setup(scale, dtype, accumulate=accumulate)
    step, job, state = compile_step(setup), runs.make_job(setup), runs.make_state(setup)
    means = []
    for number in range(8):
        state, metrics = step(
            state, feed.load_batch(job.train, job.order.rows(number), setup.sharding)
        )
        means.append(float(metrics["loss"]) / float(metrics["weight"]))
    assert int(state["skipped"]) == 0
    return means


def test_float16_follows_float32():
    expected = losses(None, "float32")
    np.testing.assert_allclose(losses(DYNAMIC, accumulate=2), expected, rtol=5e-3)


# By default test_float16_follows_float32 compares scaled steps.
@pytest.mark.slow
def test_loss_scale_changes_float32_by_rounding():
    expected = losses(None, "float32")
    actual = losses(LossScale(1024.0, is_dynamic=False), "float32")
    np.testing.assert_allclose(actual, expected, rtol=2e-6)


def test_overflow_is_skipped_and_halves_the_scale():
    setup = make_setup(LossScale(2.0**40))
    state = take_steps(setup, runs.make_state(setup), until=3)
    assert int(state["skipped"]) == 3
    assert scale_and_steps(state) == (2.0**37, 0)
    before = runs.make_state(setup)["params"]["embed"]["tokens"]
    assert np.array_equal(state["params"]["embed"]["tokens"], before)


def test_step_without_tokens_keeps_the_scale():
    setup = make_setup(accumulate=2)
    job = runs.make_job(setup)
    batch = feed.load_batch(job.train, job.order.rows(0), setup.sharding)
    state, _ = compile_step(setup)(
        runs.make_state(setup), {**batch, "weights": jnp.zeros_like(batch["weights"])}
    )
    assert (int(state["skipped"]), float(state["loss_scale"])) == (1, 2.0**15)


def test_scale_grows_up_to_its_maximum():
    scale, finite = LossScale(), jnp.array(True)
    state = ScaleState(loss_scale=jnp.float32(8), loss_scale_steps=jnp.int32(GROWTH_STEPS - 2))
    state = scale.next_state(state, finite)
    assert scale_and_steps(state) == (8, GROWTH_STEPS - 1)
    state = scale.next_state(state, finite)
    assert scale_and_steps(state) == (16, 0)
    largest = ScaleState(
        loss_scale=jnp.float32(MAX_SCALE), loss_scale_steps=jnp.int32(GROWTH_STEPS - 1)
    )
    assert scale_and_steps(scale.next_state(largest, finite)) == (MAX_SCALE, 0)


def test_static_scale_has_no_state():
    scale = LossScale(256.0, is_dynamic=False)
    assert "loss_scale" not in runs.make_state(make_setup(scale))
    assert losses(scale, accumulate=2)[:2] == pytest.approx(
        losses(DYNAMIC, accumulate=2)[:2], rel=1e-3
    )


def test_resume_keeps_the_scale():
    setup = make_setup(LossScale(2.0**40))
    at_2 = take_steps(setup, runs.make_state(setup), until=2)
    arrays = {name: leaf.fetch().copy() for name, leaf in host_leaves(at_2).items()}
    resumed = take_steps(setup, restore_state(runs.MemoryReader(arrays), setup), until=4)
    assert runs.state_bytes(resumed) == runs.state_bytes(
        take_steps(setup, jax.tree.map(jnp.copy, at_2), until=4)
    )
