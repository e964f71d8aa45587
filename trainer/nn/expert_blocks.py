"""The experts of an MoE layer on one device: each computes its own tokens only, in blocks of a fixed size.

An assignment is a token with one of its experts. Assignments are sorted by expert, and each expert computes as many
blocks as its rows fill: no token is dropped, and an expert without tokens costs nothing. `jax.lax.ragged_dot` computes
the same products, but XLA expands it on CPU to masked products of all rows with all experts.

The output of an expert is linear in its hidden units, so the routing weight multiplies these: the gradient of the
weight then needs no second product with `down`.

Axes: N tokens, K experts of a token, A = N * K assignments, E experts of the device, R rows of a block, D width.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from prepcli.models.architecture import ArchConfig
from prepcli.models.chunk_sizes import expert_block_length
from prepcli.models.param_tree import unflatten_tree
from trainer.nn.expert_sharding import UP, Experts, ExpertSharding
from trainer.nn.linear import linear
from trainer.nn.mlp import mlp_hidden

Carry = TypeVar("Carry")


class Routing(NamedTuple):
    """The experts of each token.

    Attributes:
        weights: Weight of each expert, float32 [..., K].
        experts: Index of each expert, int32 [..., K].
    """

    weights: Array
    experts: Array


class _SortedRows(NamedTuple):
    """Assignments sorted by expert.

    Attributes:
        token_ids: Token of each row [A + R]. The last R rows are padding.
        weights: Routing weight of each row [A + R].
        row_ids: Row of each assignment [N, K].
        bounds: First row of each expert, and the end of the last [E + 1].
    """

    token_ids: Array
    weights: Array
    row_ids: Array
    bounds: Array


class _Block(NamedTuple):
    """Rows that an expert computes together.

    Attributes:
        start: First row, [].
        token_ids: Token of each row [R].
        weights: Routing weight of each row [R].
        is_own: Whether the expert has this row, bool [R]. False for rows after its last.
    """

    start: Array
    token_ids: Array
    weights: Array
    is_own: Array


def run_experts(
    x: Array, experts: Experts, routing: Routing, arch_config: ArchConfig, shards: ExpertSharding
) -> Array:
    """Compute the weighted sum of each token's experts.

    Args:
        x: The device's tokens [B, T, D].
        experts: The device's shards of the experts.
        routing: The experts of each token [B, T, K].
        arch_config: The choices of the layers.
        shards: The mesh axes of tokens and experts.

    Returns:
        [B, T, D].
    """
    tokens = x.reshape(-1, x.shape[-1])
    rows = _sort_by_expert(routing, experts, shards)

    def run_expert(outputs: Array, expert: Experts, index: Array) -> Array:
        def run_block(outputs: Array, block: _Block) -> Array:
            output = _expert_mlp(
                _values_at(tokens, block.token_ids), block.weights, expert, arch_config
            )
            # Rows after the expert's last belong to later experts. They get zeros here, and their
            # values when those experts run, in order.
            return _replace_rows(outputs, jnp.where(block.is_own[:, None], output, 0), block)

        return _each_block(run_block, outputs, rows, index)

    outputs = _each_expert(run_expert, _empty_rows(rows, tokens), rows, experts, shards)
    return shards.sum_parts(_sum_by_token(outputs, rows)).reshape(x.shape)


def experts_gradients(
    x: Array,
    experts: Experts,
    routing: Routing,
    gradient: Array,
    arch_config: ArchConfig,
    shards: ExpertSharding,
) -> tuple[Array, Experts, Array]:
    """Compute the gradients of tokens, experts and routing weights. Each block is computed again.

    Args:
        x: The device's tokens [B, T, D].
        experts: The device's shards of the experts.
        routing: The experts of each token [B, T, K].
        gradient: Gradient of the output [B, T, D].
        arch_config: The choices of the layers.
        shards: The mesh axes of tokens and experts.

    Returns:
        Gradients in the shapes and dtypes of `x`, `experts` and the weights of `routing`. Gradients
        of an expert's weights are accumulated over its blocks in float32.
    """
    tokens = x.reshape(-1, x.shape[-1])
    d_outputs = gradient.reshape(-1, x.shape[-1])
    rows = _sort_by_expert(routing, experts, shards)

    def run_expert(
        carry: tuple[Array, Array, Experts], expert: Experts, index: Array
    ) -> tuple[Array, Array, Experts]:
        def run_block(
            carry: tuple[Array, Array, Experts], block: _Block
        ) -> tuple[Array, Array, Experts]:
            d_rows, d_weights, d_expert = carry
            block_function = partial(_expert_mlp, arch_config=arch_config)
            _, pullback = jax.vjp(
                block_function, _values_at(tokens, block.token_ids), block.weights, expert
            )
            d_output = jnp.where(block.is_own[:, None], _values_at(d_outputs, block.token_ids), 0)
            d_block, d_block_weights, d_new = pullback(d_output)
            sums = jax.tree.map(lambda total, new: total + new.astype(jnp.float32), d_expert, d_new)
            return (
                _replace_rows(d_rows, d_block, block),
                _replace_rows(d_weights, d_block_weights, block),
                sums,
            )

        d_rows, d_weights, d_experts = carry
        zeros = jax.tree.map(lambda matrix: jnp.zeros(matrix.shape, jnp.float32), expert)
        d_rows, d_weights, d_expert = _each_block(
            run_block, (d_rows, d_weights, zeros), rows, index
        )
        d_shard = shards.scatter_gradient(d_expert)
        return (
            d_rows,
            d_weights,
            jax.tree.map(partial(_set_expert, index=index), d_experts, d_shard),
        )

    carry = (
        _empty_rows(rows, tokens),
        jnp.zeros_like(rows.weights),
        jax.tree.map(jnp.zeros_like, dict(experts)),
    )
    d_rows, d_weights, d_experts = _each_expert(run_expert, carry, rows, experts, shards)
    d_tokens, d_routing = shards.sum_parts(
        (_sum_by_token(d_rows, rows), _values_at(d_weights, rows.row_ids))
    )
    return (
        d_tokens.reshape(x.shape),
        shards.sum_gradients(d_experts),
        d_routing.reshape(routing.weights.shape),
    )


def _expert_mlp(x: Array, weights: Array, expert: Experts, arch_config: ArchConfig) -> Array:
    """Compute the MLP of one expert for rows [R, D], with their routing weights [R] as factors."""
    projections = unflatten_tree(expert)
    if arch_config.router.scales_input:
        scaled = (x * weights[:, None]).astype(x.dtype)
        return linear(mlp_hidden(scaled[None], projections, arch_config), projections["down"])[0]
    # w * down(h) = down(w * h) with h: [1, R, F]. dw = dh . h then needs no product with `down` again.
    hidden = mlp_hidden(x[None], projections, arch_config)
    return linear((hidden * weights[:, None]).astype(x.dtype), projections["down"])[0]


def _sort_by_expert(routing: Routing, experts: Experts, shards: ExpertSharding) -> _SortedRows:
    """Sort assignments by expert of the device. Assignments to other devices' experts follow."""
    # Example: 3 tokens with the experts [0 2] [2 1] [0 1], K = 2, on a device with experts 0 and 1.
    # index = 0 2 2 1 0 1, where 2 stands for every expert of another device. order = 0 4 3 5 1 2
    # lists the assignments by expert. Their tokens are order // K = 0 2 1 2 0 1: expert 0 has rows
    # 0 and 1 (tokens 0 and 2), expert 1 has rows 2 and 3 (tokens 1 and 2), so bounds = 0 2 4.
    num_local = len(experts[UP])
    top_k = routing.experts.shape[-1]
    index = routing.experts.reshape(-1) - shards.first_expert(num_local)
    index = jnp.where((index >= 0) & (index < num_local), index, num_local)
    order = jnp.argsort(index, stable=True)
    num_experts = num_local * shards.num_expert_shards
    # The last block of the last expert may reach beyond the assignments: R rows of padding.
    padding = (0, expert_block_length(len(order) // top_k, top_k, num_experts))
    return _SortedRows(
        jnp.pad(order // top_k, padding),
        jnp.pad(routing.weights.reshape(-1)[order], padding),
        jnp.argsort(order).reshape(-1, top_k),
        jnp.searchsorted(index[order], jnp.arange(num_local + 1), method="scan_unrolled"),
    )


def _each_expert(
    run_expert: Callable[[Carry, Experts, Array], Carry],
    carry: Carry,
    rows: _SortedRows,
    experts: Experts,
    shards: ExpertSharding,
) -> Carry:
    """Run a function of the carry, an expert and its index for the experts with tokens, in order.

    If devices exchange the shards of experts, all experts run, because devices differ in the experts with tokens.
    """
    # Experts with tokens first, e.g. is_active = 0 1 1 -> indices = 1 2 0, and two steps.
    is_active = (jnp.diff(rows.bounds) > 0) | shards.gathers_experts
    indices = jnp.argsort(~is_active, stable=True)

    def run_step(step: Array, carry: Carry) -> Carry:
        index = indices[step]
        shard = {
            name: lax.dynamic_index_in_dim(stack, index, keepdims=False)
            for name, stack in experts.items()
        }
        return run_expert(carry, shards.gather(shard), index)

    # Devices that exchange shards have to run the same number of steps, or a collective waits forever.
    if shards.gathers_experts:
        num_steps = len(indices)
    else:
        num_steps = is_active.sum()
    return lax.fori_loop(0, num_steps, run_step, carry)


def _each_block(
    run_block: Callable[[Carry, _Block], Carry], carry: Carry, rows: _SortedRows, index: Array
) -> Carry:
    """Run a function of the carry and a block for the blocks of an expert, in order."""
    # `token_ids` has A + R rows and `row_ids` A assignments, so the difference is R.
    length = len(rows.token_ids) - rows.row_ids.size
    first = rows.bounds[index]
    end = rows.bounds[index + 1]

    def run_step(step: Array, carry: Carry) -> Carry:
        start = first + step * length
        token_ids = lax.dynamic_slice_in_dim(rows.token_ids, start, length)
        weights = lax.dynamic_slice_in_dim(rows.weights, start, length)
        return run_block(carry, _Block(start, token_ids, weights, start + jnp.arange(length) < end))

    # Rounded up, e.g. 5 rows in blocks of 4 are 2 blocks: -(-5 // 4) = 2. Without rows there are none.
    return lax.fori_loop(0, -(-(end - first) // length), run_step, carry)


def _empty_rows(rows: _SortedRows, tokens: Array) -> Array:
    """Return zeros for all rows [A + R, D]. Rows of experts on other devices stay zero."""
    return jnp.zeros((len(rows.token_ids), tokens.shape[-1]), tokens.dtype)


def _sum_by_token(values: Array, rows: _SortedRows) -> Array:
    """Sum the rows [A + R, D] of each token in float32, [N, D].

    One read per expert of a token, because a single one would copy all rows to [N, K, D] first.
    """
    total = sum(_values_at(values, row_ids).astype(jnp.float32) for row_ids in rows.row_ids.T)
    return jnp.asarray(total, values.dtype)


def _values_at(values: Array, indices: Array) -> Array:
    """Return the elements of `values` at indices. All indices must be in range."""
    return values.at[indices].get(mode="promise_in_bounds")


def _replace_rows(values: Array, block_values: Array, block: _Block) -> Array:
    """Replace the rows of a block."""
    return lax.dynamic_update_slice_in_dim(values, block_values, block.start, 0)


def _set_expert(stack: Array, matrix: Array, index: Array) -> Array:
    """Replace the matrix of one expert."""
    return lax.dynamic_update_index_in_dim(stack, matrix.astype(stack.dtype), index, 0)
