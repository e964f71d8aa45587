"""Tests of the selective scan in chunks against the recurrence, token by token in NumPy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import jax.test_util
import numpy as np
import pytest
from jax import Array

from prepcli.models.activation_memory import SELECTIVE_SCAN_CHUNK_SIZE
from trainer.nn.scans import SelectiveInputs, selective_scan

ROWS, CHANNELS, STATE = 2, 4, 3
LENGTH = 2 * SELECTIVE_SCAN_CHUNK_SIZE + 5


def random_inputs(length: int, starts: tuple[int, ...] = ()) -> tuple[SelectiveInputs, Array]:
    """Return random inputs and rates, with documents that start at some tokens of the first row."""
    rng = np.random.default_rng(length)
    is_start = np.zeros((ROWS, length), bool)
    is_start[0, list(starts)] = True
    inputs = SelectiveInputs(
        q=jnp.asarray(rng.standard_normal((ROWS, length, STATE)), jnp.float32),
        k=jnp.asarray(rng.standard_normal((ROWS, length, STATE)), jnp.float32),
        v=jnp.asarray(rng.standard_normal((ROWS, length, CHANNELS)), jnp.float32),
        dt=jnp.asarray(rng.exponential(0.3, (ROWS, length, CHANNELS)), jnp.float32),
        is_start=jnp.asarray(is_start),
    )
    return inputs, -jnp.asarray(rng.exponential(1.0, (CHANNELS, STATE)), jnp.float32)


def scan_by_token(inputs: SelectiveInputs, rates: Array) -> tuple[np.ndarray, np.ndarray]:
    """Compute h_t = exp(dt_t A) h_(t-1) + dt_t v_t k_t and y_t = h_t . q_t in float64."""
    q, k, v, dt = (np.asarray(x, np.float64) for x in inputs[:4])
    is_start = np.asarray(inputs.is_start)
    state = np.zeros((ROWS, CHANNELS, STATE))
    outputs = np.zeros(v.shape)
    for t in range(v.shape[1]):
        state[is_start[:, t]] = 0
        state *= np.exp(dt[:, t, :, None] * np.asarray(rates, np.float64))
        state += (dt[:, t] * v[:, t])[..., None] * k[:, t, None]
        outputs[:, t] = (state * q[:, t, None]).sum(-1)
    return outputs, state


@pytest.mark.parametrize("starts", [(), (0, 3, SELECTIVE_SCAN_CHUNK_SIZE, LENGTH - 1)])
def test_scan_equals_the_recurrence(starts: tuple[int, ...]):
    inputs, rates = random_inputs(LENGTH, starts)
    outputs, state = jax.jit(selective_scan)(inputs, rates, None)
    expected, expected_state = scan_by_token(inputs, rates)
    np.testing.assert_allclose(outputs, expected, atol=2e-5)
    np.testing.assert_allclose(state, expected_state, atol=2e-5)


def test_scan_continues_from_a_state():
    inputs, rates = random_inputs(LENGTH, (3,))
    outputs, state = selective_scan(inputs, rates, None)
    first, second = (
        jax.tree.map(lambda x, part=part: x[:, part], inputs)
        for part in (slice(0, 40), slice(40, None))
    )
    first_outputs, middle = selective_scan(first, rates, None)
    second_outputs, end = selective_scan(second, rates, middle)
    joined = np.concatenate([first_outputs, second_outputs], axis=1)
    np.testing.assert_allclose(joined, outputs, atol=2e-5)
    np.testing.assert_allclose(end, state, atol=2e-5)


def test_gradient_equals_finite_differences():
    inputs, rates = random_inputs(7, (3,))

    def loss(dt: Array, rates: Array) -> Array:
        return jnp.square(selective_scan(inputs._replace(dt=dt), rates, None)[0]).sum()

    jax.test_util.check_grads(loss, (inputs.dt, rates), order=1, modes=["rev"], rtol=0.02)
