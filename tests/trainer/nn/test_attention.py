"""Tests of attention against loops over heads and positions in float64."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prepcli.models.architecture import FULL_ATTENTION, ArchConfig
from prepcli.models.rope_config import Rope
from trainer.nn.attention import attention
from trainer.nn.attention_mask import CosSin, causal_mask, rotary_cos_sin
from trainer.nn.context import LayerContext

T, D, HEAD_DIM = 6, 8, 4


def make_arch(scale: float = 0.5) -> ArchConfig:
    """Return the architecture of one layer with full attention."""
    return ArchConfig(
        norm="rms",
        norm_eps=1e-6,
        activation="silu",
        has_gated_mlp=True,
        attn_scale=scale,
        sliding_windows=(FULL_ATTENTION,),
        rope=None,
        max_positions=T,
        init_std=0.02,
    )


def random_weights(heads: int, kv_heads: int, biases: bool) -> dict[str, Any]:
    """Generate the projections of an attention."""
    rng = np.random.default_rng(heads)
    head_counts = {"q": heads, "k": kv_heads, "v": kv_heads}
    weights: dict[str, Any] = {
        name: {"weight": rng.standard_normal((count, HEAD_DIM, D))}
        for name, count in head_counts.items()
    }
    weights["o"] = {"weight": rng.standard_normal((D, heads, HEAD_DIM))}
    if biases:
        for name, count in head_counts.items():
            weights[name]["bias"] = rng.standard_normal((count, HEAD_DIM))
        weights["o"]["bias"] = rng.standard_normal(D)
    return jax.tree.map(lambda array: np.asarray(array, np.float32), weights)


@partial(jax.jit, static_argnames=("window", "scale"))
def attend(
    x: np.ndarray | jax.Array,
    weights: dict[str, Any],
    window: int,
    cos_sin: CosSin | None = None,
    scale: float = 0.5,
) -> jax.Array:
    """Compute causal self-attention."""
    mask = dataclasses.replace(causal_mask(jnp.arange(T)), window=window, cos_sin=cos_sin)
    return attention(jnp.asarray(x), weights, LayerContext(make_arch(scale), mask))[0]


def naive_attention(
    x: np.ndarray, weights: dict[str, Any], scale: float, window: int
) -> np.ndarray:
    """Compute causal self-attention position by position and head by head."""
    w = {
        name: {key: np.asarray(a, np.float64) for key, a in arrays.items()}
        for name, arrays in weights.items()
    }
    q, k, v = (
        np.einsum("btd,hed->bthe", x, w[n]["weight"]) + w[n].get("bias", 0) for n in ("q", "k", "v")
    )
    group = q.shape[2] // k.shape[2]
    out = np.zeros((*x.shape[:2], D)) + w["o"].get("bias", 0)
    for b in range(x.shape[0]):
        for head in range(q.shape[2]):
            for t in range(x.shape[1]):
                first = 0 if window == FULL_ATTENTION else max(0, t - window + 1)
                scores = np.exp(
                    [q[b, t, head] @ k[b, s, head // group] * scale for s in range(first, t + 1)]
                )
                mixed = scores / scores.sum() @ v[b, first : t + 1, head // group]
                out[b, t] += w["o"]["weight"][:, head] @ mixed
    return out


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 2), (3, 1)])
@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("window", [FULL_ATTENTION, 3])
def test_attention_matches_naive_loops(heads: int, kv_heads: int, biases: bool, window: int):
    x = np.random.default_rng(0).standard_normal((2, T, D)).astype(np.float32)
    weights = random_weights(heads, kv_heads, biases)
    output = attend(x, weights, window)
    np.testing.assert_allclose(
        output, naive_attention(x, weights, 0.5, window), rtol=1e-4, atol=2e-4
    )


@pytest.mark.parametrize("window", [FULL_ATTENTION, 1, 2, 5, 6, 100])
def test_attention_sees_only_its_window(window: int):
    """A change of one token changes the output of exactly the tokens that attend to it."""
    x = np.random.default_rng(1).standard_normal((1, T, D)).astype(np.float32)
    weights = random_weights(2, 1, False)
    before = attend(x, weights, window)
    for changed in range(T):
        changed_x = x.copy()
        changed_x[0, changed] += 1
        after = attend(changed_x, weights, window)
        is_visible = [
            changed <= t and (window == FULL_ATTENTION or t - changed < window) for t in range(T)
        ]
        assert (abs(after - before).max(axis=(0, 2)) > 1e-6).tolist() == is_visible


def test_rotary_attention_depends_on_distances_only():
    """A shift of all positions changes nothing, but the rotation itself does."""
    weights = random_weights(2, 2, False)
    x = np.random.default_rng(2).standard_normal((1, T, D)).astype(np.float32)
    cos_sin = rotary_cos_sin(Rope(HEAD_DIM, 10.0, T), jnp.arange(T))
    unrotated = attend(x, weights, FULL_ATTENTION)
    rotated = attend(x, weights, FULL_ATTENTION, cos_sin)
    cosine, sine, _ = rotary_cos_sin(Rope(HEAD_DIM, 10.0, T), jnp.arange(T + 3))
    shifted = attend(x, weights, FULL_ATTENTION, CosSin(cosine[3:], sine[3:]))
    np.testing.assert_allclose(shifted, rotated, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(rotated[:, 0], unrotated[:, 0], rtol=1e-5)
    assert abs(rotated - unrotated).max() > 1e-2


def test_attention_with_large_scores_is_finite():
    x = 1e4 * jnp.ones((1, T, D), jnp.float32)
    output = attend(x, random_weights(2, 2, False), 2, scale=1.0)
    assert np.isfinite(output).all()
