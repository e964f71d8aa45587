"""Apply a function to chunks of tokens, one after another, to bound the memory of its intermediate arrays.

Axes: B rows, T tokens, N chunks, C tokens per row of a chunk, D and F widths.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from trainer.models.chunk_sizes import chunk_length
from trainer.nn.token_axis import join_chunks, pad_tokens, split_chunks

TokenFunction = Callable[[Array, Any], Array]


def map_token_chunks(function: TokenFunction, x: Array, weights: Any, chunk_size: int) -> Array:
    """Apply a function of single tokens to chunks of tokens (blockwise feed-forward, arXiv:2305.19370, section 3).

    The backward pass computes each chunk again, and sums the gradient of the weights in float32.

    Args:
        function: Computes [B, C, D] and weights -> [B, C, F], each token by itself.
        x: Tokens [B, T, D].
        weights: Tree of arrays that all tokens share.
        chunk_size: Tokens per row of a chunk; -1 for all. T need not be a multiple.

    Returns:
        [B, T, F].
    """
    length = x.shape[1]
    chunk_size = chunk_length(chunk_size, length)
    if chunk_size == length:
        return function(x, weights)
    chunks = split_chunks(pad_tokens(x, -length % chunk_size), chunk_size)
    return join_chunks(_map_chunks(function, chunks, weights))[:, :length]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _map_chunks(function: TokenFunction, chunks: Array, weights: Any) -> Array:
    """Apply the function to each of the chunks [N, B, C, D]."""
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
