"""The experts of an MoE layer: each computes its own tokens only, in blocks of a fixed size, on a mesh of devices.

An assignment is a token with one of its experts. Assignments are sorted by expert, and each expert computes as many
blocks as its rows fill: no token is dropped, and an expert without tokens costs nothing. `jax.lax.ragged_dot` computes
the same products, but XLA expands it on CPU to masked products of all rows with all experts.

The output of an expert is linear in its hidden units, so the routing weight multiplies these: the gradient of the
weight then needs no second product with `down`.

Each device computes its own rows of the batch. Over axes that split both the batch and a matrix (fsdp) it gathers one
expert at a time. Over axes that split hidden units or experts only (mp) devices have partial sums, added at the end.

Axes: N tokens, K experts of a token, A = N * K assignments, E experts of the device, R rows of a block, D width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec

from prepcli.models.activation_memory import expert_block_length
from prepcli.models.architecture import ArchConfig
from prepcli.models.lora import LORA_A, LORA_B, RANK_ATOM
from prepcli.models.mesh import MeshAxes
from prepcli.models.param_tree import unflatten_tree
from trainer.distributed.sharding import ShardingContext
from trainer.nn.mlp import mlp_hidden
from trainer.nn.projections import linear

UP = "up.weight"
EXPERT_DIMS: Mapping[str, tuple[str, ...]] = {
    "gate.weight": ("experts", "mlp", "embed"),
    "gate.bias": ("experts", "mlp"),
    UP: ("experts", "mlp", "embed"),
    "up.bias": ("experts", "mlp"),
    "down.weight": ("experts", "embed", "mlp"),
    f"gate.{LORA_A}": ("experts", RANK_ATOM, "embed"),
    f"gate.{LORA_B}": ("experts", "mlp", RANK_ATOM),
    f"up.{LORA_A}": ("experts", RANK_ATOM, "embed"),
    f"up.{LORA_B}": ("experts", "mlp", RANK_ATOM),
    f"down.{LORA_A}": ("experts", RANK_ATOM, "mlp"),
    f"down.{LORA_B}": ("experts", "embed", RANK_ATOM),
}

# Leaves of EXPERT_DIMS by path, e.g. `up.weight` [E, F, D], or without E for one expert. Biases and
# adapters are optional.
Experts = Mapping[str, Array]


# Compared by identity: a static argument of jit has to be hashable.
@dataclass(frozen=True, slots=True, eq=False)
class ExpertSharding:
    """The mesh axes of an MoE layer's tokens and experts."""

    device_mesh: jax.sharding.Mesh | None = None  # The device mesh. None for one device.
    row_axes: MeshAxes = ()  # Axes that split the rows of the batch
    column_axes: MeshAxes = ()  # Axes that split the tokens of a row
    # Axes of each dim of the stacked leaves, by path
    weight_axes: Mapping[str, tuple[MeshAxes, ...]] = field(
        default_factory=lambda: {path: ((),) * len(dims) for path, dims in EXPERT_DIMS.items()}
    )

    @property
    def token_axes(self) -> MeshAxes:
        """Axes that split the tokens."""
        return self.row_axes + self.column_axes

    @property
    def gathers_experts(self) -> bool:
        """Whether devices exchange the shards of each expert, and therefore have to compute experts in step."""
        return any(self._token_axes_of(axes) for axes in self.weight_axes[UP])

    @property
    def num_expert_shards(self) -> int:
        """Number of shards of the stack of experts."""
        return (
            math.prod(self.device_mesh.shape[axis] for axis in self.weight_axes[UP][0])
            if self.device_mesh
            else 1
        )

    @property
    def token_spec(self) -> PartitionSpec:
        """Sharding of an array of tokens, [B, T, ...]."""
        return PartitionSpec(self.row_axes, self.column_axes)

    @property
    def expert_specs(self) -> Mapping[str, PartitionSpec]:
        """Sharding of the stacked leaves, by path."""
        return {path: PartitionSpec(*axes) for path, axes in self.weight_axes.items()}

    @property
    def _partial_sum_axes(self) -> MeshAxes:
        """Axes that split experts or their hidden units, and do not split tokens."""
        return tuple(axis for axis in chain(*self.weight_axes[UP]) if axis not in self.token_axes)

    def first_expert(self, num_local: int) -> Array | int:
        """Return the index of the first of the device's experts."""
        axes = self.weight_axes[UP][0]
        return num_local * lax.axis_index(axes) if axes else 0

    def map_devices(
        self, function: Callable[..., Any], in_specs: Any, out_specs: Any
    ) -> Callable[..., Any]:
        """Return `function` with each device's shards as its arguments and results."""
        if self.device_mesh is None:
            return function
        return jax.shard_map(
            function, mesh=self.device_mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )

    def gather(self, expert: Experts) -> Experts:
        """Gather the shards of one expert over the axes that split tokens."""
        return self._map_split_dims(
            expert, lambda matrix, axes, dim: lax.all_gather(matrix, axes, axis=dim, tiled=True)
        )

    def scatter_gradient(self, gradient: Experts) -> Experts:
        """Sum the gradient of one expert over the axes that split it and tokens, and keep the device's shard."""
        return self._map_split_dims(
            gradient,
            lambda matrix, axes, dim: lax.psum_scatter(
                matrix, axes, scatter_dimension=dim, tiled=True
            ),
        )

    def sum_gradients(self, gradients: Experts) -> Experts:
        """Sum the gradients of all experts over the axes that split tokens, or hidden units, and not the leaf."""
        sums = dict(gradients)
        for path, gradient in gradients.items():
            # `scatter_gradient` has summed over the axes that split the leaf. A matrix of an adapter without hidden
            # units has a part of its gradient on each device that has a part of these units.
            used = {*chain(*self.weight_axes[path])}
            parts = self.token_axes + self._partial_sum_axes
            axes = tuple(axis for axis in parts if axis not in used)
            sums[path] = lax.psum(gradient, axes) if axes else gradient
        return sums

    def sum_parts(self, x: Any) -> Any:
        """Add the parts of outputs or gradients on the devices with the same tokens."""
        return lax.psum(x, self._partial_sum_axes) if self._partial_sum_axes else x

    def _map_split_dims(
        self, expert: Experts, function: Callable[[Array, MeshAxes, int], Array]
    ) -> Experts:
        """Apply a function to the leaves of one expert, for each dim split over axes of tokens."""
        leaves = dict(expert)
        for path in expert:
            for dim, axes in enumerate(map(self._token_axes_of, self.weight_axes[path][1:])):
                leaves[path] = function(leaves[path], axes, dim) if axes else leaves[path]
        return leaves

    def _token_axes_of(self, axes: MeshAxes) -> MeshAxes:
        return tuple(axis for axis in axes if axis in self.token_axes)


