"""Tests of the mixture-of-experts MLP against a loop over tokens in float64."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.trainer.nn.test_attention import make_arch
from trainer.distributed.sharding import ShardingContext
from trainer.models.architecture import ArchConfig
from trainer.nn.moe import moe_mlp, router_weights

EXPERTS, D, F = 5, 6, 7


def random_expert_weights(seed: int = 0) -> dict[str, Any]:
    """Generate the router and the experts."""
    rng = np.random.default_rng(seed)
    shapes = {"router": (EXPERTS, D), "gate": (EXPERTS, F, D), "up": (EXPERTS, F, D), "down": (EXPERTS, D, F)}
    return {name: {"weight": jnp.asarray(rng.standard_normal(shape), jnp.float32)} for name, shape in shapes.items()}


def make_moe_arch(top_k: int, normalize: bool) -> ArchConfig:
    """Return an architecture with `top_k` experts per token."""
    return dataclasses.replace(make_arch(), experts_per_token=top_k, norm_topk_prob=normalize, activation="relu")


def naive_moe_mlp(x: np.ndarray, weights: dict[str, Any], top_k: int, normalize: bool) -> np.ndarray:
    """Compute the MLP token by token and expert by expert."""
    router, gate, up, down = (
        np.asarray(weights[name]["weight"], np.float64) for name in ("router", "gate", "up", "down")
    )
    out = np.zeros(x.shape)
    for index in np.ndindex(x.shape[:2]):
        probabilities = np.exp(router @ x[index])
        probabilities /= probabilities.sum()
        experts = np.argsort(-probabilities)[:top_k]
        expert_weights = probabilities[experts] / (probabilities[experts].sum() if normalize else 1)
        for weight, expert in zip(expert_weights, experts):
            hidden = np.maximum(gate[expert] @ x[index], 0) * (up[expert] @ x[index])
            out[index] += weight * (down[expert] @ hidden)
    return out


@pytest.mark.parametrize("top_k", [1, 2, EXPERTS])
@pytest.mark.parametrize("normalize", [True, False])
def test_moe_mlp_matches_naive_loops(top_k: int, normalize: bool):
    x = np.random.default_rng(1).standard_normal((2, 3, D))
    weights = random_expert_weights()
    output = moe_mlp(jnp.asarray(x, jnp.float32), weights, make_moe_arch(top_k, normalize), ShardingContext())
    np.testing.assert_allclose(output, naive_moe_mlp(x, weights, top_k, normalize), rtol=1e-4, atol=1e-4)


def test_router_weights_are_top_k_and_float32():
    x = jnp.asarray(np.random.default_rng(2).standard_normal((1, 4, D)), jnp.bfloat16)
    router = random_expert_weights()["router"]["weight"].astype(jnp.bfloat16)
    weights = router_weights(x, router, make_moe_arch(2, True))
    assert weights.dtype == jnp.float32
    assert ((np.asarray(weights) > 0).sum(-1) == 2).all()
    np.testing.assert_allclose(np.asarray(weights).sum(-1), 1, rtol=1e-6)


def test_moe_mlp_holds_one_expert_in_memory():
    """Neither the forward nor the backward pass has an array with the hidden units of all experts."""
    x, weights = jnp.zeros((2, 64, D)), random_expert_weights()

    def loss(x: jax.Array, weights: dict[str, Any]) -> jax.Array:
        return jnp.square(moe_mlp(x, weights, make_moe_arch(2, True), ShardingContext())).sum()

    text = jax.jit(jax.grad(loss, (0, 1))).lower(x, weights).as_text()
    assert f"2x64x{F}xf32" in text
    assert f"{EXPERTS}x2x64x{F}xf32" not in text
