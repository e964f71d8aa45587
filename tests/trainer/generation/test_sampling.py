"""Tests of sampling: filtered tokens, frequencies, and independence of the batch."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prepcli.core.errors import USAGE, PrepError
from trainer.generation.sampling import Sampling, sample_tokens, warp_logits

VOCAB = 12
# These logits are exact in float32, with frequent ties.
LOGITS = st.integers(-20, 20).map(lambda quarters: quarters / 4)


def token_probabilities(logits: np.ndarray, sampling: Sampling) -> np.ndarray:
    """Compute the probability of each token by the algorithm of transformers' warpers, in float64."""
    scores = logits.astype(np.float64) / sampling.temperature
    if sampling.top_k:
        scores = np.where(
            scores < np.sort(scores)[-min(sampling.top_k, len(scores))], -np.inf, scores
        )
    if sampling.top_p < 1:
        order = np.argsort(scores, kind="stable")
        is_removed = np.cumsum(softmax(scores[order])) <= 1 - sampling.top_p + 1e-9
        is_removed[-1] = False
        scores[order[is_removed]] = -np.inf
    return softmax(scores)


def softmax(scores: np.ndarray) -> np.ndarray:
    """Compute the softmax of one row."""
    exponentials = np.exp(scores - scores.max())
    return exponentials / exponentials.sum()


@given(
    logits=st.lists(LOGITS, min_size=2, max_size=VOCAB, unique=True),
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    top_k=st.integers(0, VOCAB + 2),
    top_p=st.sampled_from([1e-6, 0.1, 0.35, 0.6, 0.9, 0.999, 1.0]),
)
@settings(max_examples=150, deadline=None)
def test_warp_logits_matches_probabilities(
    logits: list[float], temperature: float, top_k: int, top_p: float
):
    sampling = Sampling(temperature, top_k, top_p)
    # Logits are padded like a vocabulary, so that all examples have one shape.
    row = np.full(VOCAB, -1e30, np.float32)
    row[: len(logits)] = logits
    expected = token_probabilities(row, sampling)
    warped = np.asarray(warp_logits(jnp.asarray(row[None]), sampling))[0]
    np.testing.assert_allclose(softmax(warped.astype(np.float64)), expected, atol=1e-5)


def test_top_k_keeps_ties_with_kth_token():
    warped = np.asarray(warp_logits(jnp.array([[1.0, 3.0, 2.0, 2.0, 0.0]]), Sampling(1.0, 2)))
    assert np.isfinite(warped[0]).tolist() == [False, True, True, True, False]


@pytest.mark.parametrize(
    "sampling",
    [Sampling(1.0), Sampling(0.5, top_k=4), Sampling(2.0, top_p=0.7), Sampling(1.5, 6, 0.8)],
)
def test_sampled_frequencies_match_probabilities(sampling: Sampling):
    """A chi-square statistic with at most 11 degrees of freedom exceeds 40 in 1 of 30,000 cases."""
    logits = np.random.default_rng(1).standard_normal(VOCAB).astype(np.float32)
    count, probabilities = 20_000, token_probabilities(logits, sampling)
    row_numbers = jnp.arange(count, dtype=jnp.int32)
    rows = jnp.broadcast_to(logits, (count, VOCAB))
    tokens = np.asarray(sample_tokens(rows, row_numbers, jnp.int32(0), sampling))
    frequencies = np.bincount(tokens, minlength=VOCAB)
    is_possible = probabilities > 0
    assert not frequencies[~is_possible].any()
    expected = count * probabilities[is_possible]
    assert ((frequencies[is_possible] - expected) ** 2 / expected).sum() < 40


def test_sample_depends_on_seed_row_number_and_step_only():
    logits = jnp.zeros((6, 100_000))
    row_numbers = jnp.arange(6, dtype=jnp.int32)

    def sample(seed: int, step: int) -> list[int]:
        return sample_tokens(
            logits, row_numbers, jnp.int32(step), Sampling(1.0, seed=seed)
        ).tolist()

    tokens = sample(0, 0)
    assert tokens == sample(0, 0)
    assert len({*tokens, *sample(0, 1), *sample(1, 0)}) == 18
    last_rows = sample_tokens(logits[:2], row_numbers[4:], jnp.int32(0), Sampling(1.0))
    assert last_rows.tolist() == tokens[4:], "samples must not depend on other rows"
    padded_logits = jnp.pad(logits, ((0, 0), (0, 24)), constant_values=-1e30)
    padded = sample_tokens(padded_logits, row_numbers, jnp.int32(0), Sampling(1.0))
    assert padded.tolist() == tokens, "samples must not depend on padding of the vocabulary"


@pytest.mark.parametrize(
    ("temperature", "top_p"), [(0.0, 0.5), (1e-30, 0.5), (1e-300, 1.0), (1.0, 1e-300)]
)
def test_tiny_temperature_or_top_p_takes_most_likely(temperature: float, top_p: float):
    """Values that underflow in float32 behave like 0."""
    logits = jnp.asarray(np.random.default_rng(2).standard_normal((50, VOCAB)), jnp.float32)
    sampling = Sampling(temperature, top_k=3, top_p=top_p)
    tokens = sample_tokens(logits, jnp.arange(50), jnp.int32(0), sampling)
    assert (tokens.dtype, tokens.tolist()) == (jnp.int32, logits.argmax(-1).tolist())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("temperature", value) for value in (-0.1, float("nan"), float("inf"))),
        ("top_k", -1),
        *(("top_p", value) for value in (0.0, 1.1, float("nan"))),
        *(("seed", value) for value in (-1, 1 << 32)),
    ],
)
def test_sampling_rejects_values_out_of_range(field: str, value: float):
    values: dict[str, Any] = {"temperature": 1.0, field: value}
    with pytest.raises(PrepError, match=f"{field} .* is out of range") as caught:
        Sampling(**values)
    assert caught.value.code == USAGE


def test_warp_logits_matches_transformers():
    torch = pytest.importorskip("torch")
    process = pytest.importorskip("transformers.generation.logits_process")
    logits = np.random.default_rng(3).standard_normal((40, VOCAB)).astype(np.float32) * 2
    for temperature, top_k, top_p in [
        (0.7, 5, 0.9),
        (1.3, 12, 0.4),
        (1.0, 2, 0.99),
        (3.0, 12, 0.95),
    ]:
        scores = torch.tensor(logits) / temperature
        for warper in (process.TopKLogitsWarper(top_k), process.TopPLogitsWarper(top_p)):
            scores = warper(None, scores)
        warped = warp_logits(jnp.asarray(logits), Sampling(temperature, top_k, top_p))
        expected = (scores - scores.max(-1, keepdim=True).values).numpy()
        np.testing.assert_allclose(np.exp(warped), np.exp(expected), atol=1e-6)
        np.testing.assert_array_equal(np.isfinite(warped), np.isfinite(expected))
