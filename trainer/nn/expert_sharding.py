"""Mesh axes of an MoE layer, and the collectives of its devices.

Each device computes its own rows of the batch. Over axes that split both the batch and a matrix (fsdp) it gathers one
expert at a time. Over axes that split hidden units or experts only (mp) devices have partial sums, added at the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import jax
from jax import Array, lax
from jax.sharding import PartitionSpec

from prepcli.models.lora import LORA_A, LORA_B, RANK_ATOM
from prepcli.models.mesh import MeshAxes
from trainer.distributed.sharding import ShardingContext

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
    """The mesh axes of an MoE layer's tokens and experts.

    Attributes:
        device_mesh: The device mesh. None for one device.
        row_axes: Axes that split the rows of the batch.
        column_axes: Axes that split the tokens of a row.
        weight_axes: Axes of each dim of the stacked leaves, by path.
    """

    device_mesh: jax.sharding.Mesh | None = None
    row_axes: MeshAxes = ()
    column_axes: MeshAxes = ()
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
    """Return the axes of a dim of the experts that stay split in this layer.

    A stack of experts split like the tokens is gathered as a whole, and so is an embedding width split
    over devices with the same tokens.
    """
    if dim == "experts":
        if {*axes} & {*token_axes}:
            return ()
        return axes
    if dim == "mlp":
        return axes
    return tuple(axis for axis in axes if axis in token_axes)
