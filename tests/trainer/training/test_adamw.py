"""Tests of AdamW against optax, and of weight decay by role."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import optax
import pytest

from prepcli.models.param_tree import flatten_tree
from tests.helpers import runs
from tests.helpers.optimizers import make_optimizer


def one_update(
    transformation: optax.GradientTransformation, gradients: Any, params: Any
) -> optax.Updates:
    """Return the first updates of a transformation."""
    return transformation.update(gradients, transformation.init(params), params)[0]


@pytest.mark.parametrize("decay_embeddings", [True, False])
def test_weight_decay_skips_norms_and_biases(decay_embeddings: bool):
    setup = runs.make_setup()
    adamw = make_optimizer("adamw", decay_embeddings=decay_embeddings)
    transformation = adamw.transformation(setup.model.leaves)
    ones = jax.tree.map(np.ones_like, runs.make_state(setup)["params"])
    zero_gradients = jax.tree.map(np.zeros_like, ones)

    updates = jax.jit(one_update, static_argnums=0)(transformation, zero_gradients, ones)
    decayed = {path for path, update in flatten_tree(updates).items() if np.abs(update).max() > 0}
    matrices = {path for path, leaf in setup.model.leaves.items() if leaf.role == "matrix"}
    assert decayed == matrices | (
        {"embed.tokens", "embed.positions"} if decay_embeddings else set()
    )
    assert {"layers.attn_norm.scale", "layers.mlp.up.bias"} & decayed == set()


def test_adamw_update_matches_optax():
    setup = runs.make_setup()
    params = runs.make_state(setup)["params"]
    gradients = jax.tree.map(lambda leaf: 0.3 * np.asarray(leaf) + np.float32(0.01), params)
    transformation = runs.ADAMW.transformation(setup.model.leaves)
    update: Any = jax.jit(one_update, static_argnums=0)(transformation, gradients, params)
    embeddings = {"embed": params["embed"]}
    mask = jax.tree.map(lambda leaf: leaf.ndim >= 2, embeddings)
    adamw = optax.adamw(1.0, 0.9, 0.95, 1e-8, weight_decay=0.1, mask=mask)
    expected: Any = jax.jit(one_update, static_argnums=0)(
        adamw, {"embed": gradients["embed"]}, embeddings
    )
    for name in ("tokens", "positions"):
        np.testing.assert_allclose(-update["embed"][name], expected["embed"][name], rtol=1e-6)
