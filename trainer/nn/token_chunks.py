"""Apply a function to chunks of tokens, one after another, to bound the memory of its intermediate arrays.

Axes: B rows, T tokens, N chunks, C tokens per row of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from trainer.models.chunk_sizes import chunk_length
from trainer.nn.token_axis import join_chunks, pad_tokens, split_chunks, unpad_tokens

TokenFunction = Callable[[Any, Any, Any], Any]
save_products = partial(
    jax.checkpoint, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable, prevent_cse=False
)


def map_token_chunks(
    function: TokenFunction, x: Any, weights: Any, chunk_size: int, constants: Any = None, *, num_shards: int = 1
) -> Any:
    """Apply a function of single tokens to chunks of tokens (blockwise feed-forward, arXiv:2305.19370, section 3).

    The backward pass computes each chunk again, and sums the gradient of the weights in float32. If one chunk has all
    tokens, products with weights are saved, and the backward pass computes the rest again: norms and activations take
    less time to compute than to write and read.

    Args:
        function: Computes (x, weights, constants) of a chunk -> tree of arrays [B, C, ...], each token by itself. It
            must not refer to other arrays.
        x: Tree of arrays [B, T, ...].
        weights: Tree of arrays that all tokens share.
        chunk_size: Tokens of a device per row of a chunk; -1 for all. Their number need not be a multiple.
        constants: Tree of arrays [B or 1, T, ...] without gradients.
        num_shards: Number of shards of T on the mesh; each chunk has tokens of every shard.

    Returns:
        Tree of arrays [B, T, ...].
    """
    length = jax.tree.leaves(x)[0].shape[1] // num_shards
    chunk_size = chunk_length(chunk_size, length)
    if chunk_size == length:
        return save_products(function)(x, weights, constants)
    padding = -length % chunk_size

    def split(x: jax.Array) -> jax.Array:
        return split_chunks(pad_tokens(x, padding, num_shards=num_shards), chunk_size, num_shards=num_shards)

    def join(x: jax.Array) -> jax.Array:
        return unpad_tokens(join_chunks(x, num_shards=num_shards), padding, num_shards=num_shards)

    chunks = _map_chunks(function, jax.tree.map(split, x), weights, jax.tree.map(split, constants))
    return jax.tree.map(join, chunks)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _map_chunks(function: TokenFunction, chunks: Any, weights: Any, constants: Any) -> Any:
    """Apply the function to each of the chunks, trees of arrays [N, B, C, ...]."""
    return lax.map(lambda chunk: function(chunk[0], weights, chunk[1]), (chunks, constants))


def _forward(function: TokenFunction, chunks: Any, weights: Any, constants: Any) -> tuple[Any, tuple[Any, Any, Any]]:
    return _map_chunks(function, chunks, weights, constants), (chunks, weights, constants)


def _backward(function: TokenFunction, saved: tuple[Any, Any, Any], gradient: Any) -> tuple[Any, Any, None]:
    chunks, weights, constants = saved

    def run_chunk(sums: Any, inputs: tuple[Any, Any, Any]) -> tuple[Any, Any]:
        chunk, chunk_constants, chunk_gradient = inputs
        _, pullback = jax.vjp(lambda chunk, weights: function(chunk, weights, chunk_constants), chunk, weights)
        d_chunk, d_weights = pullback(chunk_gradient)
        return jax.tree.map(lambda total, new: total + new.astype(jnp.float32), sums, d_weights), d_chunk

    zeros = jax.tree.map(lambda weight: jnp.zeros(weight.shape, jnp.float32), weights)
    sums, d_chunks = lax.scan(run_chunk, zeros, (chunks, constants, gradient))
    return d_chunks, jax.tree.map(lambda total, weight: total.astype(weight.dtype), sums, weights), None


_map_chunks.defvjp(_forward, _backward)
