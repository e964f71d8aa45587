"""Tests of norms against their formulas."""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax.numpy as jnp
import numpy as np
import pytest

from tests.trainer.nn.test_attention import make_arch
from trainer.nn.projections import norm

RNG = np.random.default_rng(0)
X, SCALE, BIAS = (
    RNG.standard_normal((2, 3, 8)) * 3 + 1,
    RNG.standard_normal(8),
    RNG.standard_normal(8),
)
WEIGHTS = {"scale": jnp.asarray(SCALE, jnp.float32), "bias": jnp.asarray(BIAS, jnp.float32)}


def expected_norm(kind: Literal["layer", "rms"], eps: float) -> np.ndarray:
    """Compute the norm of X in float64."""
    if kind == "rms":
        return X / np.sqrt((X**2).mean(-1, keepdims=True) + eps) * SCALE
    return (X - X.mean(-1, keepdims=True)) / np.sqrt(X.var(-1, keepdims=True) + eps) * SCALE + BIAS


@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize("eps", [1e-6, 0.5])
def test_norm_matches_formula(kind: Literal["layer", "rms"], eps: float):
    arch_config = dataclasses.replace(make_arch(), norm=kind, norm_eps=eps)
    output = norm(jnp.asarray(X, jnp.float32), WEIGHTS, arch_config)
    np.testing.assert_allclose(output, expected_norm(kind, eps), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_norm_of_bfloat16_is_computed_in_float32(kind: Literal["layer", "rms"]):
    arch_config = dataclasses.replace(make_arch(), norm=kind)
    identity = {name: jnp.full(4096, float(name == "scale"), jnp.bfloat16) for name in WEIGHTS}
    x = jnp.asarray(np.random.default_rng(1).standard_normal((1, 4096)) + 100, jnp.bfloat16)
    x_float64 = np.asarray(x, np.float64)
    centered = x_float64 - (x_float64.mean() if kind == "layer" else 0)
    expected = centered / np.sqrt((centered**2).mean() + arch_config.norm_eps)
    output = norm(x, identity, arch_config)
    assert output.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(output, np.float64), expected, rtol=5e-3, atol=5e-3)


@pytest.mark.parametrize(("kind", "plain"), [("rms_offset", "rms"), ("layer_offset", "layer")])
def test_offset_norm_adds_one_to_scale(
    kind: Literal["rms_offset", "layer_offset"], plain: Literal["rms", "layer"]
):
    arch_config = dataclasses.replace(make_arch(), norm=kind, norm_eps=0.5)
    weights = WEIGHTS | {"scale": WEIGHTS["scale"] - 1}
    output = norm(jnp.asarray(X, jnp.float32), weights, arch_config)
    np.testing.assert_allclose(output, expected_norm(plain, 0.5), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_norm_over_two_axes_is_the_norm_of_both_as_one(kind: Literal["layer", "rms"]):
    arch_config = dataclasses.replace(make_arch(), norm=kind, norm_eps=0.5)
    heads = jnp.asarray(X, jnp.float32).reshape(2, 3, 2, 4)
    weights = {name: weight.reshape(2, 4) for name, weight in WEIGHTS.items()}
    output = norm(heads, weights, arch_config, axes=(-2, -1)).reshape(X.shape)
    np.testing.assert_allclose(output, expected_norm(kind, 0.5), rtol=1e-5, atol=1e-5)


def test_norm_without_weights_only_normalizes():
    arch_config = dataclasses.replace(make_arch(), norm="layer", norm_eps=0.5)
    output = norm(jnp.asarray(X, jnp.float32), {}, arch_config)
    np.testing.assert_allclose(
        output, (expected_norm("layer", 0.5) - BIAS) / SCALE, rtol=1e-4, atol=1e-4
    )


def test_rms_offset_scales_before_rounding():
    """A scale of 1 + 1/512, which bfloat16 rounds to 1, changes the output."""
    arch_config = dataclasses.replace(make_arch(), norm="rms_offset", norm_eps=1e-6)
    x = jnp.asarray(np.linspace(1, 2, 256)[None], jnp.bfloat16)
    unscaled, scaled = (
        norm(x, {"scale": jnp.full(256, s, jnp.bfloat16)}, arch_config) for s in (0.0, 1 / 512)
    )
    assert np.any(np.asarray(unscaled) != np.asarray(scaled))


def test_layer_norm_without_weights_is_identity_scale():
    arch_config = dataclasses.replace(make_arch(), norm="layer")
    identity = {"scale": jnp.ones(8), "bias": jnp.zeros(8)}
    x = jnp.asarray(X, jnp.float32)
    np.testing.assert_array_equal(norm(x, {}, arch_config), norm(x, identity, arch_config))
