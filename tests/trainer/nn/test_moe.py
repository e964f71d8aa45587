"""Mixtures of experts against a loop over tokens, in float64."""

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


def weights_of(seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    shapes = {"router": (EXPERTS, D), "gate": (EXPERTS, F, D), "up": (EXPERTS, F, D), "down": (EXPERTS, D, F)}
    return {name: {"weight": jnp.asarray(rng.standard_normal(shape), jnp.float32)} for name, shape in shapes.items()}


def traits(count: int, sum_to_one: bool) -> ArchConfig:
    return dataclasses.replace(make_arch(), experts_per_token=count, norm_topk_prob=sum_to_one, activation="relu")


def naive(x: np.ndarray, weights: dict[str, Any], count: int, sum_to_one: bool) -> np.ndarray:
    """Token by token, expert by expert."""
    router, gate, up, down = (
        np.asarray(weights[name]["weight"], np.float64) for name in ("router", "gate", "up", "down")
    )
    out = np.zeros(x.shape)
    for at in np.ndindex(x.shape[:2]):
        likely = np.exp(router @ x[at])
        likely /= likely.sum()
        chosen = np.argsort(-likely)[:count]
        shares = likely[chosen] / (likely[chosen].sum() if sum_to_one else 1)
        for share, n in zip(shares, chosen):
            out[at] += share * (down[n] @ (np.maximum(gate[n] @ x[at], 0) * (up[n] @ x[at])))
    return out


@pytest.mark.parametrize("count", [1, 2, EXPERTS])
@pytest.mark.parametrize("sum_to_one", [True, False])
def test_it_is_what_loops_give(count: int, sum_to_one: bool):
    x = np.random.default_rng(1).standard_normal((2, 3, D))
    weights = weights_of()
    found = moe_mlp(jnp.asarray(x, jnp.float32), weights, traits(count, sum_to_one), ShardingContext())
    np.testing.assert_allclose(found, naive(x, weights, count, sum_to_one), rtol=1e-4, atol=1e-4)


def test_shares_are_of_so_many_experts_and_float32():
    x = jnp.asarray(np.random.default_rng(2).standard_normal((1, 4, D)), jnp.bfloat16)
    shares = router_weights(x, weights_of()["router"]["weight"].astype(jnp.bfloat16), traits(2, True))
    assert shares.dtype == jnp.float32
    assert ((np.asarray(shares) > 0).sum(-1) == 2).all()
    np.testing.assert_allclose(np.asarray(shares).sum(-1), 1, rtol=1e-6)


def test_the_hidden_units_of_one_expert_exist_at_a_time():
    """Of all experts they would be `EXPERTS` times as many: neither pass keeps them."""
    x, weights = jnp.zeros((2, 64, D)), weights_of()

    def loss(x: jax.Array, weights: dict[str, Any]) -> jax.Array:
        return jnp.square(moe_mlp(x, weights, traits(2, True), ShardingContext())).sum()

    text = jax.jit(jax.grad(loss, (0, 1))).lower(x, weights).as_text()
    assert f"2x64x{F}xf32" in text
    assert f"{EXPERTS}x2x64x{F}xf32" not in text
