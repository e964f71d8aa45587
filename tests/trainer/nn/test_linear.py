"""The linear projection against NumPy."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from trainer.nn.projections import linear

RANDOM = np.random.default_rng(0)


@pytest.mark.parametrize("has_bias", [False, True])
def test_linear_multiplies_and_adds_the_bias(has_bias: bool):
    x, weight, bias = (
        RANDOM.normal(size=shape).astype(np.float32) for shape in ((2, 3, 5), (7, 5), (7,))
    )
    weights = {"weight": jnp.asarray(weight)} | ({"bias": jnp.asarray(bias)} if has_bias else {})
    expected = x @ weight.T + (bias if has_bias else 0)
    np.testing.assert_allclose(linear(jnp.asarray(x), weights), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("num_devices", [1, 8])
def test_linear_projects_to_heads_and_back(num_devices: int):
    x, weight = (RANDOM.normal(size=shape).astype(np.float32) for shape in ((2, 3, 5), (4, 6, 5)))
    heads = linear(jnp.asarray(x), {"weight": jnp.asarray(weight)}, num_devices=num_devices)
    np.testing.assert_allclose(heads, np.einsum("btd,hed->bthe", x, weight), rtol=1e-5, atol=1e-5)
    out_weight = weight.transpose(2, 0, 1)
    out = linear(heads, {"weight": jnp.asarray(out_weight)}, num_devices=num_devices)
    np.testing.assert_allclose(
        out, np.einsum("bthe,dhe->btd", heads, out_weight), rtol=1e-5, atol=1e-5
    )
