"""Rules of generation_config.json that change the logits before a token is chosen, as transformers applies them.

Axes: B rows of the batch, S slots of tokens, V true vocabulary.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from trainer.models.token_rules import TokenRules


def apply_token_rules(
    logits: Array,
    tokens: Array,
    *,
    start_slots: Array,
    length: Array,
    step: Array,
    eos_token_ids: tuple[int, ...],
    rules: TokenRules,
) -> Array:
    """Return the logits after the rules, in the order of transformers.

    Args:
        logits: float32 [B, V].
        tokens: int32 [B, S], the prompts and the text so far.
        start_slots: int32 [B], the slot of each row's first token.
        length: int32 [], the slot of the new token.
        step: int32 [], the number of the new token.
        eos_token_ids: Tokens that end a row.
        rules: The rules.
    """
    slots = jnp.arange(tokens.shape[1])
    is_token = (slots >= start_slots[:, None]) & (slots < length)
    if rules.repetition_penalty != 1.0:
        penalized = jnp.where(
            logits < 0, logits * rules.repetition_penalty, logits / rules.repetition_penalty
        )
        logits = jnp.where(_tokens_in_vocabulary(logits, tokens, is_token), penalized, logits)
    if rules.no_repeat_ngram_size:
        ends = _repeated_ends(tokens, is_token, length, rules.no_repeat_ngram_size)
        logits = jnp.where(_tokens_in_vocabulary(logits, tokens, ends), -jnp.inf, logits)
    if rules.min_length or rules.min_new_tokens:
        is_short = (length - start_slots < rules.min_length) | (step < rules.min_new_tokens)
        is_eos = _listed_tokens(logits, eos_token_ids)
        logits = jnp.where(is_short[:, None] & is_eos, -jnp.inf, logits)
    if rules.suppress_tokens:
        logits = jnp.where(_listed_tokens(logits, rules.suppress_tokens), -jnp.inf, logits)
    if rules.begin_suppress_tokens:
        is_suppressed = (step == 0) & _listed_tokens(logits, rules.begin_suppress_tokens)
        logits = jnp.where(is_suppressed, -jnp.inf, logits)
    return logits


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
