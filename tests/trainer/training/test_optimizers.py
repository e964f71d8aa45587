"""Tests of AdamW and its learning rate schedule against optax, and of weight decay by role."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.helpers import runs
from trainer.models.param_tree import flatten_tree
from trainer.training.optimizers import LRSchedule


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


@pytest.mark.parametrize("decay_embeddings", [True, False])
def test_weight_decay_skips_norms_and_biases(decay_embeddings: bool):
    setup = runs.make_setup()
    adamw = dataclasses.replace(runs.ADAMW, decay_embeddings=decay_embeddings)
    transformation = adamw.transformation(setup.model.leaves)
    ones = jax.tree.map(np.ones_like, runs.make_state(setup)["params"])
    zero_gradients = jax.tree.map(np.zeros_like, ones)
    updates: Any = transformation.update(zero_gradients, transformation.init(ones), ones)[0]
    decayed = {path for path, update in flatten_tree(updates).items() if np.abs(update).max() > 0}
    matrices = {path for path, leaf in setup.model.leaves.items() if leaf.role == "matrix"}
    assert decayed == matrices | ({"embed.tokens", "embed.positions"} if decay_embeddings else set())
    assert {"layers.attn_norm.scale", "layers.mlp.up.bias"} & decayed == set()


def test_adamw_update_matches_optax():
    setup = runs.make_setup()
    params = runs.make_state(setup)["params"]
    gradients = jax.tree.map(lambda leaf: leaf * 0.3 + 0.01, params)
    transformation = runs.ADAMW.transformation(setup.model.leaves)
    update: Any = transformation.update(gradients, transformation.init(params), params)[0]
    embeddings = {"embed": params["embed"]}
    mask = jax.tree.map(lambda leaf: leaf.ndim >= 2, embeddings)
    adamw = optax.adamw(1.0, 0.9, 0.95, 1e-8, weight_decay=0.1, mask=mask)
    expected: Any = adamw.update({"embed": gradients["embed"]}, adamw.init(embeddings), embeddings)[0]
    for name in ("tokens", "positions"):
        np.testing.assert_allclose(-update["embed"][name], expected["embed"][name], rtol=1e-6)
