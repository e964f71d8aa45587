"""Positions: rotary ones, frequencies in float32 as transformers computes them, and biases of scores by distance."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from jax import Array

from trainer.models.architecture import Distances
from trainer.models.rope_config import Rope


def frequencies(rope: Rope, length: int) -> np.ndarray:
    """float32 [dim / 2]: radians a position, for a call of `length` positions."""
    plain = _powers(rope.theta, rope.dim)
    match rope.kind:
        case "linear":
            return plain / np.float32(rope.factor)
        case "dynamic":
            return _dynamic(rope, length)
        case "llama3":
            return _llama3(rope, plain)
        case "yarn":
            return _yarn(rope, plain)
        case "longrope":
            factors = np.array(rope.short if length <= rope.positions else rope.long, np.float32)
            return (np.float32(1.0) / (factors * _waves(rope.theta, rope.dim))).astype(np.float32)
    return plain


def rotations(rope: Rope, length: int) -> tuple[Array, Array]:
    """Cosine and sine [length, dim / 2], float32, of positions from 0 on."""
    return _turned_by(rope, jnp.arange(length, dtype=jnp.float32)[:, None] * frequencies(rope, length))


def rotations_at(rope: Rope, positions: Array, lengths: Array, most: int) -> tuple[Array, Array]:
    """The same [B, T, dim / 2] of positions [B, T], in rows of `lengths` [B] tokens, up to `most` of them."""
    last = {"longrope": rope.positions + 1, "dynamic": most}.get(rope.kind, 0)  # the length that still changes them
    known = np.stack([frequencies(rope, length) for length in range(rope.positions, max(last, rope.positions) + 1)])
    own = jnp.asarray(known)[jnp.clip(lengths - rope.positions, 0, len(known) - 1)]
    return _turned_by(rope, positions[..., None].astype(jnp.float32) * own[:, None])


def _turned_by(rope: Rope, angles: Array) -> tuple[Array, Array]:
    return jnp.cos(angles) * rope.attention_factor, jnp.sin(angles) * rope.attention_factor


def rotate(x: Array, cosine: Array, sine: Array, neighbours: bool = False) -> Array:
    """[B, T, heads, head_dim]: as many elements of a head as the tables have angles for turn, the first ones; element i
    of their first half with element i of their second, or `neighbours` with each other."""
    cos, sin = (table.astype(x.dtype)[..., None, :] for table in (cosine, sine))
    turning, rest = jnp.split(x, [2 * cosine.shape[-1]], axis=-1)
    first, second = (turning[..., 0::2], turning[..., 1::2]) if neighbours else jnp.split(turning, 2, axis=-1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    both = jnp.stack(turned, axis=-1).reshape(turning.shape) if neighbours else jnp.concatenate(turned, axis=-1)
    return jnp.concatenate([both, rest], axis=-1) if rest.shape[-1] else both


def by_distance(table: Array, queries: Array, keys: Array, distances: Distances) -> Array:
    """[buckets, heads], positions [T] and [S], or [B, T] and [B, S] -> float32 [heads, T, S], or [B, heads, T, S]."""
    ordered = table.astype(jnp.float32)[buckets(distances)]
    apart = jnp.clip(keys[..., None, :] - queries[..., :, None], -distances.farthest, distances.farthest)
    return jnp.moveaxis(ordered[apart + distances.farthest], -1, -3)


def buckets(distances: Distances) -> np.ndarray:
    """int32: the bucket of each distance, key less query, from -farthest to farthest; of those beyond it is the same.

    Of as many as there are one way, the first half are a distance each, the others grow with its logarithm. The
    logarithm is the float32 number nearest to the exact one, as in torch; NumPy's own is sometimes the next one.
    """
    count = distances.buckets // 2 if distances.both_ways else distances.buckets
    exact, far = count // 2, np.arange(distances.farthest + 1)
    ratio = (np.maximum(far, 1).astype(np.float32) / np.float32(exact)).astype(np.float64)
    grown = np.log(ratio).astype(np.float32) / np.float32(math.log(distances.farthest / exact))
    wide = np.minimum(exact + (grown * (count - exact)).astype(np.int32), count - 1)
    before = np.where(far < exact, far, wide).astype(np.int32)
    after = before[1:] + count if distances.both_ways else np.zeros_like(before[1:])
    return np.concatenate([before[::-1], after])


def _powers(theta: float, dim: int) -> np.ndarray:
    return (np.float32(1.0) / _waves(theta, dim)).astype(np.float32)


def _waves(theta: float, dim: int) -> np.ndarray:
    return np.float32(theta) ** (np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim))


def _dynamic(rope: Rope, length: int) -> np.ndarray:
    """Beyond the positions that the model was made for, theta grows with the length."""
    longest = max(length, rope.positions)
    stretch = np.float64(rope.factor * longest / rope.positions - (rope.factor - 1))
    return _powers(rope.theta * stretch ** (rope.dim / (rope.dim - 2)), rope.dim)


def _llama3(rope: Rope, plain: np.ndarray) -> np.ndarray:
    """Short waves stay, long ones are stretched, those between are mixed."""
    wave = 2 * math.pi / plain
    mix = (rope.positions / wave - rope.low) / (rope.high - rope.low)
    between = (1 - mix) * plain / rope.factor + mix * plain
    stretched = np.where(wave > rope.positions / rope.low, plain / rope.factor, between)
    return np.where(wave < rope.positions / rope.high, plain, stretched).astype(np.float32)


def _yarn(rope: Rope, plain: np.ndarray) -> np.ndarray:
    """https://arxiv.org/abs/2309.00071: a ramp from kept to stretched frequencies."""
    low, high = (
        rope.dim * math.log(rope.positions / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))
        for turns in (rope.high, rope.low)
    )
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    width = high - low if high != low else 0.001
    ramp = np.clip((np.arange(rope.dim // 2, dtype=np.float32) - low) / width, 0, 1)
    return (plain / rope.factor * ramp + plain * (1 - ramp)).astype(np.float32)
