"""Tests of the chunked LM head and loss against all logits at once in float64."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from prepcli.commands.testing.tiny_model import relative_error
from prepcli.models.architecture import NO_SOFTCAP
from tests.helpers.jaxprs import walk_equations
from tests.helpers.slow_cases import slow_except
from trainer.distributed.sharding import ShardingContext
from trainer.nn.lm_head import (
    LMHead,
    LossSums,
    LossTerms,
    loss_sums,
    project_logits,
    row_loss_sums,
    training_sums,
)

ONE_DEVICE = ShardingContext()
D = 5


@st.composite
def loss_cases(draw) -> dict[str, Any]:
    """Draw sizes from few values, so that few programs are compiled, and arbitrary weights and targets."""
    return {
        "rows": 2,
        "length": draw(st.sampled_from([1, 4, 7])),
        "chunk": draw(st.sampled_from([-1, 1, 3, 7])),
        "vocab": 6,
        "padded": draw(st.sampled_from([6, 8])),
        "weights": draw(st.lists(st.sampled_from([0.0, 0.25, 1.0, 3.0]), min_size=14, max_size=14)),
        "ignored_target": draw(st.sampled_from([-100, -1, 10**6, 6])),
        "seed": draw(st.integers(0, 1000)),
    }


CASE: dict[str, Any] = {
    "rows": 2,
    "length": 7,
    "chunk": 3,
    "vocab": 6,
    "padded": 8,
    "weights": [1.0, 0.0, 3.0],
    "ignored_target": 0,
    "seed": 4,
}


def make_arrays(case: dict[str, Any]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return hidden states, head weight with padding rows of 50, targets, and token weights."""
    rng = np.random.default_rng(case["seed"])
    shape = case["rows"], case["length"]
    token_weights = np.resize(np.array(case["weights"], np.float32), shape)
    weight = np.full((case["padded"], D), 50, np.float32)
    weight[: case["vocab"]] = rng.standard_normal((case["vocab"], D))
    targets = np.where(
        token_weights > 0, rng.integers(0, case["vocab"], shape), case["ignored_target"]
    )
    return (
        rng.standard_normal((*shape, D)).astype(np.float32),
        weight,
        targets.astype(np.int32),
        token_weights,
    )


def naive_loss(
    hidden: np.ndarray,
    weight: np.ndarray,
    targets: np.ndarray,
    token_weights: np.ndarray,
    vocab: int,
) -> tuple[tuple[float, float, float], np.ndarray, np.ndarray]:
    """Compute the sums, and the gradients of the loss with respect to hidden states and weight."""
    x, w = hidden.astype(np.float64), weight[:vocab].astype(np.float64)
    logits = x @ w.T
    probabilities = np.exp(logits - logits.max(-1, keepdims=True))
    probabilities /= probabilities.sum(-1, keepdims=True)
    targets = np.where(token_weights > 0, targets, 0)
    target_probability = np.take_along_axis(probabilities, targets[..., None], -1)[..., 0]
    dlogits = (probabilities - np.eye(vocab)[targets]) * token_weights[..., None]
    dweight = np.zeros(weight.shape)
    dweight[:vocab] = np.einsum("btv,btd->vd", dlogits, x)
    correct = (token_weights * (logits.argmax(-1) == targets)).sum()
    sums = (-(token_weights * np.log(target_probability)).sum(), token_weights.sum(), correct)
    return sums, dlogits @ w, dweight


def sums_and_gradients(
    hidden: Any, weight: Any, targets: Any, token_weights: Any, head: LMHead
) -> tuple[LossSums, tuple[Any, Any]]:
    """Compute the sums, and the gradients of the loss with respect to hidden states and weight."""

    def loss(x: jax.Array, w: jax.Array) -> tuple[jax.Array, LossSums]:
        sums = loss_sums(x, w, targets, token_weights, head)
        return sums.loss, sums

    (_, sums), gradients = jax.value_and_grad(loss, (0, 1), has_aux=True)(hidden, weight)
    return sums, gradients


