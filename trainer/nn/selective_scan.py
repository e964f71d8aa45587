"""The selective scan of Mamba (arXiv:2312.00752, section 3.2 and equation 2a), in chunks of tokens.

A channel c has a state h [N] with decay rates A [N] below 0. A token with the step dt, the input v, the key k and the
query q updates and reads it. In the paper k and q are B and C, and the update is the Euler step that its code takes:

h_t = exp(dt_t A) h_(t-1) + dt_t v_t k_t,  y_t = h_t . q_t

The pair (a_t, b_t) with a_t = exp(dt_t A) and b_t = dt_t v_t k_t stands for the map h -> a_t h + b_t. Two maps in order
are the map (a_2 a_1, a_2 b_1 + b_2). This composition is associative, so that the states of a chunk are a prefix sum
(section 3.3.2). A row of T tokens takes O(T) time, and only one chunk of states exists at a time.

Axes: B rows of the batch, T tokens, L tokens of a chunk, C channels, N width of queries and keys.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from prepcli.models.chunk_sizes import SELECTIVE_SCAN_CHUNK_SIZE
from trainer.nn.token_axis import join_chunks, pad_tokens, split_chunks


class SelectiveInputs(NamedTuple):
    """The inputs of a selective scan, for all tokens or for a chunk.

    Attributes:
        q: Queries [B, T, N].
        k: Keys [B, T, N].
        v: Inputs [B, T, C].
        dt: float32 [B, T, C], at least 0.
        is_start: bool [B, T], true for the first token of a document. The state is zero before it.
    """

    q: Array
    k: Array
    v: Array
    dt: Array
    is_start: Array


def selective_scan(
    inputs: SelectiveInputs, rates: Array, state: Array | None
) -> tuple[Array, Array]:
    """Run the scan over all tokens, in float32.

    The backward pass computes each chunk again from the state before it.

    Args:
        inputs: Queries, keys, inputs and steps.
        rates: float32 [C, N], the rates A.
        state: float32 [B, C, N], the state before the first token. None means zeros.

    Returns:
        float32 [B, T, C], and the state after the last token.
    """
    rows, num_tokens = inputs.is_start.shape
    chunk_size = min(SELECTIVE_SCAN_CHUNK_SIZE, num_tokens)
    # A padding token has the step 0, so that it leaves the state as it is.
    padding = -num_tokens % chunk_size
    chunks = jax.tree.map(lambda x: split_chunks(pad_tokens(x, padding), chunk_size), inputs)
    if state is None:
        state = jnp.zeros((rows, *rates.shape), jnp.float32)
    run_chunk = jax.checkpoint(_run_chunk, prevent_cse=False)

    def run_step(state: Array, chunk: SelectiveInputs) -> tuple[Array, Array]:
        return run_chunk(state, chunk, rates)

    state, outputs = lax.scan(run_step, state, chunks)
    return join_chunks(outputs)[:, :num_tokens], state


def _run_chunk(state: Array, chunk: SelectiveInputs, rates: Array) -> tuple[Array, Array]:
    """Return the state [B, C, N] after a chunk, and its outputs [B, L, C]."""
    # [B, L, C, N]
    decay = jnp.exp(chunk.dt[..., None] * rates)
    decay = jnp.where(chunk.is_start[..., None, None], 0.0, decay)
    step = chunk.dt * chunk.v.astype(jnp.float32)
    update = step[..., None] * chunk.k.astype(jnp.float32)[:, :, None]
    # The first token of the chunk reads the state before it.
    update = update.at[:, 0].add(decay[:, 0] * state)
    _, states = lax.associative_scan(_compose, (decay, update), axis=1)
    output = jnp.einsum("blcn,bln->blc", states, chunk.q.astype(jnp.float32))
    return states[:, -1], output


def _compose(first: tuple[Array, Array], second: tuple[Array, Array]) -> tuple[Array, Array]:
    """Return the map h -> a h + b that applies two such maps in order."""
    first_decay, first_update = first
    decay, update = second
    return decay * first_decay, decay * first_update + update
