"""Norms by their formulas."""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax.numpy as jnp
import numpy as np
import pytest

from tests.trainer.nn.test_attention import make_arch
from trainer.nn.norms import norm

RNG = np.random.default_rng(0)
X, SCALE, BIAS = RNG.standard_normal((2, 3, 8)) * 3 + 1, RNG.standard_normal(8), RNG.standard_normal(8)
WEIGHTS = {"scale": jnp.asarray(SCALE, jnp.float32), "bias": jnp.asarray(BIAS, jnp.float32)}


def wanted(kind: Literal["layer", "rms"], eps: float) -> np.ndarray:
    if kind == "rms":
        return X / np.sqrt((X**2).mean(-1, keepdims=True) + eps) * SCALE
    return (X - X.mean(-1, keepdims=True)) / np.sqrt(X.var(-1, keepdims=True) + eps) * SCALE + BIAS


@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize("eps", [1e-6, 0.5])
def test_norms_are_their_formulas(kind: Literal["layer", "rms"], eps: float):
    traits = dataclasses.replace(make_arch(), norm=kind, norm_eps=eps)
    found = norm(jnp.asarray(X, jnp.float32), WEIGHTS, traits)
    np.testing.assert_allclose(found, wanted(kind, eps), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_sums_of_bfloat16_are_taken_in_float32(kind: Literal["layer", "rms"]):
    traits = dataclasses.replace(make_arch(), norm=kind)
    ones = {name: jnp.full(4096, float(name == "scale"), jnp.bfloat16) for name in WEIGHTS}
    x = jnp.asarray(np.random.default_rng(1).standard_normal((1, 4096)) + 100, jnp.bfloat16)
    wide = np.asarray(x, np.float64)
    centre = wide.mean() if kind == "layer" else 0
    exact = (wide - centre) / np.sqrt(((wide - centre) ** 2).mean() + traits.norm_eps)
    found = norm(x, ones, traits)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(found, np.float64), exact, rtol=5e-3, atol=5e-3)


def test_an_offset_scale_counts_from_one():
    traits = dataclasses.replace(make_arch(), norm="rms_offset", norm_eps=0.5)
    found = norm(jnp.asarray(X, jnp.float32), {"scale": WEIGHTS["scale"] - 1}, traits)
    np.testing.assert_allclose(found, wanted("rms", 0.5), rtol=1e-5, atol=1e-5)


def test_an_offset_scale_is_applied_before_rounding():
    """1 + 1/512 is 1 in bfloat16: added there it would be lost."""
    traits = dataclasses.replace(make_arch(), norm="rms_offset", norm_eps=1e-6)
    x = jnp.asarray(np.linspace(1, 2, 256)[None], jnp.bfloat16)
    plain, more = (norm(x, {"scale": jnp.full(256, scale, jnp.bfloat16)}, traits) for scale in (0.0, 1 / 512))
    assert np.any(np.asarray(plain) != np.asarray(more))


def test_a_layer_norm_may_have_no_weights():
    traits = dataclasses.replace(make_arch(), norm="layer")
    ones = {"scale": jnp.ones(8), "bias": jnp.zeros(8)}
    x = jnp.asarray(X, jnp.float32)
    np.testing.assert_array_equal(norm(x, {}, traits), norm(x, ones, traits))
