"""Positions: rotary ones, frequencies in float32 as transformers computes them, and biases of scores by distance."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from jax import Array

from trainer.models.architecture import RelativePositionBias
from trainer.models.rope_config import Rope


def inverse_frequencies(rope: Rope, length: int) -> np.ndarray:
    """float32 [dim / 2]: radians a position, for a call of `length` positions."""
    plain = _default_inverse_frequencies(rope.theta, rope.rotary_dim)
    match rope.rope_type:
        case "linear":
            return plain / np.float32(rope.factor)
        case "dynamic":
            return _dynamic(rope, length)
        case "llama3":
            return _llama3(rope, plain)
        case "yarn":
            return _yarn(rope, plain)
        case "longrope":
            factors = np.array(
                rope.short_factors if length <= rope.original_max_positions else rope.long_factors, np.float32
            )
            return (np.float32(1.0) / (factors * _theta_powers(rope.theta, rope.rotary_dim))).astype(np.float32)
    return plain


def rotary_cos_sin(rope: Rope, length: int) -> tuple[Array, Array]:
    """Cosine and sine [length, dim / 2], float32, of positions from 0 on."""
    return _scaled_cos_sin(rope, jnp.arange(length, dtype=jnp.float32)[:, None] * inverse_frequencies(rope, length))


def rotary_cos_sin_at(rope: Rope, positions: Array, lengths: Array, max_length: int) -> tuple[Array, Array]:
    """The same [B, T, dim / 2] of positions [B, T], in rows of `lengths` [B] tokens, up to `most` of them."""
    last = {"longrope": rope.original_max_positions + 1, "dynamic": max_length}.get(
        rope.rope_type, 0
    )  # the length that still changes them
    known = np.stack(
        [
            inverse_frequencies(rope, length)
            for length in range(rope.original_max_positions, max(last, rope.original_max_positions) + 1)
        ]
    )
    own = jnp.asarray(known)[jnp.clip(lengths - rope.original_max_positions, 0, len(known) - 1)]
    return _scaled_cos_sin(rope, positions[..., None].astype(jnp.float32) * own[:, None])


def _scaled_cos_sin(rope: Rope, angles: Array) -> tuple[Array, Array]:
    return jnp.cos(angles) * rope.attention_factor, jnp.sin(angles) * rope.attention_factor


def apply_rotary(x: Array, cosine: Array, sine: Array, is_interleaved: bool = False) -> Array:
    """[B, T, heads, head_dim]: as many elements of a head as the tables have angles for turn, the first ones; element i
    of their first half with element i of their second, or `neighbours` with each other."""
    cos, sin = (table.astype(x.dtype)[..., None, :] for table in (cosine, sine))
    turning, rest = jnp.split(x, [2 * cosine.shape[-1]], axis=-1)
    first, second = (turning[..., 0::2], turning[..., 1::2]) if is_interleaved else jnp.split(turning, 2, axis=-1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    both = jnp.stack(turned, axis=-1).reshape(turning.shape) if is_interleaved else jnp.concatenate(turned, axis=-1)
    return jnp.concatenate([both, rest], axis=-1) if rest.shape[-1] else both


def relative_position_bias(
    table: Array, q_positions: Array, kv_positions: Array, bias_config: RelativePositionBias
) -> Array:
    """[buckets, heads], positions [T] and [S], or [B, T] and [B, S] -> float32 [heads, T, S], or [B, heads, T, S]."""
    ordered = table.astype(jnp.float32)[relative_position_buckets(bias_config)]
    apart = jnp.clip(
        kv_positions[..., None, :] - q_positions[..., :, None], -bias_config.max_distance, bias_config.max_distance
    )
    return jnp.moveaxis(ordered[apart + bias_config.max_distance], -1, -3)


def relative_position_buckets(bias_config: RelativePositionBias) -> np.ndarray:
    """int32: the bucket of each distance, key less query, from -farthest to farthest; of those beyond it is the same.

    Of as many as there are one way, the first half are a distance each, the others grow with its logarithm. The
    logarithm is the float32 number nearest to the exact one, as in torch; NumPy's own is sometimes the next one.
    """
    count = bias_config.num_buckets // 2 if bias_config.bidirectional else bias_config.num_buckets
    exact, far = count // 2, np.arange(bias_config.max_distance + 1)
    ratio = (np.maximum(far, 1).astype(np.float32) / np.float32(exact)).astype(np.float64)
    grown = np.log(ratio).astype(np.float32) / np.float32(math.log(bias_config.max_distance / exact))
    wide = np.minimum(exact + (grown * (count - exact)).astype(np.int32), count - 1)
    before = np.where(far < exact, far, wide).astype(np.int32)
    after = before[1:] + count if bias_config.bidirectional else np.zeros_like(before[1:])
    return np.concatenate([before[::-1], after])


def _default_inverse_frequencies(theta: float, dim: int) -> np.ndarray:
    return (np.float32(1.0) / _theta_powers(theta, dim)).astype(np.float32)


def _theta_powers(theta: float, dim: int) -> np.ndarray:
    return np.float32(theta) ** (np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim))


def _dynamic(rope: Rope, length: int) -> np.ndarray:
    """Beyond the positions that the model was made for, theta grows with the length."""
    longest = max(length, rope.original_max_positions)
    stretch = np.float64(rope.factor * longest / rope.original_max_positions - (rope.factor - 1))
    return _default_inverse_frequencies(
        rope.theta * stretch ** (rope.rotary_dim / (rope.rotary_dim - 2)), rope.rotary_dim
    )


def _llama3(rope: Rope, default_frequencies: np.ndarray) -> np.ndarray:
    """Short waves stay, long ones are stretched, those between are mixed."""
    wave = 2 * math.pi / default_frequencies
    mix = (rope.original_max_positions / wave - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    between = (1 - mix) * default_frequencies / rope.factor + mix * default_frequencies
    stretched = np.where(
        wave > rope.original_max_positions / rope.low_freq_factor, default_frequencies / rope.factor, between
    )
    return np.where(wave < rope.original_max_positions / rope.high_freq_factor, default_frequencies, stretched).astype(
        np.float32
    )


def _yarn(rope: Rope, default_frequencies: np.ndarray) -> np.ndarray:
    """https://arxiv.org/abs/2309.00071: a ramp from kept to stretched frequencies."""
    low, high = (
        rope.rotary_dim * math.log(rope.original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))
        for turns in (rope.high_freq_factor, rope.low_freq_factor)
    )
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    width = high - low if high != low else 0.001
    ramp = np.clip((np.arange(rope.rotary_dim // 2, dtype=np.float32) - low) / width, 0, 1)
    return (default_frequencies / rope.factor * ramp + default_frequencies * (1 - ramp)).astype(np.float32)
