"""Tests of the feed-forward part of a layer against its formula."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
import pytest

from tests.trainer.nn.test_attention import make_arch
from trainer.nn.attention_mask import AttentionMask
from trainer.nn.block import feed_forward
from trainer.nn.context import LayerContext


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
@pytest.mark.parametrize(("has_bias", "chunk_size"), [(False, -1), (True, -1), (True, 2)])
def test_feed_forward_matches_formula(is_gated: bool, has_bias: bool, chunk_size: int):
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
    context = LayerContext(arch_config, AttentionMask(), ffn_chunk_size=chunk_size)
    output = feed_forward(jnp.asarray(x, jnp.float32), weights, context)
    np.testing.assert_allclose(output, project["down"](hidden), rtol=1e-4, atol=1e-4)
