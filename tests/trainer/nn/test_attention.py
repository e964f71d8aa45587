"""Attention against loops over heads and positions, in float64."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trainer.distributed.sharding import ShardingContext
from trainer.models.architecture import FULL_ATTENTION, ArchConfig
from trainer.models.rope_config import Rope
from trainer.nn.attention import attention
from trainer.nn.attention_mask import CosSin, causal_mask
from trainer.nn.position_encoding import rotary_cos_sin

T, D, HEAD_DIM = 6, 8, 4


def make_arch(scale: float = 0.5) -> ArchConfig:
    return ArchConfig(
        norm="rms", norm_eps=1e-6, activation="silu", has_gated_mlp=True, attn_scale=scale, sliding_windows=(FULL_ATTENTION,),
        rope=None, max_positions=T, init_std=0.02,
    )  # fmt: skip


def random_weights(heads: int, kv_heads: int, biases: bool) -> dict[str, Any]:
    rng = np.random.default_rng(heads)
    counts = {"q": heads, "k": kv_heads, "v": kv_heads}
    found: dict[str, Any] = {name: {"weight": rng.standard_normal((n, HEAD_DIM, D))} for name, n in counts.items()}
    found["o"] = {"weight": rng.standard_normal((D, heads, HEAD_DIM))}
    if biases:
        for name, n in counts.items():
            found[name]["bias"] = rng.standard_normal((n, HEAD_DIM))
        found["o"]["bias"] = rng.standard_normal(D)
    return {name: {key: jnp.asarray(value, jnp.float32) for key, value in own.items()} for name, own in found.items()}


def attend(
    x: np.ndarray | jax.Array, weights: dict[str, Any], window: int, turns: CosSin | None = None, scale: float = 0.5
) -> jax.Array:
    seen = dataclasses.replace(causal_mask(T), window=window, cos_sin=turns)
    return attention(jnp.asarray(x), weights, make_arch(scale), seen, ShardingContext())[0]


def naive(x: np.ndarray, weights: dict[str, Any], scale: float, window: int) -> np.ndarray:
    """Position by position, head by head."""
    w = {n: {k: np.asarray(v, np.float64) for k, v in own.items()} for n, own in weights.items()}
    q, k, v = (np.einsum("btd,hed->bthe", x, w[n]["weight"]) + w[n].get("bias", 0) for n in ("q", "k", "v"))
    group = q.shape[2] // k.shape[2]
    out = np.zeros((*x.shape[:2], D)) + w["o"].get("bias", 0)
    for b in range(x.shape[0]):
        for head in range(q.shape[2]):
            for t in range(x.shape[1]):
                first = 0 if window == FULL_ATTENTION else max(0, t - window + 1)
                scores = np.exp([q[b, t, head] @ k[b, s, head // group] * scale for s in range(first, t + 1)])
                mixed = scores / scores.sum() @ v[b, first : t + 1, head // group]
                out[b, t] += w["o"]["weight"][:, head] @ mixed
    return out


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 2), (3, 1)])
@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("window", [FULL_ATTENTION, 3])
def test_it_is_what_loops_give(heads: int, kv_heads: int, biases: bool, window: int):
    x = np.random.default_rng(0).standard_normal((2, T, D)).astype(np.float32)
    weights = random_weights(heads, kv_heads, biases)
    found = attend(x, weights, window)
    np.testing.assert_allclose(found, naive(x, weights, 0.5, window), rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("window", [FULL_ATTENTION, 1, 2, 5, 6, 100])
def test_a_token_sees_itself_and_so_many_before(window: int):
    """Each token is changed in turn: it changes what sees it, and nothing else."""
    x = np.random.default_rng(1).standard_normal((1, T, D)).astype(np.float32)
    weights = random_weights(2, 1, False)
    before = attend(x, weights, window)
    for changed in range(T):
        other = x.copy()
        other[0, changed] += 1
        after = attend(other, weights, window)
        seen = [changed <= t and (window == FULL_ATTENTION or t - changed < window) for t in range(T)]
        assert (abs(after - before).max(axis=(0, 2)) > 1e-6).tolist() == seen


def test_rotary_positions_are_relative():
    """Where all tokens are alike, shares depend on distances alone; and they do depend on them."""
    weights = random_weights(2, 2, False)
    x = np.random.default_rng(2).standard_normal((1, T, D)).astype(np.float32)
    turns = rotary_cos_sin(Rope(HEAD_DIM, 10.0, T), T)
    plain = attend(x, weights, FULL_ATTENTION)
    turned = attend(x, weights, FULL_ATTENTION, turns)
    cosine, sine = rotary_cos_sin(Rope(HEAD_DIM, 10.0, T), T + 3)
    later = attend(x, weights, FULL_ATTENTION, (cosine[3:], sine[3:]))
    np.testing.assert_allclose(later, turned, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(turned[:, 0], plain[:, 0], rtol=1e-5)
    assert abs(turned - plain).max() > 1e-2


def test_large_scores_are_no_trouble():
    x = 1e4 * jnp.ones((1, T, D), jnp.float32)
    found = attend(x, random_weights(2, 2, False), 2, scale=1.0)
    assert np.isfinite(found).all()
