"""Tests of functions of tokens that are applied chunk by chunk."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from trainer.nn.token_chunks import over_token_chunks

RNG = np.random.default_rng(0)
X = RNG.standard_normal((2, 13, 6), np.float32)
WEIGHTS = {
    name: RNG.standard_normal(shape, np.float32)
    for name, shape in {"up": (6, 9), "down": (9, 4)}.items()
}


def feed_forward(x: Array, weights: Mapping[str, Array], constants: None = None) -> Array:
    """Compute two layers [B, C, 6] -> [B, C, 4]."""
    return jax.nn.silu(x @ weights["up"]) @ weights["down"]


@pytest.mark.parametrize("chunk_size", [-1, 1, 4, 13, 100])
def test_chunks_change_neither_output_nor_gradients(chunk_size: int):
    def loss(x: Array, weights: Mapping[str, Array]) -> tuple[Array, Array]:
        output = over_token_chunks(feed_forward, x.shape[1], chunk_size)(x, weights, None)
        return jnp.square(output).sum(), output

    def whole_loss(x: Array, weights: Mapping[str, Array]) -> tuple[Array, Array]:
        output = feed_forward(x, weights)
        return jnp.square(output).sum(), output

    @jax.jit
    def differentiate(x: Array, weights: Mapping[str, Array]) -> Any:
        return [jax.grad(f, argnums=(0, 1), has_aux=True)(x, weights) for f in (loss, whole_loss)]

    (gradients, output), (expected, expected_output) = differentiate(X, WEIGHTS)
    np.testing.assert_allclose(output, expected_output, rtol=1e-5, atol=1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), gradients, expected
    )


def test_chunks_have_tokens_of_every_shard():
    """With 6 tokens in 2 shards, one chunk has tokens 0, 1, 3, 4, and the other one tokens 2 and 5 with padding."""
    x = jnp.arange(1.0, 7).reshape(1, 6, 1)

    def add_sum_of_chunk(chunk: Array, weights: None, constants: None) -> Array:
        return chunk + 100 * chunk.sum(1, keepdims=True)

    output = over_token_chunks(add_sum_of_chunk, 6, 2, num_shards=2)(x, None, None)
    assert output[0, :, 0].tolist() == [1201, 1202, 903, 1204, 1205, 906]


def test_gradients_of_bfloat16_weights_are_summed_in_float32():
    """The gradient is a sum of 4,096 equal terms. In bfloat16 the sum would stop growing at 256 of them."""
    x, weight = jnp.ones((1, 4096, 1), jnp.bfloat16), jnp.ones((1, 1), jnp.bfloat16)

    def loss(weight: Array) -> Array:
        multiply = over_token_chunks(lambda chunk, w, _: chunk @ w, 4096, 1)
        return multiply(x, weight, None).astype(jnp.float32).sum()

    assert float(jax.grad(loss)(weight)[0, 0]) == 4096


def test_one_chunk_saves_only_products_with_weights():
    def pull_back(x: Array, weights: Mapping[str, Array]) -> Any:
        run = over_token_chunks(feed_forward, x.shape[1], -1)
        return jax.vjp(lambda x, weights: run(x, weights, None), x, weights)[1]

    residuals = jax.tree.leaves(jax.eval_shape(pull_back, X, WEIGHTS))
    assert sorted(array.shape for array in residuals if array.ndim == 3) == [X.shape, (2, 13, 9)]
