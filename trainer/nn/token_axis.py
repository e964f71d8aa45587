"""Padding, splitting and joining of arrays along the token axis.

Axes: B rows of the batch, T tokens, N chunks, C tokens per row of a chunk.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array


def pad_tokens(x: Array, count: int, fill: int | bool = 0) -> Array:
    """Append `count` tokens to [B, T, ...]."""
    widths = ((0, 0), (0, count), *((0, 0) for _ in x.shape[2:]))
    return jnp.pad(x, widths, constant_values=fill) if count else x


def split_chunks(x: Array, chunk_size: int) -> Array:
    """Reshape [B, T, ...] to [N, B, C, ...]; each device keeps its rows of every chunk."""
    return jnp.moveaxis(x.reshape(x.shape[0], -1, chunk_size, *x.shape[2:]), 1, 0)


def join_chunks(x: Array) -> Array:
    """Reshape [N, B, C, ...] to [B, T, ...]."""
    num_chunks, batch, chunk_size = x.shape[:3]
    return jnp.moveaxis(x, 0, 1).reshape(batch, num_chunks * chunk_size, *x.shape[3:])
