"""Activations and the feed-forward part, by their formulas and by transformers where that is installed."""

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


def test_all_activations_are_there():
    assert {*ACTIVATION_FUNCTIONS} == {*ACTIVATIONS} == {*FORMULAS}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_are_their_formulas(name: str):
    np.testing.assert_allclose(
        ACTIVATION_FUNCTIONS[name](jnp.asarray(X, jnp.float32)), FORMULAS[name], rtol=1e-5, atol=2e-6
    )


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_are_those_of_transformers(name: str):
    torch = pytest.importorskip("torch")
    activations = pytest.importorskip("transformers.activations")
    wanted = activations.ACT2FN[name](torch.tensor(X, dtype=torch.float32)).numpy()
    np.testing.assert_allclose(ACTIVATION_FUNCTIONS[name](jnp.asarray(X, jnp.float32)), wanted, rtol=1e-5, atol=2e-6)


def linear(seed: int, outs: int, ins: int, bias: bool) -> dict[str, jnp.ndarray]:
    rng = np.random.default_rng(seed)
    found = {"weight": rng.standard_normal((outs, ins))} | ({"bias": rng.standard_normal(outs)} if bias else {})
    return {key: jnp.asarray(value, jnp.float32) for key, value in found.items()}


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_up_activation_down(gated: bool, bias: bool):
    weights = {"gate": linear(0, 7, 4, bias), "up": linear(1, 7, 4, bias), "down": linear(2, 4, 7, bias)}
    x = np.random.default_rng(3).standard_normal((2, 3, 4))
    apply: dict[str, Callable[[np.ndarray], np.ndarray]] = {
        name: lambda x, own=own: x @ np.asarray(own["weight"]).T + np.asarray(own.get("bias", 0))
        for name, own in weights.items()
    }
    inner = np.maximum(apply["gate"](x), 0) * apply["up"](x) if gated else np.maximum(apply["up"](x), 0)
    traits = dataclasses.replace(make_arch(), activation="relu", has_gated_mlp=gated)
    found = mlp(jnp.asarray(x, jnp.float32), weights, traits, ShardingContext())
    np.testing.assert_allclose(found, apply["down"](inner), rtol=1e-4, atol=1e-4)
