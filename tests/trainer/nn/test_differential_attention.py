"""Differential attention, compared with its equations in NumPy."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from prepcli.models.architecture import LAMBDA_VECTORS
from trainer.distributed.sharding import ShardingContext
from trainer.nn.attention import (
    initial_lambdas,
    pair_factors,
    pair_values,
    subtract_pairs,
)
from trainer.nn.attention_mask import KV

EPS = 1e-3


def normal(*shape: int) -> np.ndarray:
    """Return random values in float32."""
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(np.float32)


def test_initial_lambda_grows_from_a_fifth_to_four_fifths():
    lambdas = initial_lambdas(40)
    assert lambdas[0] == 0.8 - 0.6
    assert abs(lambdas[1] - (0.8 - 0.6 * 0.7408182)) < 1e-7
    assert lambdas == sorted(lambdas)
    assert abs(lambdas[-1] - 0.8) < 1e-5


def test_pair_factors_follow_the_equation():
    vectors = dict(zip(LAMBDA_VECTORS, normal(4, 6), strict=True))
    weights = {name: {"weight": jnp.asarray(vector)} for name, vector in vectors.items()}
    factors = pair_factors(weights, jnp.float32(0.3), jnp.dtype("float32"))
    first = np.exp(vectors["lambda_q1"] @ vectors["lambda_k1"])
    second = np.exp(vectors["lambda_q2"] @ vectors["lambda_k2"])
    np.testing.assert_allclose(factors["lambda"], first - second + 0.3, rtol=1e-5)
    np.testing.assert_allclose(factors["output"], 0.7, rtol=1e-6)


def test_output_factor_is_not_rounded_to_bfloat16():
    ones = {name: {"weight": jnp.ones(6)} for name in LAMBDA_VECTORS}
    factors = pair_factors(ones, jnp.float32(0.2), jnp.dtype("bfloat16"))
    assert factors["lambda"].dtype == jnp.bfloat16
    # In bfloat16 it is 0.80078125: each layer would scale its output by 0.1 % too much.
    assert float(factors["output"]) == np.float32(1) - np.float32(0.2)
    mixed = jnp.asarray(normal(1, 3, 4, 6), jnp.bfloat16)
    assert subtract_pairs(mixed, factors, EPS).dtype == jnp.bfloat16


def test_pair_values_joins_heads_of_both_halves():
    values = normal(2, 5, 4, 3)
    paired = pair_values(KV(jnp.zeros((2, 5, 4, 3)), jnp.asarray(values)), ShardingContext())
    assert paired.values.shape == (2, 5, 4, 6)
    for head, (first, second) in enumerate([(0, 2), (1, 3), (0, 2), (1, 3)]):
        np.testing.assert_array_equal(paired.values[:, :, head, :3], values[:, :, first])
        np.testing.assert_array_equal(paired.values[:, :, head, 3:], values[:, :, second])


def test_subtract_pairs_follows_the_equation():
    mixed = normal(2, 5, 4, 6)
    factors = {"lambda": jnp.float32(0.4), "output": jnp.float32(0.7)}
    actual = subtract_pairs(jnp.asarray(mixed), factors, EPS)
    assert actual.shape == (2, 5, 4, 3)
    for pair in range(2):
        difference = mixed[:, :, pair] - 0.4 * mixed[:, :, pair + 2]
        root = np.sqrt((difference**2).mean(-1, keepdims=True) + EPS)
        output = np.concatenate([actual[:, :, 2 * pair], actual[:, :, 2 * pair + 1]], axis=-1)
        np.testing.assert_allclose(output, 0.7 * difference / root, rtol=1e-5, atol=1e-6)
