"""Tests of the routers of MoE layers against NumPy in float64, token by token."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prepcli.core.errors import PrepError
from prepcli.models.layer_config import Router
from tests.trainer.nn.test_moe import make_moe_arch
from trainer.nn.experts import ExpertSharding
from trainer.nn.moe import route
from trainer.nn.projections import RouterWeights

NUM_EXPERTS, TOP_K, WIDTH = 12, 3, 5
ROUTERS = {
    "softmax": Router(),
    "not normalized": Router(is_normalized=False, scale=2.5),
    "sigmoid": Router("sigmoid", weight_sum_offset=1e-20),
    "groups by maximum": Router(num_groups=4, groups_per_token=2, is_normalized=False),
    "groups by top two": Router(
        "sigmoid", num_groups=3, groups_per_token=1, group_score="top_two", scale=1.5
    ),
    "bounded sum": Router(min_weight_sum=0.9),
}


def expected_weights(
    token: np.ndarray, weights: dict[str, np.ndarray], router: Router
) -> np.ndarray:
    """Return the weight of each expert for a token, 0 for experts that are not selected."""
    logits = weights["weight"] @ token + weights["bias"]
    if router.scores == "softmax":
        scores = np.exp(logits) / np.exp(logits).sum()
    else:
        scores = 1 / (1 + np.exp(-logits))
    choice = scores + weights["correction"]
    size = NUM_EXPERTS // router.num_groups
    count = 1 if router.group_score == "maximum" else 2
    groups = [np.sort(choice[i : i + size])[-count:].sum() for i in range(0, NUM_EXPERTS, size)]
    best = np.argsort(groups)[-router.groups_per_token :]
    allowed = [expert for expert in range(NUM_EXPERTS) if expert // size in best]
    selected = sorted(allowed, key=lambda expert: choice[expert])[-TOP_K:]
    result = np.zeros(NUM_EXPERTS)
    result[selected] = scores[selected]
    if router.is_normalized:
        result /= max(result.sum(), router.min_weight_sum)
    return result * router.scale


@pytest.mark.parametrize("router", ROUTERS.values(), ids=ROUTERS)
def test_route_equals_numpy(router: Router):
    rng = np.random.default_rng(3)
    x = rng.standard_normal((2, 9, WIDTH))
    weights = {
        "weight": rng.standard_normal((NUM_EXPERTS, WIDTH)),
        "bias": rng.standard_normal(NUM_EXPERTS),
        "correction": rng.standard_normal(NUM_EXPERTS) / 4,
    }
    arch_config = dataclasses.replace(make_moe_arch(TOP_K), router=router)
    tree: RouterWeights = {
        "weight": jnp.asarray(weights["weight"], jnp.float32),
        "bias": jnp.asarray(weights["bias"], jnp.float32),
        "correction": {"bias": jnp.asarray(weights["correction"], jnp.float32)},
    }
    routing = route(jnp.asarray(x, jnp.float32), tree, arch_config, ExpertSharding())
    one_hot = np.eye(NUM_EXPERTS)[np.asarray(routing.experts)]
    actual = (np.asarray(routing.weights)[..., None] * one_hot).sum(-2)
    expected = [[expected_weights(token, weights, router) for token in row] for row in x]
    np.testing.assert_allclose(actual, expected, atol=1e-6)


@pytest.mark.parametrize("top_k", [1, 2])
def test_route_orders_logits_with_equal_float32_sigmoids(top_k: int):
    """Choose by the logits, as `Llama4Router` of transformers: sigmoid(18) == sigmoid(25) in float32."""
    router = Router("sigmoid", is_normalized=False)
    arch_config = dataclasses.replace(make_moe_arch(top_k), router=router)
    weights: RouterWeights = {"weight": jnp.array([[18.0], [25.0], [3.0], [1.0]])}
    routing = route(jnp.ones((1, 1, 1)), weights, arch_config, ExpertSharding())
    assert np.asarray(routing.experts).tolist() == [[[1, 0][:top_k]]]


def test_correction_has_no_gradient():
    arch_config = make_moe_arch(TOP_K)

    def total(correction: jax.Array) -> jax.Array:
        weights: RouterWeights = {
            "weight": jnp.eye(NUM_EXPERTS, WIDTH),
            "correction": {"bias": correction},
        }
        return route(jnp.ones((1, 2, WIDTH)), weights, arch_config, ExpertSharding()).weights.sum()

    assert not jax.grad(total)(jnp.arange(NUM_EXPERTS, dtype=jnp.float32)).any()


@pytest.mark.parametrize(
    ("router", "why"),
    [
        (Router(num_groups=5), "12 experts cannot be cut into 5 equal groups"),
        (Router(num_groups=2, groups_per_token=3), "a token has 3 groups of 2"),
        (Router(num_groups=12, groups_per_token=4, group_score="top_two"), "needs 2 or more"),
        (Router(num_groups=6), "a token has 3 experts, but its groups have 2"),
    ],
)
def test_check_experts_rejects_groups(router: Router, why: str):
    with pytest.raises(PrepError, match=why):
        router.check_experts(NUM_EXPERTS, TOP_K)


def test_router_with_own_norm_scales_input_and_weights():
    rng = np.random.default_rng(4)
    x = rng.standard_normal((2, 3, WIDTH))
    matrix = rng.standard_normal((NUM_EXPERTS, WIDTH))
    input_scale = rng.standard_normal(WIDTH)
    expert_scale = rng.standard_normal(NUM_EXPERTS)
    arch_config = dataclasses.replace(make_moe_arch(TOP_K), router=Router(has_own_norm=True))
    weights: RouterWeights = {
        "weight": jnp.asarray(matrix, jnp.float32),
        "input_scale": {"weight": jnp.asarray(input_scale, jnp.float32)},
        "expert_scale": {"weight": jnp.asarray(expert_scale, jnp.float32)},
    }
    routing = route(jnp.asarray(x, jnp.float32), weights, arch_config, ExpertSharding())
    root_mean_square = np.sqrt((x**2).mean(-1, keepdims=True) + arch_config.norm_eps)
    logits = (x / root_mean_square * input_scale / np.sqrt(WIDTH)) @ matrix.T
    best = np.argsort(logits)[..., ::-1][..., :TOP_K]
    np.testing.assert_array_equal(routing.experts, best)
    selected = np.exp(np.take_along_axis(logits, best, -1))
    expected = selected / selected.sum(-1, keepdims=True) * expert_scale[best]
    np.testing.assert_allclose(routing.weights, expected, rtol=1e-5)
