"""Tests of activations against their formulas, and against transformers if it is installed."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
import pytest

from prepcli.models.architecture import ACTIVATIONS
from trainer.nn.mlp import ACTIVATION_FUNCTIONS

X = np.linspace(-8, 8, 401)
ERF = np.array([math.erf(x / math.sqrt(2)) for x in X])
TANH = 0.5 * X * (1 + np.tanh(math.sqrt(2 / math.pi) * (X + 0.044715 * X**3)))
SILU = X / (1 + np.exp(-X))
FORMULAS = {
    "gelu": 0.5 * X * (1 + ERF), "gelu_new": TANH, "gelu_pytorch_tanh": TANH, "gelu_fast": TANH,
    "quick_gelu": X / (1 + np.exp(-1.702 * X)), "silu": SILU, "swish": SILU, "relu": np.maximum(X, 0),
    "relu2": np.maximum(X, 0) ** 2,
}  # fmt: skip


def test_every_activation_has_a_function_and_a_formula():
    assert {*ACTIVATION_FUNCTIONS} == {*ACTIVATIONS} == {*FORMULAS}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation_matches_formula(name: str):
    np.testing.assert_allclose(
        ACTIVATION_FUNCTIONS[name](jnp.asarray(X, jnp.float32)),
        FORMULAS[name],
        rtol=1e-5,
        atol=2e-6,
    )


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation_matches_transformers(name: str):
    torch = pytest.importorskip("torch")
    activations = pytest.importorskip("transformers.activations")
    expected = activations.ACT2FN[name](torch.tensor(X, dtype=torch.float32)).numpy()
    np.testing.assert_allclose(
        ACTIVATION_FUNCTIONS[name](jnp.asarray(X, jnp.float32)), expected, rtol=1e-5, atol=2e-6
    )
