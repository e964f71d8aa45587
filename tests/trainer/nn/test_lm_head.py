"""The head in chunks against all logits at once, in float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax.extend.core import ClosedJaxpr, Jaxpr

from tests.helpers.tiny_transformers import relative_error
from trainer.distributed.sharding import ShardingContext
from trainer.nn.lm_head import LMHead, LossSums, loss_sums, project_logits

HERE = ShardingContext()
D = 5


@st.composite
def cases(draw) -> dict[str, Any]:
    """Few sizes, so that few programs are compiled, and any values."""
    return {
        "rows": 2,
        "length": draw(st.sampled_from([1, 4, 7])),
        "chunk": draw(st.sampled_from([-1, 1, 3, 7])),
        "vocab": 6,
        "padded": draw(st.sampled_from([6, 8])),
        "weights": draw(st.lists(st.sampled_from([0.0, 0.25, 1.0, 3.0]), min_size=14, max_size=14)),
        "garbage": draw(st.sampled_from([-100, -1, 10**6, 6])),
        "seed": draw(st.integers(0, 1000)),
    }


def arrays(case: dict[str, Any]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """hidden, weight with padding of 50, targets that are garbage where they have no weight, weights."""
    rng = np.random.default_rng(case["seed"])
    shape = case["rows"], case["length"]
    weights = np.resize(np.array(case["weights"], np.float32), shape)
    weight = np.full((case["padded"], D), 50, np.float32)
    weight[: case["vocab"]] = rng.standard_normal((case["vocab"], D))
    targets = np.where(weights > 0, rng.integers(0, case["vocab"], shape), case["garbage"])
    return rng.standard_normal((*shape, D)).astype(np.float32), weight, targets.astype(np.int32), weights


def naive(
    hidden: np.ndarray, weight: np.ndarray, targets: np.ndarray, weights: np.ndarray, vocab: int
) -> tuple[tuple[float, float, float], np.ndarray, np.ndarray]:
    """Sums, and the gradients of the loss by hidden and by weight."""
    x, w = hidden.astype(np.float64), weight[:vocab].astype(np.float64)
    found = x @ w.T
    likelihood = np.exp(found - found.max(-1, keepdims=True))
    likelihood /= likelihood.sum(-1, keepdims=True)
    targets = np.where(weights > 0, targets, 0)
    own = np.take_along_axis(likelihood, targets[..., None], -1)[..., 0]
    slope = (likelihood - np.eye(vocab)[targets]) * weights[..., None]
    by_weight = np.zeros(weight.shape)
    by_weight[:vocab] = np.einsum("btv,btd->vd", slope, x)
    correct = (weights * (found.argmax(-1) == targets)).sum()
    return (-(weights * np.log(own)).sum(), weights.sum(), correct), slope @ w, by_weight


def differentiated(
    hidden: Any, weight: Any, targets: Any, weights: Any, head: LMHead
) -> tuple[LossSums, tuple[Any, Any]]:
    def loss(x: jax.Array, w: jax.Array) -> tuple[jax.Array, LossSums]:
        sums = loss_sums(x, w, targets, weights, head)
        return sums.loss, sums

    (_, sums), gradients = jax.value_and_grad(loss, (0, 1), has_aux=True)(hidden, weight)
    return sums, gradients


ours = jax.jit(differentiated, static_argnums=4)


@settings(max_examples=40, deadline=None)
@example({"rows": 2, "length": 7, "chunk": 3, "vocab": 6, "padded": 8, "weights": [0.0], "garbage": -100, "seed": 0})
@given(cases())
def test_any_chunk_gives_what_all_logits_give(case: dict[str, Any]):
    hidden, weight, targets, weights = arrays(case)
    sums, by_hidden, by_weight = naive(hidden, weight, targets, weights, case["vocab"])
    found, gradients = ours(hidden, weight, targets, jnp.asarray(weights), LMHead(case["vocab"], case["chunk"], HERE))
    np.testing.assert_allclose(found, sums, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(gradients[0], by_hidden, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(gradients[1], by_weight, rtol=1e-4, atol=2e-5)
    assert not np.any(gradients[1][case["vocab"] :])


@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_hidden_states_without_weight_have_no_part_in_sums_and_gradients(value: float):
    hidden, weight, targets, weights = arrays(
        {"rows": 1, "length": 7, "chunk": 3, "vocab": 6, "padded": 8, "weights": [1.0, 0.0], "garbage": -100, "seed": 1}
    )
    clean, clean_gradients = ours(hidden, weight, targets, jnp.asarray(weights), LMHead(6, 3, HERE))
    hidden[weights == 0] = value
    found, gradients = ours(hidden, weight, targets, jnp.asarray(weights), LMHead(6, 3, HERE))
    np.testing.assert_array_equal(found, clean)
    np.testing.assert_array_equal(gradients[0], clean_gradients[0])
    np.testing.assert_array_equal(gradients[1], clean_gradients[1])


@pytest.mark.parametrize("chunk", [1, 8, -1])
def test_bfloat16_is_rounded_once_a_gradient(chunk: int):
    """However many chunks add to the weight's gradient, it is as exact as bfloat16 can say."""
    rng = np.random.default_rng(2)
    hidden, weight = (jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for shape in ((2, 64, 16), (24, 16)))
    targets, weights = rng.integers(0, 24, (2, 64)), np.ones((2, 64), np.float32)
    sums, by_hidden, by_weight = naive(np.asarray(hidden), np.asarray(weight), targets, weights, 24)
    found, gradients = ours(hidden, weight, targets, jnp.asarray(weights), LMHead(24, chunk, HERE))
    assert [each.dtype for each in gradients] == [jnp.bfloat16] * 2
    assert float(found.loss) == pytest.approx(sums[0], rel=1e-6)
    assert relative_error(np.asarray(gradients[0], np.float64), by_hidden) < 5e-3
    assert relative_error(np.asarray(gradients[1], np.float64), by_weight) < 5e-3


