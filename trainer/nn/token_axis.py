"""Padding, splitting and joining of arrays along the token axis.

A mesh may split the tokens into G shards of consecutive columns. Padding and chunks are then within shards, so that
each device pads and splits its own tokens.

Axes: B rows of the batch, T tokens, G shards, N chunks, C tokens of a shard per row of a chunk.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array


def pad_tokens(x: Array, count: int, fill: int | bool = 0, *, num_shards: int = 1) -> Array:
    """Append `count` tokens to each shard of [B, T, ...]."""
    if not count:
        return x
    shards = _split_shards(x, num_shards)
    widths = ((0, 0), (0, 0), (0, count), *((0, 0) for _ in x.shape[2:]))
    return _join_shards(jnp.pad(shards, widths, constant_values=fill))


def unpad_tokens(x: Array, count: int, *, num_shards: int = 1) -> Array:
    """Remove the last `count` tokens of each shard of [B, T, ...]."""
    if not count:
        return x
    return _join_shards(_split_shards(x, num_shards)[:, :, :-count])


def split_chunks(x: Array, chunk_size: int, *, num_shards: int = 1) -> Array:
    """Reshape [B, T, ...] to [N, B, G * C, ...]. Each device keeps its rows and columns of every chunk."""
    shards = _split_shards(x, num_shards)
    chunks = jnp.moveaxis(shards.reshape(*shards.shape[:2], -1, chunk_size, *x.shape[2:]), 2, 0)
    return chunks.reshape(*chunks.shape[:2], -1, *x.shape[2:])


def join_chunks(x: Array, *, num_shards: int = 1) -> Array:
    """Reshape [N, B, G * C, ...] to [B, T, ...]."""
    chunks = x.reshape(*x.shape[:2], num_shards, -1, *x.shape[3:])
    return jnp.moveaxis(chunks, 0, 2).reshape(x.shape[1], -1, *x.shape[3:])


def _split_shards(x: Array, num_shards: int) -> Array:
    """Reshape [B, T, ...] to [B, G, T / G, ...]."""
    return x.reshape(x.shape[0], num_shards, -1, *x.shape[2:])


def _join_shards(x: Array) -> Array:
    """Reshape [B, G, T / G, ...] to [B, T, ...]."""
    return x.reshape(x.shape[0], -1, *x.shape[3:])