compiled_sums_and_gradients = jax.jit(sums_and_gradients, static_argnums=4)
compiled_logits = jax.jit(project_logits, static_argnums=2)
compiled_row_sums = jax.jit(row_loss_sums, static_argnums=4)


@settings(max_examples=20, deadline=None)
@example(CASE | {"weights": [0.0], "ignored_target": -100, "seed": 0})
@given(loss_cases())
def test_chunked_loss_matches_naive_loss(case: dict[str, Any]):
    hidden, weight, targets, token_weights = make_arrays(case)
    expected_sums, dhidden, dweight = naive_loss(
        hidden, weight, targets, token_weights, case["vocab"]
    )
    head = LMHead(case["vocab"], case["chunk"], ONE_DEVICE)
    sums, gradients = compiled_sums_and_gradients(
        hidden, weight, targets, jnp.asarray(token_weights), head
    )
    np.testing.assert_allclose(sums, expected_sums, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(gradients[0], dhidden, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(gradients[1], dweight, rtol=1e-4, atol=2e-5)
    assert not np.any(gradients[1][case["vocab"] :])


@given(loss_cases())
@settings(max_examples=10, deadline=None)
def test_sums_of_rows_match_the_naive_loss(case: dict[str, Any]):
    hidden, weight, targets, token_weights = make_arrays(case)
    head = LMHead(case["vocab"], case["chunk"], ONE_DEVICE)
    sums = compiled_row_sums(hidden, weight, targets, token_weights, head)
    for row in range(case["rows"]):
        x, target, token_weight = (
            array[row : row + 1] for array in (hidden, targets, token_weights)
        )
        expected, *_ = naive_loss(x, weight, target, token_weight, case["vocab"])
        np.testing.assert_allclose([value[row] for value in sums], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "terms", [LossTerms(z_loss=0.3), LossTerms(label_smoothing=0.2), LossTerms(0.05, 0.9)]
)
@pytest.mark.parametrize("softcap", [NO_SOFTCAP, 2.0])
def test_loss_terms_match_formula(terms: LossTerms, softcap: float):
    """Compare values with float64 formulas, and gradients with central differences of the loss."""
    case = CASE
    hidden, weight, targets, token_weights = make_arrays(case)

    def exact_loss(x: np.ndarray, w: np.ndarray) -> float:
        logits = (x.astype(np.float64) @ w.astype(np.float64).T)[..., :6]
        logits = softcap * np.tanh(logits / softcap) if softcap != NO_SOFTCAP else logits
        log_z = np.log(np.exp(logits).sum(-1))
        smoothed = (1 - terms.label_smoothing) * np.eye(6)[targets] + terms.label_smoothing / 6
        losses = -(smoothed * (logits - log_z[..., None])).sum(-1) + terms.z_loss * log_z**2
        return float((losses * token_weights).sum())

    head = LMHead(6, 3, ONE_DEVICE, softcap, terms)
    sums, gradients = compiled_sums_and_gradients(
        hidden, weight, targets, jnp.asarray(token_weights), head
    )
    assert float(sums.loss) == pytest.approx(exact_loss(hidden, weight), rel=1e-5)
    for index in np.ndindex(weight.shape):
        change = np.zeros(weight.shape)
        change[index] = 1e-5
        slope = (exact_loss(hidden, weight + change) - exact_loss(hidden, weight - change)) / 2e-5
        assert float(gradients[1][index]) == pytest.approx(slope, rel=1e-3, abs=1e-4)
    change = np.zeros(hidden.shape)
    change[1, 2] = 1e-5
    slope = (exact_loss(hidden + change, weight) - exact_loss(hidden - change, weight)) / 2e-5
    assert float(gradients[0][1, 2].sum()) == pytest.approx(slope, rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("smoothing", slow_except([0.0, 0.2], [0.2]))
def test_training_sums_have_the_z_loss_apart(smoothing: float):
    case = CASE
    arrays: Any = make_arrays(case)
    head = LMHead(6, 3, ONE_DEVICE, loss_terms=LossTerms(label_smoothing=smoothing))
    with_z_loss = head._replace(loss_terms=LossTerms(0.3, smoothing))
    compute = jax.jit(training_sums, static_argnums=4)
    plain, sums = compute(*arrays, head), compute(*arrays, with_z_loss)
    hidden, weight, _, token_weights = arrays
    log_z = jax.nn.logsumexp((hidden @ weight.T)[..., :6], axis=-1)
    assert plain.z_loss is None
    assert plain.by_name().keys() == {"loss", "weight", "correct"}
    assert (sums.loss, sums.weight, sums.correct) == plain[:3]
    assert sums.z_loss == pytest.approx(float((0.3 * log_z**2 * token_weights).sum()), rel=1e-5)
    total = jax.jit(loss_sums, static_argnums=4)(*arrays, with_z_loss).loss
    assert sums.total == sums.loss + sums.z_loss == total


@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_loss_ignores_nonfinite_hidden_of_weight_zero(value: float):
    case = CASE | {"rows": 1, "weights": [1.0, 0.0], "ignored_target": -100, "seed": 1}
    hidden, weight, targets, token_weights = make_arrays(case)
    head = LMHead(6, 3, ONE_DEVICE)
    clean_sums, clean_gradients = compiled_sums_and_gradients(
        hidden, weight, targets, jnp.asarray(token_weights), head
    )
    hidden[token_weights == 0] = value
    sums, gradients = compiled_sums_and_gradients(
        hidden, weight, targets, jnp.asarray(token_weights), head
    )
    np.testing.assert_array_equal(sums, clean_sums)
    np.testing.assert_array_equal(gradients[0], clean_gradients[0])
    np.testing.assert_array_equal(gradients[1], clean_gradients[1])


@pytest.mark.parametrize("chunk_size", [1, 8, -1])
def test_bfloat16_gradient_is_rounded_once(chunk_size: int):
    """The error of the weight's gradient does not grow with the number of chunks."""
    rng = np.random.default_rng(2)
    hidden, weight = (
        jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for shape in ((2, 64, 16), (24, 16))
    )
    targets, token_weights = rng.integers(0, 24, (2, 64)), np.ones((2, 64), np.float32)
    expected_sums, dhidden, dweight = naive_loss(
        np.asarray(hidden), np.asarray(weight), targets, token_weights, 24
    )
    head = LMHead(24, chunk_size, ONE_DEVICE)
    sums, gradients = compiled_sums_and_gradients(
        hidden, weight, targets, jnp.asarray(token_weights), head
    )
    assert [gradient.dtype for gradient in gradients] == [jnp.bfloat16] * 2
    assert float(sums.loss) == pytest.approx(expected_sums[0], rel=1e-6)
    assert relative_error(np.asarray(gradients[0], np.float64), dhidden) < 5e-3
    assert relative_error(np.asarray(gradients[1], np.float64), dweight) < 5e-3


def test_first_of_equal_logits_is_the_most_likely_token():
    hidden, weight = jnp.ones((1, 3, D)), jnp.asarray([0, 1, 1, 0, 1])[:, None] * jnp.ones(D)
    targets = jnp.asarray([[1, 2, 4]])
    head = LMHead(4, -1, ONE_DEVICE)
    sums = jax.jit(loss_sums, static_argnums=4)(hidden, weight, targets, targets, head)
    assert sums.correct == 1


def test_gradient_scales_with_cotangent():
    case = CASE | {"length": 4, "padded": 6, "weights": [1.0, 3.0], "seed": 3}
    hidden, weight, targets, token_weights = map(jnp.asarray, make_arrays(case))
    head = LMHead(6, 3, ONE_DEVICE)
    _, gradients = compiled_sums_and_gradients(hidden, weight, targets, token_weights, head)

    @jax.jit
    @jax.grad
    def scaled_gradient(weight: jax.Array) -> jax.Array:
        return loss_sums(hidden, weight, targets, token_weights, head).loss * -2.5

    scaled = scaled_gradient(weight)
    np.testing.assert_allclose(scaled, -2.5 * gradients[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("chunk_size", "holds_all"), [(4, False), (10, False), (-1, True), (32, True)]
)
def test_largest_array_holds_logits_of_one_chunk(chunk_size: int, holds_all: bool):
    rows, length, vocab = 2, 32, 64
    shape = jax.ShapeDtypeStruct
    arguments = (
        shape((rows, length, D), jnp.float32),
        shape((vocab, D), jnp.float32),
        shape((rows, length), jnp.int32),
        shape((rows, length), jnp.float32),
    )
    head = LMHead(60, chunk_size, ONE_DEVICE)
    traced = jax.make_jaxpr(lambda x, w, t, weights: sums_and_gradients(x, w, t, weights, head))(
        *arguments
    )
    sizes = [out.aval.size for equation in walk_equations(traced.jaxpr) for out in equation.outvars]
    assert max(sizes) == rows * (length if holds_all else chunk_size) * vocab


def test_logits_of_padding_rows_are_masked():
    hidden, weight = jnp.ones((1, 2, D)), jnp.ones((4, D))
    logits = compiled_logits(hidden, weight, LMHead(3, -1, ONE_DEVICE))
    assert logits.shape == (1, 2, 4)
    np.testing.assert_array_equal(logits[..., :3], 5)
    assert (logits[..., 3] < -1e29).all()


@pytest.mark.parametrize("softcap", [0.0, 1.5])
@pytest.mark.parametrize("padded", slow_except([6, 8], [8]))
def test_gradients_of_bias_and_softcap_match_formula(softcap: float, padded: int):
    """Padding has no gradient even if its logits are huge."""
    case = CASE | {"padded": padded, "weights": [1.0, 0.0, 2.0], "ignored_target": -1}
    hidden, weight, targets, token_weights = map(jnp.asarray, make_arrays(case))
    bias = jnp.linspace(-2, 2, padded)

    def formula(x: jax.Array, w: jax.Array, b: jax.Array) -> jax.Array:
        logits = x @ w[:6].T + b[:6]
        logits = softcap * jnp.tanh(logits / softcap) if softcap else logits
        safe_targets = jnp.where(token_weights > 0, targets, 0)
        target_logits = jnp.take_along_axis(logits, safe_targets[..., None], -1)[..., 0]
        return (token_weights * (jax.nn.logsumexp(logits, -1) - target_logits)).sum()

    def chunked(x: jax.Array, w: jax.Array, b: jax.Array) -> jax.Array:
        return loss_sums(x, w, targets, token_weights, LMHead(6, 3, ONE_DEVICE, softcap), b).loss

    expected_loss, expected = jax.jit(jax.value_and_grad(formula, (0, 1, 2)))(hidden, weight, bias)
    loss, gradients = jax.jit(jax.value_and_grad(chunked, (0, 1, 2)))(hidden, weight, bias)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    for gradient, expected_gradient in zip(gradients, expected):
        np.testing.assert_allclose(gradient, expected_gradient, rtol=1e-4, atol=2e-5)
    assert not np.any(gradients[2][6:])
    assert not np.any(gradients[1][6:])


def test_softcap_bounds_logits_but_not_padding():
    hidden, weight = 100 * jnp.ones((1, 2, D)), jnp.ones((8, D))
    logits = compiled_logits(hidden, weight, LMHead(6, -1, ONE_DEVICE, 3.0), jnp.arange(8.0))
    np.testing.assert_allclose(logits[..., :6], 3.0)
    assert (logits[..., 6:] < -1e29).all()
