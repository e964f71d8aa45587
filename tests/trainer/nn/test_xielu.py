"""xIELU, compared with its equation in NumPy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from trainer.nn.projections import xielu

X = np.array([-300.0, -2.0, -1e-7, 0.0, 1e-7, 0.5, 300.0], np.float32)
ALPHA_P = 0.4
ALPHA_N = -1.1
BETA = 0.5
EPS = -1e-6


def xielu_weights() -> dict[str, dict[str, jax.Array]]:
    """Return the parameters of xIELU in one layer."""
    return {
        "xielu_alpha_p": {"weight": jnp.array(ALPHA_P)},
        "xielu_alpha_n": {"weight": jnp.array(ALPHA_N)},
        "xielu_beta": {"scale": jnp.array(BETA)},
        "xielu_eps": {"scale": jnp.array(EPS)},
    }


def test_xielu_matches_its_equation():
    x = X.astype(np.float64)
    positive = np.log1p(np.exp(ALPHA_P)) * x**2
    negative = (BETA + np.log1p(np.exp(ALPHA_N))) * (np.expm1(np.minimum(x, EPS)) - x)
    expected = np.where(x > 0, positive, negative) + BETA * x
    np.testing.assert_allclose(
        xielu(jnp.asarray(X), xielu_weights()), expected, rtol=1e-6, atol=1e-9
    )


def test_gradients_of_xielu_are_finite_and_spare_constants():
    def total(x: jax.Array, weights: dict[str, dict[str, jax.Array]]) -> jax.Array:
        return xielu(x, weights).sum()

    x_gradient, gradients = jax.grad(total, argnums=(0, 1))(jnp.asarray(X), xielu_weights())
    assert np.isfinite(x_gradient).all()
    assert gradients["xielu_beta"]["scale"] == gradients["xielu_eps"]["scale"] == 0
    assert gradients["xielu_alpha_p"]["weight"] != 0
    assert gradients["xielu_alpha_n"]["weight"] != 0
