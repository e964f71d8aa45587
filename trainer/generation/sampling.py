"""Sampling of the next token from logits: greedy, or with temperature, top-k, top-p and min-p.

Axes: B rows of the batch, V true vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array, lax

from prepcli.core.errors import Option, text, usage_error

# Logits are divided in float32, and its largest number is 3.4028e38.
MAX_TEMPERATURE = 3.4e38
# Smaller positive temperatures are raised to it, so that scaled logits stay finite: a difference of
# logits below 3.4e8 divided by 1e-30 is a float32.
MIN_TEMPERATURE = 1e-30
MAX_SEED = (1 << 32) - 1


@dataclass(frozen=True, slots=True)
class Sampling:
    """The options of sampling.

    Attributes:
        temperature: Divisor of logits. 0 takes the most likely token.
        top_k: Sample from the k most likely tokens. 0 means all.
        top_p: Sample from the most likely tokens with a total probability of p. 1 means all.
        seed: Seed of the random key.
        min_p: Sample from the tokens with at least this part of the highest probability. 0 means all.

    Raises:
        UsageError: A value is out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        """Check the ranges of all values."""
        if not 0 <= self.temperature <= MAX_TEMPERATURE:
            why = "it must be at least 0, where 0 takes the most likely token"
            raise usage_error(
                f"temperature {self.temperature:g} is out of range",
                why,
                text("{}", Option("temperature", 0)),
            )
        if self.top_k < 0:
            why = "it must be at least 0, where 0 takes all tokens"
            raise usage_error(
                f"top_k {self.top_k} is out of range", why, text("{}", Option("top_k", 0))
            )
        if not 0 < self.top_p <= 1:
            why = "it must be above 0 and at most 1, where 1 takes all tokens"
            raise usage_error(
                f"top_p {self.top_p:g} is out of range", why, text("{}", Option("top_p", 1))
            )
        if not 0 <= self.min_p <= 1:
            why = "it must be at least 0, where 0 takes all tokens, and at most 1"
            raise usage_error(
                f"min_p {self.min_p:g} is out of range", why, text("{}", Option("min_p", 0))
            )
        if not 0 <= self.seed <= MAX_SEED:
            raise usage_error(
                f"seed {self.seed} is out of range",
                f"it must be from 0 to {MAX_SEED:,}",
                text("{}", Option("seed", 0)),
            )


def sample_tokens(logits: Array, row_numbers: Array, step: Array, sampling: Sampling) -> Array:
    """Sample one token per row.

    A row's token depends only on its logits, its number, the step and the seed, not on the rest of the batch.

    Args:
        logits: float32 [B, V].
        row_numbers: int32 [B].
        step: int32 [], the number of the new token.
        sampling: Options of sampling.

    Returns:
        int32 [B].
    """
    if sampling.temperature == 0:
        return logits.argmax(-1).astype(jnp.int32)
    key = jax.random.key(sampling.seed)

    def sample_row(row_logits: Array, row_number: Array) -> Array:
        # `fold_in` takes the number of a row in the whole run. `split` would number rows within a batch.
        row_key = jax.random.fold_in(jax.random.fold_in(key, row_number), step)
        return jax.random.categorical(row_key, row_logits)

    return jax.vmap(sample_row)(warp_logits(logits, sampling), row_numbers).astype(jnp.int32)


def warp_logits(logits: Array, sampling: Sampling) -> Array:
    """Apply temperature, then top-k, top-p and min-p, in the order of transformers' logits warpers.

    Top-k keeps all ties with the k-th token. Top-p keeps the token that reaches p.

    Args:
        logits: float32 [B, V].
        sampling: Options of sampling. The temperature is above 0.

    Returns:
        float32 [B, V], -inf for filtered tokens.
    """
    # Subtracting the maximum changes no probability, and bounds the scores by 0 from above.
    scores = (logits - logits.max(-1, keepdims=True)) / max(sampling.temperature, MIN_TEMPERATURE)
    if 0 < sampling.top_k < scores.shape[-1]:
        # Comparing with the score instead of the index keeps ties, as transformers does.
        kth_score = lax.top_k(scores, sampling.top_k)[0][:, -1:]
        scores = jnp.where(scores < kth_score, -jnp.inf, scores)
    if sampling.top_p < 1:
        scores = jax.vmap(lambda row: _top_p_filter(row, sampling.top_p))(scores)
    if sampling.min_p > 0:
        probabilities = jax.nn.softmax(scores)
        least = sampling.min_p * probabilities.max(-1, keepdims=True)
        scores = jnp.where(probabilities < least, -jnp.inf, scores)
    return scores


def _top_p_filter(scores: Array, top_p: float) -> Array:
    """Set scores [V] to -inf for tokens after more likely ones with a total probability of at least `top_p`."""
    order = jnp.argsort(scores, descending=True)
    probabilities = jax.nn.softmax(scores[order])
    # The probability of all more likely tokens, e.g. 0.5 0.3 0.2 -> 0 0.5 0.8: top-p 0.6 keeps two.
    is_kept = probabilities.cumsum() - probabilities < top_p
    # The most likely token is kept even if `top_p` underflows to 0 in float32.
    is_kept = is_kept.at[0].set(True)
    return jnp.where(jnp.zeros_like(is_kept).at[order].set(is_kept), scores, -jnp.inf)
