"""Rotations of parts of heads, of halves and of neighbours, as complex numbers turn."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from trainer.layers.positions import frequencies, rotate, rotations
from trainer.rope import Rope

T, DIM = 5, 8
X = np.random.default_rng(0).standard_normal((2, T, 3, DIM))


@pytest.mark.parametrize("turning", [2, 4, 8])
@pytest.mark.parametrize("neighbours", [False, True])
def test_pairs_turn_and_the_rest_stays(turning: int, neighbours: bool):
    rope = Rope(turning, 100.0, T)
    found = np.asarray(rotate(jnp.asarray(X, jnp.float32), *rotations(rope, T), neighbours))
    half = turning // 2
    first, second = (slice(0, turning, 2), slice(1, turning, 2)) if neighbours else (slice(half), slice(half, turning))
    angles = np.arange(T)[:, None] * 100.0 ** (-np.arange(half) / half)
    wanted = (X[..., first] + 1j * X[..., second]) * np.exp(1j * angles)[:, None]
    np.testing.assert_allclose(found[..., first], wanted.real, atol=1e-6)
    np.testing.assert_allclose(found[..., second], wanted.imag, atol=1e-6)
    np.testing.assert_array_equal(found[..., turning:], X[..., turning:].astype(np.float32))


@pytest.mark.parametrize(("length", "factors"), [(16, (1.0, 3.0)), (17, (2.0, 5.0))])
def test_long_ropes_change_as_a_whole_beyond_their_positions(length: int, factors: tuple[float, float]):
    rope = Rope(4, 100.0, 16, "longrope", short=(1.0, 3.0), long=(2.0, 5.0))
    np.testing.assert_allclose(frequencies(rope, length), [1 / factors[0], 0.1 / factors[1]], rtol=1e-6)
