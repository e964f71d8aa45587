"""Apply a function to chunks of tokens, one after another, to bound the memory of its intermediate arrays.

A mesh may split the tokens into G shards of consecutive columns. Padding and chunks are then within shards, so that
each device pads and splits its own tokens.

Axes: B rows of the batch, T tokens, G shards, N chunks, C tokens of a shard per row of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from prepcli.models.activation_memory import chunk_length
from trainer.nn.context import AdapterDropout


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


TokenFunction = Callable[[Any, Any, Any], Any]
# A product with a weight has no batch dims in JAX's terms, because all tokens share one matrix.
save_products = partial(
    jax.checkpoint,
    policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    prevent_cse=False,
)


def over_token_chunks(
    function: TokenFunction, num_tokens: int, chunk_size: int, *, num_shards: int = 1
) -> TokenFunction:
    """Return a function that runs `function` on chunks of tokens (arXiv:2305.19370, section 3).

    The backward pass computes each chunk again, and sums the gradient of the weights in float32. If
    one chunk has all tokens, products with weights are saved, and the backward pass computes the
    rest again: norms and activations take less time to compute than to write and read.

    Args:
        function: Computes (x, weights, constants) of a chunk -> tree of arrays [B, C, ...], each
            token by itself. x and constants are trees of arrays [B or 1, C, ...], weights is a tree
            of arrays that all tokens share, and of `AdapterDropout` with a key per token. Constants have no
            gradients. The function must not refer to other arrays.
        num_tokens: T.
        chunk_size: Tokens of a device per row of a chunk. -1 means all. T need not be a multiple.
        num_shards: Number of shards of T on the mesh. Each chunk has tokens of every shard.

    Returns:
        A function like `function`, of arrays [B, T, ...].
    """
    length = num_tokens // num_shards
    chunk_size = chunk_length(chunk_size, length)
    if chunk_size == length:
        return save_products(function)
    padding = -length % chunk_size

    def split(x: jax.Array) -> jax.Array:
        padded = pad_tokens(x, padding, num_shards=num_shards)
        return split_chunks(padded, chunk_size, num_shards=num_shards)

    def join(x: jax.Array) -> jax.Array:
        return unpad_tokens(join_chunks(x, num_shards=num_shards), padding, num_shards=num_shards)

    def run_chunks(x: Any, weights: Any, constants: Any) -> Any:
        chunks = jax.tree.map(split, x)
        # The keys of dropout belong to tokens, as constants do.
        leaves, structure = jax.tree.flatten(weights, is_leaf=_is_dropout)
        shared = [None if _is_dropout(leaf) else leaf for leaf in leaves]
        dropouts = [leaf if _is_dropout(leaf) else None for leaf in leaves]

        def run_chunk(chunk: Any, shared: Any, chunk_constants: Any) -> Any:
            constants, dropouts = chunk_constants
            merged = [
                leaf if dropout is None else dropout
                for leaf, dropout in zip(shared, dropouts, strict=True)
            ]
            return function(chunk, structure.unflatten(merged), constants)

        chunk_constants = jax.tree.map(split, (constants, dropouts))
        outputs = _map_chunks(run_chunk, chunks, shared, chunk_constants)
        return jax.tree.map(join, outputs)

    return run_chunks


def _is_dropout(leaf: Any) -> bool:
    return isinstance(leaf, AdapterDropout)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _map_chunks(function: TokenFunction, chunks: Any, weights: Any, constants: Any) -> Any:
    """Apply the function to each of the chunks, trees of arrays [N, B, C, ...]."""

    def run_chunk(inputs: tuple[Any, Any]) -> Any:
        chunk, chunk_constants = inputs
        return function(chunk, weights, chunk_constants)

    return lax.map(run_chunk, (chunks, constants))


def _forward(
    function: TokenFunction, chunks: Any, weights: Any, constants: Any
) -> tuple[Any, tuple[Any, Any, Any]]:
    return _map_chunks(function, chunks, weights, constants), (chunks, weights, constants)


def _backward(
    function: TokenFunction, saved: tuple[Any, Any, Any], gradient: Any
) -> tuple[Any, Any, None]:
    # y = f(x, W) with f applied to each token by itself: dx of a chunk depends on that chunk alone, and
    # dW is the sum over all chunks. Only one chunk's activations exist at a time.
    chunks, weights, constants = saved

    def run_chunk(sums: Any, inputs: tuple[Any, Any, Any]) -> tuple[Any, Any]:
        chunk, chunk_constants, chunk_gradient = inputs

        def compute(chunk: Any, weights: Any) -> Any:
            return function(chunk, weights, chunk_constants)

        _, pullback = jax.vjp(compute, chunk, weights)
        d_chunk, d_weights = pullback(chunk_gradient)
        return jax.tree.map(_add_float32, sums, d_weights), d_chunk

    # A sum in bfloat16 stops growing once a term is below half a unit in its last place.
    zeros = jax.tree.map(lambda weight: jnp.zeros(weight.shape, jnp.float32), weights)
    sums, d_chunks = lax.scan(run_chunk, zeros, (chunks, constants, gradient))
    d_weights = jax.tree.map(lambda total, weight: total.astype(weight.dtype), sums, weights)
    return d_chunks, d_weights, None


def _add_float32(total: jax.Array, new: jax.Array) -> jax.Array:
    return total + new.astype(jnp.float32)


_map_chunks.defvjp(_forward, _backward)
