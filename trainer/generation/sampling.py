"""The next token of each row from its logits: the likeliest one, or one drawn from what temperature, k and p leave."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array, lax

from trainer.models.errors import usage_error

MAX_TEMPERATURE = 3.4e38  # of a temperature: logits are divided in float32
MIN_TEMPERATURE = 1e-30  # of a temperature above 0, so that a difference of logits stays a number


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn. temperature: 0 is none, the likeliest token each time. top_k: only so many, 0: all.
    top_p: only the likeliest that have this share together. Usage PrepError for values out of range."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature <= MAX_TEMPERATURE:
            raise usage_error(f"a temperature of {self.temperature:g}", "it is 0 or more; 0 takes the likeliest token")
        if self.top_k < 0:
            raise usage_error(f"the {self.top_k} likeliest tokens", "top-k is a number of tokens; 0 takes all")
        if not 0 < self.top_p <= 1:
            raise usage_error(f"tokens of a share of {self.top_p:g}", "top-p is above 0 and at most 1; 1 takes all")
        if not 0 <= self.seed < 1 << 32:
            raise usage_error(f"a seed of {self.seed}", "it is a number from 0 to 4,294,967,295")


def sample_tokens(logits: Array, row_numbers: Array, step: Array, sampling: Sampling) -> Array:
    """Float32 [B, V] -> int32 [B]. What is drawn for a row depends on its logits, the seed, the row's number in `rows`
    (int32 [B]) and the step (int32 []), on nothing else."""
    if sampling.temperature == 0:
        return logits.argmax(-1).astype(jnp.int32)
    key = jax.random.key(sampling.seed)

    def draw(scores: Array, row: Array) -> Array:
        own = jax.random.fold_in(jax.random.fold_in(key, row), step)
        return jax.random.categorical(own, scores)

    return jax.vmap(draw)(warp_logits(logits, sampling), row_numbers).astype(jnp.int32)


def warp_logits(logits: Array, sampling: Sampling) -> Array:
    """Float32 [B, V]: what is drawn from, -inf for tokens that are not. As transformers has it: first temperature, then
    k, with all that are as likely as the last of them, then p of what is left, with the token that reaches it."""
    scores = (logits - logits.max(-1, keepdims=True)) / max(sampling.temperature, MIN_TEMPERATURE)
    if 0 < sampling.top_k < scores.shape[-1]:
        least = lax.top_k(scores, sampling.top_k)[0][:, -1:]
        scores = jnp.where(scores < least, -jnp.inf, scores)
    return jax.vmap(lambda row: _top_p_filter(row, sampling.top_p))(scores) if sampling.top_p < 1 else scores


def _top_p_filter(scores: Array, top_p: float) -> Array:
    """[V]: those before which less than a share has come, the likeliest first."""
    order = jnp.argsort(scores, descending=True)
    shares = jax.nn.softmax(scores[order])
    kept = (shares.cumsum() - shares < top_p).at[0].set(True)  # also of a share that float32 has not
    return jnp.where(jnp.zeros_like(kept).at[order].set(kept), scores, -jnp.inf)
