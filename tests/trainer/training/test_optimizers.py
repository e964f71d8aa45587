"""AdamW and its learning rate: against optax's own, and what decays."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.helpers import runs
from trainer.models.param_tree import flatten_tree
from trainer.training.optimizers import LRSchedule


def at(rate: LRSchedule, *steps: int) -> list[float]:
    return [float(rate.learning_rate(jnp.int32(step))) for step in steps]


def test_cosine_with_warm_up_as_optax_has_it():
    ours = LRSchedule(1e-2, 1e-3, "cosine", 2000, 500_000)
    theirs = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 2000, 500_000, 1e-3)
    steps = (0, 1, 1000, 2000, 251_000, 500_000, 600_000)
    assert at(ours, *steps) == pytest.approx([float(np.asarray(theirs(step))) for step in steps], rel=1e-4)
    assert at(ours, 0, 1, 1000, 2000, 251_000) == pytest.approx([0.0, 5e-6, 5e-3, 1e-2, 5.5e-3], rel=1e-3)


def test_linear_goes_down_to_its_end_and_stays():
    assert at(LRSchedule(1.0, 0.2, "linear", 0, 10), 0, 5, 10, 11) == pytest.approx([1.0, 0.6, 0.2, 0.2])


def test_constant_only_warms_up():
    assert at(LRSchedule(1.0, 0.5, "constant", 4, 8), 0, 2, 4, 8, 100) == pytest.approx([0.0, 0.5, 1.0, 1.0, 1.0])


@pytest.mark.parametrize("embeddings", [True, False])
def test_norms_and_biases_never_decay(embeddings: bool):
    made = runs.make_setup()
    adamw = runs.replace(runs.ADAMW, decay_embeddings=embeddings)
    transformation = adamw.transformation(made.model.leaves)
    ones = jax.tree.map(np.ones_like, runs.make_state(made)["params"])
    zeros = jax.tree.map(np.zeros_like, ones)
    updates: Any = transformation.update(zeros, transformation.init(ones), ones)[0]
    decayed = {path for path, update in flatten_tree(updates).items() if np.abs(update).max() > 0}
    matrices = {path for path, leaf in made.model.leaves.items() if leaf.role == "matrix"}
    expected = matrices | ({"embed.tokens", "embed.positions"} if embeddings else set())
    assert decayed == expected
    assert {"layers.attn_norm.scale", "layers.mlp.up.bias"} & decayed == set()


def test_an_update_is_that_of_optax():
    made = runs.make_setup()
    params = runs.make_state(made)["params"]
    gradients = jax.tree.map(lambda leaf: leaf * 0.3 + 0.01, params)
    ours = runs.ADAMW.transformation(made.model.leaves)
    mask = jax.tree.map(lambda leaf: leaf.ndim >= 2, {"embed": params["embed"]})
    theirs = optax.adamw(1.0, 0.9, 0.95, 1e-8, weight_decay=0.1, mask=mask)
    found: Any = ours.update(gradients, ours.init(params), params)[0]
    part = {"embed": params["embed"]}
    wanted: Any = theirs.update({"embed": gradients["embed"]}, theirs.init(part), part)[0]
    for path in ("tokens", "positions"):
        np.testing.assert_allclose(-found["embed"][path], wanted["embed"][path], rtol=1e-6)
