"""Apply a function to chunks of tokens, one after another, to bound the memory of its intermediate arrays.

Axes: B rows, T tokens, N chunks, c tokens per row of a chunk, D and F widths.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

TokenFunction = Callable[[Array, Any], Array]


def map_token_chunks(function: TokenFunction, x: Array, weights: Any, chunk_size: int) -> Array:
    """Apply a function of single tokens to chunks of tokens (blockwise feed-forward, arXiv:2305.19370, section 3).

    The backward pass computes each chunk again, and sums the gradient of the weights in float32.

    Args:
        function: Computes [B, c, D] and weights -> [B, c, F], each token by itself.
        x: Tokens [B, T, D].
        weights: Tree of arrays that all tokens share.
        chunk_size: Tokens per row of a chunk; -1 for all. T need not be a multiple.

    Returns:
        [B, T, F].
    """
    length = x.shape[1]
    if chunk_size == -1 or chunk_size >= length:
        return function(x, weights)
    padding = -length % chunk_size
    padded = jnp.pad(x, ((0, 0), (0, padding), (0, 0))) if padding else x
    return _join(_map_chunks(function, _cut(padded, chunk_size), weights))[:, :length]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _map_chunks(function: TokenFunction, chunks: Array, weights: Any) -> Array:
    """Apply the function to each of the chunks [N, B, c, D]."""
    return lax.map(lambda chunk: function(chunk, weights), chunks)


def _forward(function: TokenFunction, chunks: Array, weights: Any) -> tuple[Array, tuple[Array, Any]]:
    return _map_chunks(function, chunks, weights), (chunks, weights)


def _backward(function: TokenFunction, saved: tuple[Array, Any], gradient: Array) -> tuple[Array, Any]:
    chunks, weights = saved

    def run_chunk(sums: Any, inputs: tuple[Array, Array]) -> tuple[Any, Array]:
        chunk, chunk_gradient = inputs
        _, pullback = jax.vjp(function, chunk, weights)
        d_chunk, d_weights = pullback(chunk_gradient)
        return jax.tree.map(lambda total, new: total + new.astype(jnp.float32), sums, d_weights), d_chunk

    zeros = jax.tree.map(lambda weight: jnp.zeros(weight.shape, jnp.float32), weights)
    sums, d_chunks = lax.scan(run_chunk, zeros, (chunks, gradient))
    return d_chunks, jax.tree.map(lambda total, weight: total.astype(weight.dtype), sums, weights)


_map_chunks.defvjp(_forward, _backward)


def _cut(x: Array, size: int) -> Array:
    """Cut [B, T, D] into chunks [N, B, c, D]."""
    return jnp.moveaxis(x.reshape(x.shape[0], -1, size, x.shape[2]), 1, 0)


def _join(chunks: Array) -> Array:
    """Join chunks [N, B, c, F] to [B, T, F]."""
    return jnp.moveaxis(chunks, 0, 1).reshape(chunks.shape[1], -1, chunks.shape[3])
