"""Tests of linear recurrences in chunks against the recurrences, token by token in NumPy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prepcli.models.activation_memory import SCAN_CHUNK_SIZE
from trainer.nn.scans import Recurrence, chunked_scan

ROWS, GROUPS, HEADS, KEY_DIM, VALUE_DIM = 2, 3, 2, 4, 5

# Compiled, because JAX would compile each operation of a scan by itself.
scan = jax.jit(chunked_scan)


def random_inputs(length: int, *, has_beta: bool, starts: tuple[int, ...] = ()) -> Recurrence:
    """Return random inputs, with documents that start at some tokens of the first row."""
    rng = np.random.default_rng(length)
    keys = rng.standard_normal((ROWS, length, GROUPS, KEY_DIM))
    keys /= np.linalg.norm(keys, axis=-1, keepdims=True)
    is_start = np.zeros((ROWS, length), bool)
    is_start[0, list(starts)] = True
    head_shape = (ROWS, length, GROUPS, HEADS)
    beta = None
    if has_beta:
        beta = jnp.asarray(rng.uniform(0, 1, head_shape), jnp.float32)
    return Recurrence(
        q=jnp.asarray(rng.standard_normal((ROWS, length, GROUPS, KEY_DIM)), jnp.float32),
        k=jnp.asarray(keys, jnp.float32),
        v=jnp.asarray(rng.standard_normal((*head_shape, VALUE_DIM)), jnp.float32),
        log_decay=-jnp.asarray(rng.exponential(0.3, head_shape), jnp.float32),
        beta=beta,
        is_start=jnp.asarray(is_start),
    )


def scan_by_token(inputs: Recurrence) -> tuple[np.ndarray, np.ndarray]:
    """Compute S_t = a_t S_(t-1) + k_t u_t^T and y_t = S_t^T q_t in float64."""
    q, k, v, log_decay = (
        np.asarray(x, np.float64) for x in (inputs.q, inputs.k, inputs.v, inputs.log_decay)
    )
    beta = None if inputs.beta is None else np.asarray(inputs.beta, np.float64)
    is_start = np.asarray(inputs.is_start)
    length = q.shape[1]
    state = np.zeros((ROWS, GROUPS, HEADS, KEY_DIM, VALUE_DIM))
    outputs = np.zeros((ROWS, length, GROUPS, HEADS, VALUE_DIM))
    for t in range(length):
        state[is_start[:, t]] = 0
        state *= np.exp(log_decay[:, t])[..., None, None]
        key = k[:, t, :, None]
        update = v[:, t]
        if beta is not None:
            predicted = (state * key[..., None]).sum(-2)
            update = beta[:, t, ..., None] * (update - predicted)
        state += key[..., None] * update[..., None, :]
        outputs[:, t] = (state * q[:, t, :, None, :, None]).sum(-2)
    return outputs, state


@pytest.mark.parametrize("has_beta", [True, False])
@pytest.mark.parametrize("length", [1, 5, SCAN_CHUNK_SIZE, 2 * SCAN_CHUNK_SIZE + 3])
def test_chunked_scan_equals_the_recurrence(length: int, has_beta: bool):
    inputs = random_inputs(length, has_beta=has_beta)
    outputs, state = scan(inputs, None)
    expected_outputs, expected_state = scan_by_token(inputs)
    np.testing.assert_allclose(outputs, expected_outputs, atol=2e-5)
    np.testing.assert_allclose(state, expected_state, atol=2e-5)


@pytest.mark.parametrize("has_beta", [True, False])
def test_chunked_scan_starts_documents_with_a_zero_state(has_beta: bool):
    starts = (0, 3, 4, SCAN_CHUNK_SIZE, SCAN_CHUNK_SIZE + 40)
    inputs = random_inputs(2 * SCAN_CHUNK_SIZE + 3, has_beta=has_beta, starts=starts)
    # A state that is not reset must still be visible after a chunk.
    inputs = inputs._replace(log_decay=inputs.log_decay / 10)
    outputs, state = scan(inputs, None)
    expected_outputs, expected_state = scan_by_token(inputs)
    np.testing.assert_allclose(outputs, expected_outputs, atol=2e-5)
    np.testing.assert_allclose(state, expected_state, atol=2e-5)


def test_chunked_scan_continues_from_a_state():
    inputs = random_inputs(70, has_beta=True)
    whole, last_state = scan(inputs, None)
    first, state = scan(jax.tree.map(lambda x: x[:, :69], inputs), None)
    second, state = scan(jax.tree.map(lambda x: x[:, 69:], inputs), state)
    np.testing.assert_allclose(np.concatenate([first, second], axis=1), whole, atol=1e-5)
    np.testing.assert_allclose(state, last_state, atol=1e-5)


def test_chunked_scan_has_finite_gradients_under_strong_decay():
    inputs = random_inputs(SCAN_CHUNK_SIZE, has_beta=True)
    inputs = inputs._replace(log_decay=inputs.log_decay * 1e3)

    def loss(q: jax.Array, log_decay: jax.Array) -> jax.Array:
        outputs, _ = chunked_scan(inputs._replace(q=q, log_decay=log_decay), None)
        return outputs.sum()

    compute_gradients = jax.jit(jax.grad(loss, argnums=(0, 1)))
    for gradient in compute_gradients(inputs.q, inputs.log_decay):
        assert np.isfinite(gradient).all()
