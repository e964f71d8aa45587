"""Gradients and loss sums that do not depend on the number of devices that split the batch.

A batch is a fixed number of logical shards of equal shape. Each device computes its logical shards one at a time
with full parameters, and all sums have the order of one binary tree (`trainer.distributed.exact_sums`). The norm of
the gradients is a sum over blocks. Their shapes depend on the parameters and the number of logical shards only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec

from prepcli.models.param_tree import ParamLeaf, Tree, flatten_tree, unflatten_tree
from trainer.distributed.exact_sums import call_in_loop, fixed_order_psum, square_sums, sum_in_tree
from trainer.distributed.sharding import ShardingContext, dim_axes, jax_partition_spec
from trainer.training.feed import TokenBatch

REPLICATED = PartitionSpec()


def compiler_options() -> dict[str, Any]:
    """Return XLA options with which a function has equal results in the programs of all meshes.

    XLA eliminates common subexpressions earlier on several devices than on one. It then simplifies other
    expressions. On CPUs, contraction of products and sums depends on the division of a program for compilation, and
    the optimizations of LLVM round some values of parameters otherwise if a mesh splits them.
    """
    options: dict[str, Any] = {"xla_disable_hlo_passes": "cse"}
    if jax.default_backend() == "cpu":
        options |= {"xla_cpu_parallel_codegen_split_count": 1, "xla_backend_optimization_level": 0}
    return options


@dataclass(frozen=True, slots=True)
class ExactReduction:
    """Sums over the logical shards of a batch."""

    num_shards: int  # Logical shards of a batch, a power of two
    sharding: ShardingContext  # The device mesh. Its axes, if larger than 1, split the batch.
    leaves: Mapping[str, ParamLeaf]  # Parameters by path

    def sum_losses(
        self, function: Callable[[Tree, TokenBatch], Any], params: Tree, batch: TokenBatch
    ) -> Any:
        """Sum a function of parameters and rows, a tree of arrays, over all logical shards."""

        def sum_local(params: Tree, rows: TokenBatch) -> Any:
            sums = self._sum_device(function, params, rows)
            return jax.tree.map(lambda x: fixed_order_psum(x, REPLICATED, self._batch_axes), sums)

        return self._map_devices(sum_local, REPLICATED)(params, batch)

    def map_shards(
        self, function: Callable[[Tree, TokenBatch], Any], params: Tree, batch: TokenBatch
    ) -> Any:
        """Compute a function of parameters and rows for each logical shard.

        Arrays of its result are [shards, ...].
        """

        def map_local(params: Tree, rows: TokenBatch) -> Any:
            one = _runtime_one(rows)
            return lax.map(
                lambda shard: call_in_loop(partial(function, params), shard, one),
                self._local_shards(rows),
            )

        return self._map_devices(map_local, PartitionSpec(tuple(self._batch_axes)))(params, batch)

    def sum_gradients(
        self, value_and_grad: Callable[[Tree, TokenBatch], Any], params: Tree, batch: TokenBatch
    ) -> tuple[Tree, dict[str, Array], Array]:
        """Sum gradients and loss sums over all logical shards.

        Args:
            value_and_grad: Computes ((loss, loss sums), gradients) of rows.
            params: Parameters in float32 or bfloat16.
            batch: The rows of the step.

        Returns:
            Gradients with the shardings of their parameters, loss sums, and the norm of the gradients.
        """
        specs = {path: self._param_spec(leaf) for path, leaf in self.leaves.items()}

        def sum_local(params: Tree, rows: TokenBatch) -> tuple[Tree, Any, Array]:
            (_, sums), gradients = self._sum_device(value_and_grad, params, rows)
            sums = jax.tree.map(lambda x: fixed_order_psum(x, REPLICATED, self._batch_axes), sums)
            leaves: dict[str, Array] = {}
            blocks: list[Array] = []
            for path, gradient in flatten_tree(gradients).items():
                leaf = fixed_order_psum(gradient, specs[path], self._batch_axes)
                leaves[path] = leaf
                blocks.append(self._block_sums(path, leaf, specs[path], one=_runtime_one(rows)))
            return (
                unflatten_tree(leaves),
                sums,
                call_in_loop(_norm_of_blocks, blocks, _runtime_one(rows)),
            )

        out_specs = (unflatten_tree(specs), REPLICATED, REPLICATED)
        # The barrier keeps XLA from fusing the sums with the operations that use them.
        return lax.optimization_barrier(self._map_devices(sum_local, out_specs)(params, batch))

    @property
    def _batch_axes(self) -> dict[str, int]:
        """The mesh axes of a size above 1 that split the batch, outermost first."""
        if self.sharding.device_mesh is None:
            return {}
        axes = self.sharding.activation_axes((self.num_shards,), "batch")[0]
        return {axis: self.sharding.device_mesh.shape[axis] for axis in axes}

    def _param_spec(self, leaf: ParamLeaf) -> PartitionSpec:
        spec = self.sharding.param_spec(leaf)
        if spec is None:
            return REPLICATED
        return jax_partition_spec(spec)

    def _map_devices(self, function: Callable[..., Any], out_specs: Any) -> Callable[..., Any]:
        """Map a function of full parameters and the rows of a device over the mesh."""
        mesh = self.sharding.device_mesh
        if mesh is None:
            return function
        in_specs = (REPLICATED, PartitionSpec(tuple(self._batch_axes)))
        return jax.shard_map(
            function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )

    def _sum_device(
        self, function: Callable[[Tree, TokenBatch], Any], params: Tree, rows: TokenBatch
    ) -> Any:
        """Sum a function over the logical shards of one device."""
        return sum_in_tree(
            partial(function, params), self._local_shards(rows), one=_runtime_one(rows)
        )

    def _local_shards(self, rows: TokenBatch) -> dict[str, Array]:
        """Split the rows of one device into its logical shards."""
        # 8 logical shards over batch axes of sizes 2 and 2 leave 2 logical shards per device.
        num_local = self.num_shards // math.prod(self._batch_axes.values())
        return {
            name: array.reshape(num_local, -1, *array.shape[1:]) for name, array in rows.items()
        }

    def _block_sums(self, path: str, shard: Array, spec: PartitionSpec, *, one: Array) -> Array:
        """Compute the sum of squares in each block of a gradient."""
        leaf = self.leaves[path]
        # Blocks per dim on this device. With 8 logical shards, a dim of 12 has gcd(12, 8) = 4 blocks
        # of 3. A device with 6 of the 12 has 4 * 6 // 12 = 2 of them. The number 4 does not depend
        # on the mesh.
        counts: list[int] = []
        may_split = self.sharding.may_split_over_batch_axes(leaf)
        for extent, local, is_split in zip(leaf.shape, shard.shape, may_split):
            num_blocks = 1
            if is_split:
                num_blocks = math.gcd(extent, self.num_shards)
            counts.append(num_blocks * local // extent)
        sums = square_sums(_split_blocks(shard, counts), one=one).reshape(counts)
        for dim, axes in enumerate(dim_axes(spec, shard.ndim)):
            if axes:
                sums = lax.all_gather(sums, axes, axis=dim, tiled=True)
        return sums


def _runtime_one(rows: TokenBatch) -> Array:
    """Return 1 as min(token id, 0) + 1. Token ids are never negative."""
    # XLA cannot fold a number that depends on the input, so a loop with this number of iterations
    # stays a loop. Its body is compiled alone, the same on every mesh.
    return 1 + jnp.minimum(rows["tokens"][0, 0], 0)


def _split_blocks(x: Array, counts: Sequence[int]) -> Array:
    """Split an array into blocks, `counts` per dim, and return them as [blocks, elements of a block]."""
    # [4, 6] with counts [2, 3] becomes [2, 2, 3, 2]: count and extent of a block, per dim. The
    # transpose with order (0, 2, 1, 3) puts the counts first: [2, 3, 2, 2], then [6, 4].
    extents: list[int] = []
    for count, extent in zip(counts, x.shape):
        extents += [count, extent // count]
    split = x.reshape(extents)
    order = (*range(0, split.ndim, 2), *range(1, split.ndim, 2))
    return split.transpose(order).reshape(math.prod(counts), -1)


def _norm_of_blocks(block_sums: Sequence[Array]) -> Array:
    """Compute the norm of all gradients from their blocks' sums of squares."""
    return jnp.sqrt(jnp.stack([sums.sum() for sums in block_sums]).sum())
