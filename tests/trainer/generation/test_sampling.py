"""What is drawn: which tokens temperature, k and p leave, how often each comes, and what a draw depends on."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.generation.sampling import Sampling, sample_tokens, warp_logits
from trainer.models.errors import USAGE, PrepError

VOCAB = 12
LEVELS = st.integers(-20, 20).map(lambda tenth: tenth / 4)  # far enough apart for float32, and alike at times


def shares(logits: np.ndarray, how: Sampling) -> np.ndarray:
    """The probability of each token, as transformers' warpers have it one after the other, in float64."""
    scores = logits.astype(np.float64) / how.temperature
    if how.top_k:
        scores = np.where(scores < np.sort(scores)[-min(how.top_k, len(scores))], -np.inf, scores)
    if how.top_p < 1:
        order = np.argsort(scores, kind="stable")
        taken = np.cumsum(softmax(scores[order])) <= 1 - how.top_p + 1e-9
        taken[-1] = False
        scores[order[taken]] = -np.inf
    return softmax(scores)


def softmax(scores: np.ndarray) -> np.ndarray:
    found = np.exp(scores - scores.max())
    return found / found.sum()


@given(
    logits=st.lists(LEVELS, min_size=2, max_size=VOCAB, unique=True),
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    top_k=st.integers(0, VOCAB + 2),
    top_p=st.sampled_from([1e-6, 0.1, 0.35, 0.6, 0.9, 0.999, 1.0]),
)
@settings(max_examples=150, deadline=None)
def test_what_is_left_is_what_the_warpers_leave(logits: list[float], temperature: float, top_k: int, top_p: float):
    how = Sampling(temperature, top_k, top_p)
    row = np.full(VOCAB, -1e30, np.float32)  # as rows of padding have it: one shape for all examples
    row[: len(logits)] = logits
    wanted = shares(row, how)
    found = softmax(np.asarray(warp_logits(jnp.asarray(row[None]), how))[0].astype(np.float64))
    np.testing.assert_allclose(found, wanted, atol=1e-5)


def test_equal_tokens_stay_together_at_the_edge_of_k():
    found = np.asarray(warp_logits(jnp.array([[1.0, 3.0, 2.0, 2.0, 0.0]]), Sampling(1.0, 2)))
    assert np.isfinite(found[0]).tolist() == [False, True, True, True, False]


@pytest.mark.parametrize(
    "how", [Sampling(1.0), Sampling(0.5, top_k=4), Sampling(2.0, top_p=0.7), Sampling(1.5, 6, 0.8)]
)
def test_tokens_come_as_often_as_they_are_likely(how: Sampling):
    logits = np.random.default_rng(1).standard_normal(VOCAB).astype(np.float32)
    count, wanted = 20_000, shares(logits, how)
    rows = jnp.arange(count, dtype=jnp.int32)
    drawn = np.asarray(sample_tokens(jnp.broadcast_to(logits, (count, VOCAB)), rows, jnp.int32(0), how))
    seen = np.bincount(drawn, minlength=VOCAB)
    possible = wanted > 0
    assert not seen[~possible].any()
    expected = count * wanted[possible]
    assert ((seen[possible] - expected) ** 2 / expected).sum() < 40  # chi-square of at most 11: 1 in 30,000 is above 40


def test_a_draw_depends_on_seed_row_and_step():
    logits = jnp.zeros((6, 100_000))
    rows = jnp.arange(6, dtype=jnp.int32)

    def drawn(seed: int, step: int) -> list[int]:
        return sample_tokens(logits, rows, jnp.int32(step), Sampling(1.0, seed=seed)).tolist()

    first = drawn(0, 0)
    assert first == drawn(0, 0)
    assert len({*first, *drawn(0, 1), *drawn(1, 0)}) == 18
    part = sample_tokens(logits[:2], rows[4:], jnp.int32(0), Sampling(1.0))
    assert part.tolist() == first[4:], "and not on what else is in the batch"
    wide = sample_tokens(jnp.pad(logits, ((0, 0), (0, 24)), constant_values=-1e30), rows, jnp.int32(0), Sampling(1.0))
    assert wide.tolist() == first, "nor on rows of padding"


@pytest.mark.parametrize(("temperature", "top_p"), [(0.0, 0.5), (1e-30, 0.5), (1e-300, 1.0), (1.0, 1e-300)])
def test_no_temperature_or_share_takes_the_likeliest(temperature: float, top_p: float):
    """Nor do such that float32 has not."""
    logits = jnp.asarray(np.random.default_rng(2).standard_normal((50, VOCAB)), jnp.float32)
    found = sample_tokens(logits, jnp.arange(50), jnp.int32(0), Sampling(temperature, top_k=3, top_p=top_p))
    assert (found.dtype, found.tolist()) == (jnp.int32, logits.argmax(-1).tolist())


@pytest.mark.parametrize(
    "values",
    [(-0.1, 0, 1.0, 0), (float("nan"), 0, 1.0, 0), (float("inf"), 0, 1.0, 0), (1.0, -1, 1.0, 0), (1.0, 0, 0.0, 0),
     (1.0, 0, 1.1, 0), (1.0, 0, float("nan"), 0), (1.0, 0, 1.0, -1), (1.0, 0, 1.0, 1 << 32)],
)  # fmt: skip
def test_values_out_of_range(values: tuple[float, int, float, int]):
    with pytest.raises(PrepError) as caught:
        Sampling(*values)
    assert caught.value.code == USAGE


def test_transformers_leaves_the_same():
    torch = pytest.importorskip("torch")
    process = pytest.importorskip("transformers.generation.logits_process")
    logits = np.random.default_rng(3).standard_normal((40, VOCAB)).astype(np.float32) * 2
    for temperature, top_k, top_p in [(0.7, 5, 0.9), (1.3, 12, 0.4), (1.0, 2, 0.99), (3.0, 12, 0.95)]:
        scores = torch.tensor(logits) / temperature
        for warper in (process.TopKLogitsWarper(top_k), process.TopPLogitsWarper(top_p)):
            scores = warper(None, scores)
        found = warp_logits(jnp.asarray(logits), Sampling(temperature, top_k, top_p))
        wanted = (scores - scores.max(-1, keepdim=True).values).numpy()
        np.testing.assert_allclose(np.exp(found), np.exp(wanted), atol=1e-6)
        np.testing.assert_array_equal(np.isfinite(found), np.isfinite(wanted))