def test_the_gradient_is_scaled_by_what_comes_after():
    hidden, weight, targets, weights = map(
        jnp.asarray,
        arrays(
            {
                "rows": 2,
                "length": 4,
                "chunk": 3,
                "vocab": 6,
                "padded": 6,
                "weights": [1.0, 3.0],
                "garbage": 0,
                "seed": 3,
            }
        ),
    )
    head = LMHead(6, 3, HERE)
    _, once = ours(hidden, weight, targets, weights, head)
    scaled = jax.grad(lambda w: loss_sums(hidden, w, targets, weights, head).loss * -2.5)(weight)
    np.testing.assert_allclose(scaled, -2.5 * once[1], rtol=1e-5, atol=1e-5)


def equations(jaxpr: Jaxpr) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                if isinstance(inner, ClosedJaxpr | Jaxpr):
                    yield from equations(inner.jaxpr if isinstance(inner, ClosedJaxpr) else inner)


@pytest.mark.parametrize(("chunk", "there"), [(4, False), (10, False), (-1, True), (32, True)])
def test_all_logits_never_exist_at_once(chunk: int, there: bool):
    rows, length, vocab = 2, 32, 64
    shape = jax.ShapeDtypeStruct
    arguments = (
        shape((rows, length, D), jnp.float32),
        shape((vocab, D), jnp.float32),
        shape((rows, length), jnp.int32),
        shape((rows, length), jnp.float32),
    )
    traced = jax.make_jaxpr(lambda x, w, t, s: differentiated(x, w, t, s, LMHead(60, chunk, HERE)))(*arguments)
    sizes = [out.aval.size for equation in equations(traced.jaxpr) for out in equation.outvars]
    largest = rows * (length if there else chunk) * vocab
    assert max(sizes) == largest


def test_logits_of_padding_are_far_below():
    hidden, weight = jnp.ones((1, 2, D)), jnp.ones((4, D))
    found = project_logits(hidden, weight, LMHead(3, -1, HERE))
    assert found.shape == (1, 2, 4)
    np.testing.assert_array_equal(found[..., :3], 5)
    assert (found[..., 3] < -1e29).all()


@pytest.mark.parametrize("cap", [0.0, 1.5])
@pytest.mark.parametrize("padded", [6, 8])
def test_a_bias_and_a_bound_have_the_gradients_of_their_formula(cap: float, padded: int):
    """Against the derivative of the whole, chunked or not; padding has none, even where its logits are huge."""
    case = {"rows": 2, "length": 7, "vocab": 6, "padded": padded, "weights": [1.0, 0.0, 2.0], "garbage": -1, "seed": 4}
    hidden, weight, targets, weights = map(jnp.asarray, arrays(case))
    bias = jnp.linspace(-2, 2, padded)

    def formula(x: jax.Array, w: jax.Array, b: jax.Array) -> jax.Array:
        found = x @ w[:6].T + b[:6]
        found = cap * jnp.tanh(found / cap) if cap else found
        own = jnp.take_along_axis(found, jnp.where(weights > 0, targets, 0)[..., None], -1)[..., 0]
        return (weights * (jax.nn.logsumexp(found, -1) - own)).sum()

    def chunked(x: jax.Array, w: jax.Array, b: jax.Array) -> jax.Array:
        return loss_sums(x, w, targets, weights, LMHead(6, 3, HERE, cap), b).loss

    wanted = jax.value_and_grad(formula, (0, 1, 2))(hidden, weight, bias)
    found = jax.value_and_grad(chunked, (0, 1, 2))(hidden, weight, bias)
    np.testing.assert_allclose(found[0], wanted[0], rtol=1e-5)
    for ours, theirs in zip(found[1], wanted[1]):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=2e-5)
    assert not np.any(found[1][2][6:])
    assert not np.any(found[1][1][6:])


def test_bounded_logits_stay_within_and_padding_far_below():
    hidden, weight = 100 * jnp.ones((1, 2, D)), jnp.ones((8, D))
    found = project_logits(hidden, weight, LMHead(6, -1, HERE, 3.0), jnp.arange(8.0))
    np.testing.assert_allclose(found[..., :6], 3.0)
    assert (found[..., 6:] < -1e29).all()
