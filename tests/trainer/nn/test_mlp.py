"""Tests of activations and the MLP against their formulas, and against transformers if it is installed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
import pytest

from tests.trainer.nn.test_attention import make_arch
from trainer.distributed.sharding import ShardingContext
from trainer.models.architecture import ACTIVATIONS
from trainer.nn.mlp import ACTIVATION_FUNCTIONS, mlp

X = np.linspace(-8, 8, 401)
ERF = np.array([math.erf(x / math.sqrt(2)) for x in X])
TANH = 0.5 * X * (1 + np.tanh(math.sqrt(2 / math.pi) * (X + 0.044715 * X**3)))
SILU = X / (1 + np.exp(-X))
FORMULAS = {
    "gelu": 0.5 * X * (1 + ERF), "gelu_new": TANH, "gelu_pytorch_tanh": TANH, "gelu_fast": TANH,
    "quick_gelu": X / (1 + np.exp(-1.702 * X)), "silu": SILU, "swish": SILU, "relu": np.maximum(X, 0),
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


def random_projection(
    seed: int, out_size: int, in_size: int, has_bias: bool
) -> dict[str, jnp.ndarray]:
    """Generate the weight and bias of a projection."""
    rng = np.random.default_rng(seed)
    arrays = {"weight": rng.standard_normal((out_size, in_size))}
    if has_bias:
        arrays["bias"] = rng.standard_normal(out_size)
    return {key: jnp.asarray(array, jnp.float32) for key, array in arrays.items()}


@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
def test_mlp_matches_formula(is_gated: bool, has_bias: bool):
    sizes = {"gate": (7, 4), "up": (7, 4), "down": (4, 7)}
    weights = {
        name: random_projection(seed, *sizes[name], has_bias) for seed, name in enumerate(sizes)
    }
    x = np.random.default_rng(3).standard_normal((2, 3, 4))
    project: dict[str, Callable[[np.ndarray], np.ndarray]] = {
        name: lambda x, p=projection: x @ np.asarray(p["weight"]).T + np.asarray(p.get("bias", 0))
        for name, projection in weights.items()
    }
    up = project["up"](x)
    hidden = np.maximum(project["gate"](x), 0) * up if is_gated else np.maximum(up, 0)
    arch_config = dataclasses.replace(make_arch(), activation="relu", has_gated_mlp=is_gated)
    output = mlp(jnp.asarray(x, jnp.float32), weights, arch_config, ShardingContext())
    np.testing.assert_allclose(output, project["down"](hidden), rtol=1e-4, atol=1e-4)