def expert_sharding(x: Array, experts: Experts, sharding: ShardingContext) -> ExpertSharding:
    """Return the sharding of tokens [B, T, D] and stacked experts by the rules of a run.

    Args:
        x: Tokens.
        experts: The experts.
        sharding: The device mesh and its rules.
    """
    if sharding.device_mesh is None:
        return ExpertSharding()
    row_axes, column_axes, _ = sharding.activation_axes(x.shape, "batch", "seq", "embed")
    weight_axes: dict[str, tuple[MeshAxes, ...]] = {}
    for path, leaf in experts.items():
        dims = EXPERT_DIMS[path]
        usable: list[MeshAxes] = []
        for dim, axes in zip(dims, sharding.weight_axes(leaf.shape, *dims)):
            usable.append(_usable_axes(dim, axes, row_axes + column_axes))
        weight_axes[path] = tuple(usable)
    return ExpertSharding(sharding.device_mesh, row_axes, column_axes, weight_axes)


def _usable_axes(dim: str, axes: MeshAxes, token_axes: MeshAxes) -> MeshAxes:
    """Return the axes of a dim of the experts that stay split in this layer."""
    # A stack of experts split like the tokens is gathered as a whole, and so is an embedding width split over devices
    # with the same tokens.
    if dim == "experts":
        if {*axes} & {*token_axes}:
            return ()
        return axes
    if dim == "mlp":
        return axes
    return tuple(axis for axis in axes if axis in token_axes)


Carry = TypeVar("Carry")


class Routing(NamedTuple):
    """The experts of each token."""

    weights: Array  # Weight of each expert, float32 [..., K]
    experts: Array  # Index of each expert, int32 [..., K]


class _SortedRows(NamedTuple):
    """Assignments sorted by expert."""

    token_ids: Array  # Token of each row [A + R]. The last R rows are padding.
    weights: Array  # Routing weight of each row [A + R]
    row_ids: Array  # Row of each assignment [N, K]
    bounds: Array  # First row of each expert, and the end of the last [E + 1]


class _Block(NamedTuple):
    """Rows that an expert computes together."""

    start: Array  # First row, []
    token_ids: Array  # Token of each row [R]
    weights: Array  # Routing weight of each row [R]
    is_own: Array  # Whether the expert has this row, bool [R]. False for rows after its last.


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
    """Run a function of the carry, an expert and its index for the experts with tokens, in order."""
    # If devices exchange the shards of experts, all experts run, because devices differ in the experts with tokens.
    #
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
    """Sum the rows [A + R, D] of each token in float32, [N, D]."""
    # One read per expert of a token, because a single one would copy all rows to [N, K, D] first.
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
