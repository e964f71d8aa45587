"""Head and loss in one: cross entropy over chunks of tokens, so that [tokens, vocab] never exists.

Results are sums; who divides once by the sum of weights has a mean that does not depend on chunks, micro-batches or
devices. Rows beyond the true vocabulary are padding: they have no share in the loss and their gradient is exactly 0.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from trainer.distributed.sharding import Shards
from trainer.models.architecture import NO_CAP

MASKED = -1e30


class Sums(NamedTuple):
    """float32 sums over tokens: weighted cross entropy, weights, weights where the likeliest token is right."""

    loss: Array
    weight: Array
    correct: Array


class Head(NamedTuple):
    """What does not change in a run: the true vocabulary, tokens a chunk (-1: all), the mesh, the bound of logits."""

    vocab: int
    chunk: int
    shards: Shards
    cap: float = NO_CAP


def logits(hidden: Array, weight: Array, head: Head, bias: Array | None = None) -> Array:
    """[B, T, D] by [V, D] -> [B, T, V] in float32; those of padded rows are `MASKED`."""
    return _bound(_linear(hidden, weight, head, bias), head)


def _linear(hidden: Array, weight: Array, head: Head, bias: Array | None) -> Array:
    found = jnp.einsum("btd,vd->btv", hidden, weight, preferred_element_type=jnp.float32)
    found = head.shards.constrain(found, "batch", "seq", "vocab")
    return found if bias is None else found + bias


def _bound(found: Array, head: Head) -> Array:
    if head.cap != NO_CAP:
        found = head.cap * jnp.tanh(found / head.cap)
    rows = found.shape[-1]
    return found if head.vocab == rows else jnp.where(jnp.arange(rows) < head.vocab, found, MASKED)


def loss_sums(
    hidden: Array, weight: Array, targets: Array, shares: Array, head: Head, bias: Array | None = None
) -> Sums:
    """hidden [B, T, D], weight [V, D], targets [B, T], shares [B, T]: the weight of each token, 0 for none; bias [V].

    Where that is 0, target and hidden state may be anything, infinite too: they have no part in sums and gradients.
    """
    shares = shares.astype(jnp.float32)
    counts = shares > 0
    targets = jnp.where(counts, targets, 0)
    hidden = jnp.where(counts[..., None], hidden, 0)  # a slope of 0 would not do: 0 x nan is nan
    length = hidden.shape[1]
    chunk = length if head.chunk == -1 else min(head.chunk, length)
    if missing := -length % chunk:
        hidden, targets, shares = _extended(hidden, missing), _extended(targets, missing), _extended(shares, missing)
    loss, correct = _fused(head._replace(chunk=chunk), hidden, weight, bias, targets, shares)
    return Sums(loss, shares.sum(), correct)


def _extended(x: Array, missing: int) -> Array:
    return jnp.pad(x, ((0, 0), (0, missing), *[(0, 0)] * (x.ndim - 2)))


def _sums(
    head: Head, hidden: Array, weight: Array, bias: Array | None, targets: Array, shares: Array
) -> tuple[Array, Array]:
    return _forward(head, hidden, weight, bias, targets, shares)[0]


Saved = tuple[Array, Array, Array | None, Array, Array, Array]


def _forward(
    head: Head, hidden: Array, weight: Array, bias: Array | None, targets: Array, shares: Array
) -> tuple[tuple[Array, Array], Saved]:
    def step(sums: tuple[Array, Array], chunk: tuple[Array, Array, Array]) -> tuple[tuple[Array, Array], Array]:
        x, target, share = chunk
        found = logits(x, weight, head, bias)
        partition = jax.nn.logsumexp(found, axis=-1)
        gold = jnp.where(_is_target(found, target), found, 0.0).sum(-1)  # no gather: the vocabulary may be split
        counts = share > 0  # `where`, not `*`: what has no weight may be inf
        loss = jnp.where(counts, share * (partition - gold), 0.0).sum()
        correct = jnp.where(counts & (found.argmax(-1) == target), share, 0.0).sum()
        return (sums[0] + loss, sums[1] + correct), partition

    zero = jnp.zeros((), jnp.float32)
    sums, partitions = lax.scan(step, (zero, zero), _all_chunks(hidden, targets, shares, head.chunk))
    return sums, (hidden, weight, bias, targets, shares, partitions)


Gradients = tuple[Array, Array | None]  # of weight and bias


def _backward(head: Head, saved: Saved, slopes: tuple[Array, Array]) -> tuple[Array, Array, Array | None, None, None]:
    """Logits again, chunk by chunk. The weight's gradient adds up in float32: in bfloat16 it loses 1 % and more."""
    hidden, weight, bias, targets, shares, partitions = saved

    def step(gradients: Gradients, chunk: tuple[Array, Array, Array, Array]) -> tuple[Gradients, Array]:
        x, target, share, partition = chunk
        free = _linear(x, weight, head, bias)
        found = _bound(free, head)
        slope = jnp.exp(found - partition[..., None]) - _is_target(found, target)
        if head.cap != NO_CAP:
            slope = slope * (1.0 - jnp.square(jnp.tanh(free / head.cap)))
        wide = jnp.where(share[..., None] > 0, slope * (share * slopes[0])[..., None], 0.0)
        slope = wide.astype(x.dtype)
        here = jnp.einsum("btv,vd->btd", slope, weight, preferred_element_type=jnp.float32)
        there = jnp.einsum("btv,btd->vd", slope, x, preferred_element_type=jnp.float32)
        by_bias = None if gradients[1] is None else gradients[1] + wide.sum((0, 1))
        return (gradients[0] + there, by_bias), here.astype(x.dtype)

    chunks = (*_all_chunks(hidden, targets, shares, head.chunk), partitions)
    zeros = jax.tree.map(lambda each: jnp.zeros(each.shape, jnp.float32), (weight, bias))
    gradients, here = lax.scan(step, zeros, chunks)
    by_weight, by_bias = jax.tree.map(lambda found, of: found.astype(of.dtype), gradients, (weight, bias))
    return _joined(here), by_weight, by_bias, None, None


_fused = jax.custom_vjp(_sums, nondiff_argnums=(0,))
_fused.defvjp(_forward, _backward)


def _is_target(found: Array, target: Array) -> Array:
    return jnp.arange(found.shape[-1]) == target[..., None]


def _all_chunks(hidden: Array, targets: Array, shares: Array, chunk: int) -> tuple[Array, Array, Array]:
    return _chunks(hidden, chunk), _chunks(targets, chunk), _chunks(shares, chunk)


def _chunks(x: Array, chunk: int) -> Array:
    """[B, T, …] -> [T / chunk, B, chunk, …]: each device has its part of every chunk."""
    return jnp.moveaxis(x.reshape(x.shape[0], -1, chunk, *x.shape[2:]), 1, 0)


def _joined(x: Array) -> Array:
    count, batch, chunk = x.shape[:3]
    return jnp.moveaxis(x, 0, 1).reshape(batch, count * chunk, *x.shape[3:])
