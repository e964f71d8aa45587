"""The next token from logits: rules of generation_config.json, then greedy, or sampled by temperature and filters.

The rules change logits as transformers applies them. The filters are top-k, top-p and min-p.

Axes: B rows of the batch, S slots of tokens, V true vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from prepcli.core.errors import Option, text, usage_error
from prepcli.sources.generation_config import TokenRules

# Logits are divided in float32, and its largest number is 3.4028e38.
MAX_TEMPERATURE = 3.4e38
# Smaller positive temperatures are raised to it, so that scaled logits stay finite: a difference of
# logits below 3.4e8 divided by 1e-30 is a float32.
MIN_TEMPERATURE = 1e-30
MAX_SEED = (1 << 32) - 1


@dataclass(frozen=True, slots=True)
class Sampling:
    """The options of sampling.

    Raises:
        UsageError: A value is out of range.
    """

    temperature: float = 0.0  # Divisor of logits. 0 takes the most likely token.
    top_k: int = 0  # Sample from the k most likely tokens. 0 means all.
    # Sample from the most likely tokens with a total probability of p. 1 means all.
    top_p: float = 1.0
    seed: int = 0  # Seed of the random key
    # Sample from the tokens with at least this part of the highest probability. 0 means all.
    min_p: float = 0.0

    def __post_init__(self) -> None:
        """Check the ranges of all values."""
        values = (
            (
                f"temperature {self.temperature:g}",
                0 <= self.temperature <= MAX_TEMPERATURE,
                "it must be at least 0, where 0 takes the most likely token",
                Option("temperature", 0),
            ),
            (
                f"top_k {self.top_k}",
                self.top_k >= 0,
                "it must be at least 0, where 0 takes all tokens",
                Option("top_k", 0),
            ),
            (
                f"top_p {self.top_p:g}",
                0 < self.top_p <= 1,
                "it must be above 0 and at most 1, where 1 takes all tokens",
                Option("top_p", 1),
            ),
            (
                f"min_p {self.min_p:g}",
                0 <= self.min_p <= 1,
                "it must be at least 0, where 0 takes all tokens, and at most 1",
                Option("min_p", 0),
            ),
            (
                f"seed {self.seed}",
                0 <= self.seed <= MAX_SEED,
                f"it must be from 0 to {MAX_SEED:,}",
                Option("seed", 0),
            ),
        )
        for value, is_valid, why, option in values:
            if not is_valid:
                raise usage_error(f"{value} is out of range", why, text("{}", option))


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


class DecodedTokens(NamedTuple):
    """The tokens before the next one."""

    tokens: Array  # int32 [B, S], the prompts and the text so far
    start_slots: Array  # int32 [B], the slot of each row's first token
    length: Array  # int32 [], the slot of the new token
    step: Array  # int32 [], the number of the new token


def apply_token_rules(
    logits: Array,
    decoded: DecodedTokens,
    *,
    eos_token_ids: tuple[int, ...],
    max_new_tokens: int,
    rules: TokenRules,
) -> Array:
    """Return the logits after the rules, in the order of transformers.

    Args:
        logits: float32 [B, V].
        decoded: The tokens before the new one.
        eos_token_ids: Tokens that end a row.
        max_new_tokens: Maximum number of new tokens.
        rules: The rules.
    """
    tokens, start_slots, length, step = decoded
    slots = jnp.arange(tokens.shape[1])
    is_token = (slots >= start_slots[:, None]) & (slots < length)
    logits = _add_sequence_bias(logits, decoded, rules.sequence_bias)
    if rules.repetition_penalty != 1.0:
        penalty = _float32(rules.repetition_penalty)
        penalized = jnp.where(logits < 0, logits * penalty, logits / penalty)
        logits = jnp.where(_tokens_in_vocabulary(logits, tokens, is_token), penalized, logits)
    # No text is long enough to repeat an n-gram of more tokens than slots.
    if 0 < rules.no_repeat_ngram_size <= tokens.shape[1]:
        ends = _repeated_ends(tokens, is_token, length, rules.no_repeat_ngram_size)
        logits = jnp.where(_tokens_in_vocabulary(logits, tokens, ends), -jnp.inf, logits)
    bad_words = [(ids, -math.inf) for ids in rules.bad_words_ids]
    logits = _add_sequence_bias(logits, decoded, bad_words)
    is_eos = _listed_tokens(logits, eos_token_ids)
    if rules.min_length or rules.min_new_tokens:
        is_short = (length - start_slots < rules.min_length) | (step < rules.min_new_tokens)
        logits = jnp.where(is_short[:, None] & is_eos, -jnp.inf, logits)
    if rules.forced_bos_token_id is not None:
        is_second = length - start_slots == 1
        logits = _force_tokens(logits, is_second, (rules.forced_bos_token_id,))
    if rules.forced_eos_token_id:
        is_last = jnp.broadcast_to(step == max_new_tokens - 1, logits.shape[:1])
        logits = _force_tokens(logits, is_last, rules.forced_eos_token_id)
    if rules.remove_invalid_values:
        logits = jnp.nan_to_num(logits)
    if rules.exponential_decay_length_penalty is not None:
        start, factor = rules.exponential_decay_length_penalty
        # E.g. start 10 and factor 1.1: the 13th new token, number 12, adds |logit| * (1.1^2 - 1).
        factors = _float32(factor) ** (step - start).astype(jnp.float32)
        growth = jnp.where(step > start, factors - 1, 0.0)
        logits = jnp.where(is_eos, logits + jnp.abs(logits) * growth, logits)
    if rules.suppress_tokens:
        logits = jnp.where(_listed_tokens(logits, rules.suppress_tokens), -jnp.inf, logits)
    if rules.begin_suppress_tokens:
        # The forced token after a prompt of one token is not the begin of the text.
        first_step = jnp.zeros_like(start_slots)
        if rules.forced_bos_token_id is not None:
            first_step = (length - step - start_slots == 1).astype(jnp.int32)
        is_begin = (step == first_step)[:, None]
        is_suppressed = is_begin & _listed_tokens(logits, rules.begin_suppress_tokens)
        logits = jnp.where(is_suppressed, -jnp.inf, logits)
    return logits


def _float32(value: float) -> np.float32:
    """Return a number in float32. One that is too large is infinite, as in torch."""
    with np.errstate(over="ignore"):
        return np.float32(value)


def _add_sequence_bias(
    logits: Array, decoded: DecodedTokens, biases: Sequence[tuple[tuple[int, ...], float]]
) -> Array:
    """Add a bias to the last token of each sequence where the tokens before it are the others."""
    if not biases:
        return logits
    longest = max(len(ids) for ids, _ in biases) - 1
    prefixes = np.zeros((len(biases), longest), np.int32)
    is_compared = np.zeros((len(biases), longest), bool)
    for number, (ids, _) in enumerate(biases):
        # Right-aligned: the last column is the token before the new one.
        prefixes[number, longest - len(ids) + 1 :] = ids[:-1]
        is_compared[number, longest - len(ids) + 1 :] = True
    matches = jnp.ones((logits.shape[0], len(biases)), bool)
    for column in range(longest):
        slot = decoded.length - longest + column
        # Clipped, because a slice would move a start before the first slot, e.g. of a short prompt.
        token = lax.dynamic_slice_in_dim(decoded.tokens, jnp.maximum(slot, 0), 1, axis=1)
        is_token = (slot >= decoded.start_slots)[:, None]
        is_equal = is_token & (token == prefixes[:, column])
        matches &= is_equal | ~is_compared[:, column]
    last = jnp.array([ids[-1] for ids, _ in biases], jnp.int32)
    added = jnp.where(matches, jnp.array([_float32(bias) for _, bias in biases]), 0.0)
    return logits.at[:, last].add(added)


def _force_tokens(logits: Array, is_forced: Array, token_ids: tuple[int, ...]) -> Array:
    """Return logits that leave only the listed tokens in the rows [B] to force."""
    forced = jnp.where(_listed_tokens(logits, token_ids), 0.0, -jnp.inf)
    return jnp.where(is_forced[:, None], forced, logits)


def _tokens_in_vocabulary(logits: Array, tokens: Array, is_selected: Array) -> Array:
    """Return which tokens of the vocabulary [B, V] are among the selected tokens [B, S]."""
    rows = jnp.arange(tokens.shape[0])[:, None]
    return jnp.zeros(logits.shape, bool).at[rows, tokens].max(is_selected)


def _repeated_ends(tokens: Array, is_token: Array, length: Array, size: int) -> Array:
    """Return the slots [B, S] of tokens that followed an earlier occurrence of the last `size - 1` tokens."""
    # E.g. size 3 and the tokens 5 6 7 5 6: the last two are 5 6, so the 7 would repeat 5 6 7.
    follows = is_token
    for distance in range(1, size):
        last = lax.dynamic_slice_in_dim(tokens, length - distance, 1, axis=1)
        # The token `distance` slots before. Slots that wrap around are before the first token.
        earlier = jnp.roll(tokens, distance, axis=1)
        is_earlier = jnp.roll(is_token, distance, axis=1) & (
            jnp.arange(tokens.shape[1]) >= distance
        )
        follows &= is_earlier & (earlier == last)
    return follows


def _listed_tokens(logits: Array, token_ids: tuple[int, ...]) -> Array:
    """Return which tokens of the vocabulary [V] are listed."""
    return jnp.isin(jnp.arange(logits.shape[-1]), jnp.array(token_ids, jnp.int32))
