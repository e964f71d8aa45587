"""Head and loss in one: cross entropy over chunks of tokens, so that [tokens, vocab] never exists.

Results are sums; who divides once by the sum of weights has a mean that does not depend on chunks, micro-batches or
devices. Rows beyond the true vocabulary are padding: they have no share in the loss and their gradient is exactly 0.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from trainer.distributed.sharding import ShardingContext
from trainer.models.architecture import NO_SOFTCAP

MASKED_LOGIT = -1e30


class LossSums(NamedTuple):
    """float32 sums over tokens: weighted cross entropy, weights, weights where the likeliest token is right."""

    loss: Array
    weight: Array
    correct: Array


class LMHead(NamedTuple):
    """What does not change in a run: the true vocabulary, tokens a chunk (-1: all), the mesh, the bound of logits."""

    true_vocab_size: int
    chunk_size: int
    sharding: ShardingContext
    logit_softcap: float = NO_SOFTCAP


def project_logits(hidden: Array, weight: Array, head: LMHead, bias: Array | None = None) -> Array:
    """[B, T, D] by [V, D] -> [B, T, V] in float32; those of padded rows are `MASKED`."""
    return _softcap_and_mask(_linear_logits(hidden, weight, head, bias), head)


def _linear_logits(hidden: Array, weight: Array, head: LMHead, bias: Array | None) -> Array:
    found = jnp.einsum("btd,vd->btv", hidden, weight, preferred_element_type=jnp.float32)
    found = head.sharding.constrain(found, "batch", "seq", "vocab")
    return found if bias is None else found + bias


def _softcap_and_mask(logits: Array, head: LMHead) -> Array:
    if head.logit_softcap != NO_SOFTCAP:
        logits = head.logit_softcap * jnp.tanh(logits / head.logit_softcap)
    rows = logits.shape[-1]
    return (
        logits
        if head.true_vocab_size == rows
        else jnp.where(jnp.arange(rows) < head.true_vocab_size, logits, MASKED_LOGIT)
    )


def loss_sums(
    hidden: Array, weight: Array, targets: Array, token_weights: Array, head: LMHead, bias: Array | None = None
) -> LossSums:
    """hidden [B, T, D], weight [V, D], targets [B, T], shares [B, T]: the weight of each token, 0 for none; bias [V].

    Where that is 0, target and hidden state may be anything, infinite too: they have no part in sums and gradients.
    """
    token_weights = token_weights.astype(jnp.float32)
    counts = token_weights > 0
    targets = jnp.where(counts, targets, 0)
    hidden = jnp.where(counts[..., None], hidden, 0)  # a slope of 0 would not do: 0 x nan is nan
    length = hidden.shape[1]
    chunk = length if head.chunk_size == -1 else min(head.chunk_size, length)
    if missing := -length % chunk:
        hidden, targets, token_weights = (
            _pad_tokens(hidden, missing),
            _pad_tokens(targets, missing),
            _pad_tokens(token_weights, missing),
        )
    loss, correct = _chunked_loss(head._replace(chunk_size=chunk), hidden, weight, bias, targets, token_weights)
    return LossSums(loss, token_weights.sum(), correct)


def _pad_tokens(x: Array, num_tokens: int) -> Array:
    return jnp.pad(x, ((0, 0), (0, num_tokens), *[(0, 0)] * (x.ndim - 2)))


def _chunked_loss_primal(
    head: LMHead, hidden: Array, weight: Array, bias: Array | None, targets: Array, token_weights: Array
) -> tuple[Array, Array]:
    return _chunked_loss_fwd(head, hidden, weight, bias, targets, token_weights)[0]


Residuals = tuple[Array, Array, Array | None, Array, Array, Array]


def _chunked_loss_fwd(
    head: LMHead, hidden: Array, weight: Array, bias: Array | None, targets: Array, token_weights: Array
) -> tuple[tuple[Array, Array], Residuals]:
    def step(sums: tuple[Array, Array], chunk: tuple[Array, Array, Array]) -> tuple[tuple[Array, Array], Array]:
        x, target, share = chunk
        found = project_logits(x, weight, head, bias)
        partition = jax.nn.logsumexp(found, axis=-1)
        gold = jnp.where(_is_target(found, target), found, 0.0).sum(-1)  # no gather: the vocabulary may be split
        counts = share > 0  # `where`, not `*`: what has no weight may be inf
        loss = jnp.where(counts, share * (partition - gold), 0.0).sum()
        correct = jnp.where(counts & (found.argmax(-1) == target), share, 0.0).sum()
        return (sums[0] + loss, sums[1] + correct), partition

    zero = jnp.zeros((), jnp.float32)
    sums, partitions = lax.scan(step, (zero, zero), _chunk_inputs(hidden, targets, token_weights, head.chunk_size))
    return sums, (hidden, weight, bias, targets, token_weights, partitions)


LMHeadGradients = tuple[Array, Array | None]  # of weight and bias


def _chunked_loss_bwd(
    head: LMHead, residuals: Residuals, cotangents: tuple[Array, Array]
) -> tuple[Array, Array, Array | None, None, None]:
    """Logits again, chunk by chunk. The weight's gradient adds up in float32: in bfloat16 it loses 1 % and more."""
    hidden, weight, bias, targets, shares, partitions = residuals

    def step(gradients: LMHeadGradients, chunk: tuple[Array, Array, Array, Array]) -> tuple[LMHeadGradients, Array]:
        x, target, share, partition = chunk
        free = _linear_logits(x, weight, head, bias)
        found = _softcap_and_mask(free, head)
        slope = jnp.exp(found - partition[..., None]) - _is_target(found, target)
        if head.logit_softcap != NO_SOFTCAP:
            slope = slope * (1.0 - jnp.square(jnp.tanh(free / head.logit_softcap)))
        wide = jnp.where(share[..., None] > 0, slope * (share * cotangents[0])[..., None], 0.0)
        slope = wide.astype(x.dtype)
        here = jnp.einsum("btv,vd->btd", slope, weight, preferred_element_type=jnp.float32)
        there = jnp.einsum("btv,btd->vd", slope, x, preferred_element_type=jnp.float32)
        by_bias = None if gradients[1] is None else gradients[1] + wide.sum((0, 1))
        return (gradients[0] + there, by_bias), here.astype(x.dtype)

    chunks = (*_chunk_inputs(hidden, targets, shares, head.chunk_size), partitions)
    zeros = jax.tree.map(lambda each: jnp.zeros(each.shape, jnp.float32), (weight, bias))
    gradients, here = lax.scan(step, zeros, chunks)
    by_weight, by_bias = jax.tree.map(lambda found, of: found.astype(of.dtype), gradients, (weight, bias))
    return _join_chunks(here), by_weight, by_bias, None, None


_chunked_loss = jax.custom_vjp(_chunked_loss_primal, nondiff_argnums=(0,))
_chunked_loss.defvjp(_chunked_loss_fwd, _chunked_loss_bwd)


def _is_target(logits: Array, target: Array) -> Array:
    return jnp.arange(logits.shape[-1]) == target[..., None]


def _chunk_inputs(hidden: Array, targets: Array, token_weights: Array, chunk_size: int) -> tuple[Array, Array, Array]:
    return (
        _split_chunks(hidden, chunk_size),
        _split_chunks(targets, chunk_size),
        _split_chunks(token_weights, chunk_size),
    )


def _split_chunks(x: Array, chunk_size: int) -> Array:
    """[B, T, …] -> [T / chunk, B, chunk, …]: each device has its part of every chunk."""
    return jnp.moveaxis(x.reshape(x.shape[0], -1, chunk_size, *x.shape[2:]), 1, 0)


def _join_chunks(x: Array) -> Array:
    count, batch, chunk = x.shape[:3]
    return jnp.moveaxis(x, 0, 1).reshape(batch, count * chunk, *x.shape[3:])
