"""Tests of dropout in training steps: masks do not depend on the mesh or on micro-batches, and differ between steps."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.helpers import runs
from tests.helpers.optimizers import compile_step
from trainer.nn.model_spec import AttentionOptions
from trainer.training import feed
from trainer.training.step import StepSetup, train_step

BLOCKWISE = {"attention_options": AttentionOptions("blockwise", 5, 3), "ffn_chunk_size": 7}
STEPS = 3


def train_losses(setup: StepSetup) -> np.ndarray:
    """Return the loss and the gradient norm of the first steps."""
    state, job, losses = runs.make_state(setup), runs.make_job(setup), []
    step = compile_step(setup)
    for number in range(STEPS):
        state, metrics = step(
            state, feed.load_batch(job.train, job.order.rows(number), setup.sharding)
        )
        losses += [float(metrics["loss"]), float(metrics["grad_norm"])]
    return np.array(losses)


@pytest.fixture(scope="module")
def one_device_losses() -> np.ndarray:
    return train_losses(runs.make_setup(runs.LLAMA, dropout=runs.DROPOUT))


# By default test_loop resumes runs with dropout on other meshes, with and without micro-batches.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "accumulate", "forward_options"),
    [
        ("1,2,4", 2, {**BLOCKWISE, "remat_policy": "nothing_saveable", "scan_layers": False}),
        ("", 4, {}),
        ("8,1,1", 1, {}),
        ("1,2,4", 4, {}),
        ("2,2,2", 1, BLOCKWISE),
        ("2,2,2", 2, {"scan_layers": False}),
        ("1,1,8", 1, {}),
        ("fsdp:2,mp:2,sp:2", 4, BLOCKWISE),
    ],
)
def test_masks_do_not_depend_on_mesh_or_micro_batches(
    one_device_losses: np.ndarray, mesh: str, accumulate: int, forward_options: dict[str, Any]
):
    setup = runs.make_setup(runs.LLAMA, mesh, accumulate, dropout=runs.DROPOUT, **forward_options)
    np.testing.assert_allclose(train_losses(setup), one_device_losses, rtol=2e-5)


def test_masks_differ_between_steps():
    """The same batch and parameters: the learning rate of the first step is 0."""
    setup = runs.make_setup(runs.LLAMA, dropout=runs.DROPOUT)
    job, state = runs.make_job(setup), runs.make_state(setup)
    batch = feed.load_batch(job.train, job.order.rows(0), setup.sharding)
    step = compile_step(setup)
    second_state, first = step(state, batch)
    _, again = step(state, batch)
    _, second = step(second_state, batch)
    assert float(first["loss"]) == float(again["loss"])
    assert abs(float(first["loss"]) - float(second["loss"])) > 0.1


def test_step_without_dropout_has_no_random_numbers():
    setup = runs.make_setup(runs.LLAMA)
    batch = {name: jnp.zeros(leaf.shape, leaf.dtype) for name, leaf in batch_shapes(setup).items()}
    assert "shift_left" not in str(
        jax.make_jaxpr(partial(train_step, setup=setup))(runs.make_state(setup), batch)
    )
    dropping = runs.make_setup(runs.LLAMA, dropout=runs.DROPOUT)
    assert "shift_left" in str(
        jax.make_jaxpr(partial(train_step, setup=dropping))(runs.make_state(setup), batch)
    )


def batch_shapes(setup: StepSetup) -> dict[str, jax.ShapeDtypeStruct]:
    return feed.batch_shapes(runs.make_job(setup).train, 8, setup.sharding)
