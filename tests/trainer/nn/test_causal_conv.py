"""Tests of the causal convolution against its sum, in NumPy."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from trainer.nn.mixers import causal_conv

RNG = np.random.default_rng(0)
X = RNG.standard_normal((2, 7, 3, 2)).astype(np.float32)
TAPS = RNG.standard_normal((3, 2, 4)).astype(np.float32)
BIAS = RNG.standard_normal((3, 2)).astype(np.float32)
WEIGHTS = {"weight": jnp.asarray(TAPS), "bias": jnp.asarray(BIAS)}


def convolve(x: np.ndarray) -> np.ndarray:
    """Compute y_t = sum_d w_d x_(t-d) + b."""
    y = np.zeros_like(x) + BIAS
    for t in range(x.shape[1]):
        for distance in range(min(4, t + 1)):
            y[:, t] += TAPS[..., 3 - distance] * x[:, t - distance]
    return y


def test_causal_conv_equals_its_sum():
    output, last = causal_conv(jnp.asarray(X), WEIGHTS, None, None)
    np.testing.assert_allclose(output, convolve(X), atol=1e-6)
    np.testing.assert_array_equal(last, X[:, 4:])


def test_causal_conv_continues_from_earlier_inputs():
    first, state = causal_conv(jnp.asarray(X[:, :2]), WEIGHTS, None, None)
    second, state = causal_conv(jnp.asarray(X[:, 2:]), WEIGHTS, state, None)
    np.testing.assert_allclose(np.concatenate([first, second], axis=1), convolve(X), atol=1e-6)
    np.testing.assert_array_equal(state, X[:, 4:])


def test_causal_conv_reads_no_earlier_document():
    positions = jnp.asarray([[0, 1, 2, 0, 0, 1, 2], [-1, -1, 0, 1, 2, 3, 4]])
    output, _ = causal_conv(jnp.asarray(X), WEIGHTS, None, positions)
    documents = [convolve(X[:1, start:stop]) for start, stop in ((0, 3), (3, 4), (4, 7))]
    np.testing.assert_allclose(output[:1], np.concatenate(documents, axis=1), atol=1e-6)
    np.testing.assert_allclose(output[1:, 2:], convolve(X[1:, 2:]), atol=1e-6)
