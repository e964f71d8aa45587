"""Linear recurrences over tokens in chunks: linear attention with decay, the gated delta rule, and the selective scan.

Axes: B rows of the batch, T tokens, C tokens of a chunk, G groups of heads with the same queries and keys, R heads of
a group, N width of queries and keys, P width of values. Of the selective scan: L tokens of a chunk, C channels.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.scipy.linalg import solve_triangular

from prepcli.models.activation_memory import SCAN_CHUNK_SIZE, SELECTIVE_SCAN_CHUNK_SIZE
from trainer.nn.token_chunks import join_chunks, pad_tokens, split_chunks

# Linear recurrences over tokens in chunks: linear attention with decay, and the gated delta rule.
#
# A head has a state S [N, P]. A token with key k, query q, value v and decay a in (0, 1] updates and reads it:
#
# S_t = a_t S_(t-1) + k_t u_t^T,  y_t = S_t^T q_t
#
# Without beta u_t = v_t: the state space dual form of Mamba-2 (arXiv:2405.21060, section 6, equation 13). With beta the
# update is the gated delta rule, u_t = beta_t (v_t - a_t S_(t-1)^T k_t) (arXiv:2412.06464, equation 10).
#
# In a chunk of C tokens with the state S before it, let D_ij = a_(j+1) ... a_i for j <= i and 0 for j > i, and
# d_i = a_1 ... a_i. As matrices of C rows (arXiv:2412.06464, section 3.3; arXiv:2405.21060, section 6):
#
# U  = V, or (I + strictly_lower(D * beta K K^T))^-1 (beta V - beta d K S) with beta
# Y  = (D * Q K^T) U + d Q S
# S' = d_C S + (D_C K)^T U
#
# The first two lines are products of matrices, so that a row of T tokens takes O(T C) time and O(T / C) states.
# A chunk of one token is the recurrence itself.


class Recurrence(NamedTuple):
    """The inputs of a recurrence, for all tokens or for a chunk."""

    q: Array  # Queries [B, T, G, N]
    k: Array  # Keys [B, T, G, N]
    v: Array  # Values [B, T, G, R, P]
    log_decay: Array  # float32 [B, T, G, R], at most 0
    beta: Array | None  # [B, T, G, R], the strength of the delta rule. None means no delta rule.
    # bool [B, T], true for the first token of a document. The state is zero before it.
    is_start: Array


class _ChunkDecay(NamedTuple):
    """The decays between the tokens of a chunk. They are 0 across the start of a document."""

    pairs: Array  # [B, G, R, C, C], from token j to token i
    from_before: Array  # [B, G, R, C], from the state before the chunk to token i
    to_end: Array  # [B, G, R, C], from token j to the state after the chunk
    whole: Array  # [B, G, R], from the state before the chunk to the one after it


def chunked_scan(inputs: Recurrence, state: Array | None) -> tuple[Array, Array]:
    """Run a recurrence over all tokens, in float32.

    The backward pass computes each chunk again from the state before it.

    Args:
        inputs: Queries, keys, values and decays.
        state: float32 [B, G, R, N, P], the state before the first token. None means zeros.

    Returns:
        float32 [B, T, G, R, P], and the state after the last token.
    """
    num_tokens = inputs.q.shape[1]
    chunk_size = min(SCAN_CHUNK_SIZE, num_tokens)
    # A padding token has the decay 1 and a zero key, so that it leaves the state as it is.
    padding = -num_tokens % chunk_size
    chunks = jax.tree.map(lambda x: split_chunks(pad_tokens(x, padding), chunk_size), inputs)
    if state is None:
        rows, _, groups, heads, value_dim = inputs.v.shape
        state = jnp.zeros((rows, groups, heads, inputs.k.shape[-1], value_dim), jnp.float32)
    run_chunk = jax.checkpoint(_run_recurrence_chunk, prevent_cse=False)
    state, outputs = lax.scan(run_chunk, state, chunks)
    return join_chunks(outputs)[:, :num_tokens], state


def _run_recurrence_chunk(state: Array, chunk: Recurrence) -> tuple[Array, Array]:
    """Compute U, Y and S' of one chunk, as in this module's docstring."""
    q = chunk.q.astype(jnp.float32)
    k = chunk.k.astype(jnp.float32)
    decay = _chunk_decay(chunk)
    # [B, G, R, C, P]
    updates = jnp.moveaxis(chunk.v.astype(jnp.float32), 1, 3)
    if chunk.beta is not None:
        beta = jnp.moveaxis(chunk.beta.astype(jnp.float32), 1, 3)
        updates = _delta_updates(updates, k, beta, decay, state)
    scores = jnp.einsum("bign,bjgn->bgij", q, k)[:, :, None] * decay.pairs
    output = jnp.einsum("bgrij,bgrjp->bigrp", scores, updates)
    output += jnp.einsum("bign,bgri,bgrnp->bigrp", q, decay.from_before, state)
    state = state * decay.whole[..., None, None]
    state += jnp.einsum("bjgn,bgrj,bgrjp->bgrnp", k, decay.to_end, updates)
    return state, output


def _delta_updates(v: Array, k: Array, beta: Array, decay: _ChunkDecay, state: Array) -> Array:
    """Solve (I + strictly_lower(D * beta K K^T)) U = beta V - beta d K S for U [B, G, R, C, P]."""
    predicted = jnp.einsum("bign,bgri,bgrnp->bgrip", k, decay.from_before, state)
    right_side = beta[..., None] * (v - predicted)
    if v.shape[3] == 1:
        return right_side
    products = jnp.einsum("bign,bjgn->bgij", k, k)[:, :, None]
    # The solver reads the entries below the diagonal only.
    matrix = beta[..., None] * products * decay.pairs
    return solve_triangular(matrix, right_side, lower=True, unit_diagonal=True)


def _chunk_decay(chunk: Recurrence) -> _ChunkDecay:
    """Compute the decays of a chunk from their logarithms."""
    # With the number of document starts up to each token, two tokens are of one document if their numbers are equal.
    document = jnp.cumsum(chunk.is_start, axis=1)[:, None, None]
    log_decay = jnp.where(chunk.is_start[..., None, None], 0.0, chunk.log_decay)
    # [B, G, R, C], the logarithm of d_i.
    total = jnp.moveaxis(jnp.cumsum(log_decay, axis=1), 1, 3)
    last = total[..., -1:]
    positions = jnp.arange(total.shape[-1])
    is_pair = (document[..., :, None] == document[..., None, :]) & (positions[:, None] >= positions)
    # Above the diagonal the difference is positive, and its exponential could overflow.
    difference = jnp.where(is_pair, total[..., :, None] - total[..., None, :], -jnp.inf)
    return _ChunkDecay(
        pairs=jnp.exp(difference),
        from_before=jnp.where(document == 0, jnp.exp(total), 0.0),
        to_end=jnp.where(document == document[..., -1:], jnp.exp(last - total), 0.0),
        whole=jnp.where(document[..., -1] == 0, jnp.exp(last[..., 0]), 0.0),
    )


# The selective scan of Mamba (arXiv:2312.00752, section 3.2 and equation 2a), in chunks of tokens.
#
# A channel c has a state h [N] with decay rates A [N] below 0. A token with the step dt, the input v, the key k and the
# query q updates and reads it. In the paper k and q are B and C, and the update is the Euler step that its code takes:
#
# h_t = exp(dt_t A) h_(t-1) + dt_t v_t k_t,  y_t = h_t . q_t
#
# The pair (a_t, b_t) with a_t = exp(dt_t A) and b_t = dt_t v_t k_t stands for the map h -> a_t h + b_t. Two maps in
# order are the map (a_2 a_1, a_2 b_1 + b_2). This composition is associative, so that the states of a chunk are a
# prefix sum (section 3.3.2). A row of T tokens takes O(T) time, and only one chunk of states exists at a time.


class SelectiveInputs(NamedTuple):
    """The inputs of a selective scan, for all tokens or for a chunk."""

    q: Array  # Queries [B, T, N]
    k: Array  # Keys [B, T, N]
    v: Array  # Inputs [B, T, C]
    dt: Array  # float32 [B, T, C], at least 0
    # bool [B, T], true for the first token of a document. The state is zero before it.
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
    run_chunk = jax.checkpoint(_run_selective_chunk, prevent_cse=False)

    def run_step(state: Array, chunk: SelectiveInputs) -> tuple[Array, Array]:
        return run_chunk(state, chunk, rates)

    state, outputs = lax.scan(run_step, state, chunks)
    return join_chunks(outputs)[:, :num_tokens], state


def _run_selective_chunk(state: Array, chunk: SelectiveInputs, rates: Array) -> tuple[Array, Array]:
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
