"""Sums over shards of a batch in the order of a binary tree, equal for every number of devices that split the batch.

Shards are numbered in the order of the batch. A node of the tree adds the sums of two neighboring ranges of equal
length, so that a power of two of devices computes disjoint subtrees. Devices then add their sums in the order of the
tree above. Each addition has the same two operands on every mesh, and floating-point addition is commutative.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec

from trainer.models.mesh import MeshAxes


def sum_in_tree(function: Callable[[Any], Any], inputs: Any, *, one: Array) -> Any:
    """Sum the results of a function over shards, computed one after the other.

    At most log2(shards) + 1 results exist at the same time.

    Args:
        function: Computes the result of one shard, a tree of arrays.
        inputs: Tree of arrays [shards, ...]; the number of shards is a power of two.
        one: int32 [], 1 by the values of other arrays, so that XLA does not know it.
    """
    num_shards = len(jax.tree.leaves(inputs)[0])
    if num_shards == 1:
        return call_in_loop(function, jax.tree.map(lambda array: array[0], inputs), one)
    halves = jax.tree.map(lambda array: array.reshape(2, num_shards // 2, *array.shape[1:]), inputs)

    def add_half(total: Any, step: tuple[Any, Array]) -> tuple[Any, None]:
        half, is_first = step
        part = sum_in_tree(function, half, one=one)
        return jax.tree.map(lambda a, b: jnp.where(is_first, b, a + b), total, part), None

    result = jax.eval_shape(function, jax.tree.map(lambda array: array[0], inputs))
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), result)
    return lax.scan(add_half, zeros, (halves, jnp.array([True, False])))[0]


def call_in_loop(function: Callable[[Any], Any], inputs: Any, num_iterations: Array) -> Any:
    """Call a function once, in the body of a loop whose number of iterations XLA does not know.

    XLA compiles the body of a loop on its own. Otherwise it would fuse the function with the code around it, which
    depends on the number of shards, and round differently.
    """
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(function, inputs))

    def call(state: tuple[Array, Any]) -> tuple[Array, Any]:
        return state[0] + 1, lax.optimization_barrier(function(lax.optimization_barrier(inputs)))

    return lax.while_loop(lambda state: state[0] < num_iterations, call, (jnp.int32(0), zeros))[1]


def square_sums(blocks: Array, *, one: Array) -> Array:
    """Compute the sum of squares of each row of [blocks, elements], in a loop that rounds each row alike.

    Args:
        blocks: The rows.
        one: int32 [], 1 by the values of other arrays, so that XLA does not know it.
    """

    def add_row(index: Array, sums: Array) -> Array:
        row = lax.dynamic_index_in_dim(blocks, index, keepdims=False)
        return lax.dynamic_update_index_in_dim(sums, jnp.square(row).sum(), index, 0)

    return lax.fori_loop(0, len(blocks) * one, add_row, jnp.zeros(len(blocks), blocks.dtype))


def sum_over_devices(x: Array, spec: PartitionSpec, batch_axes: Mapping[str, int]) -> Array:
    """Add an array of every device in the order of the tree, inside `jax.shard_map`.

    Args:
        x: The sum of the device's own shards, with the full shape.
        spec: Mesh axes that split the result.
        batch_axes: Sizes of the mesh axes that split the batch, outermost first; powers of two.

    Returns:
        The device's shard of the sum.
    """
    sizes = [[batch_axes[axis] for axis in axes] for axes in dim_axes(spec, x.ndim)]
    split_axes = [axis for axes in dim_axes(spec, x.ndim) for axis in (*axes, "")]  # "" for the rest of a dim
    shard_shape = [extent // _product(dim_sizes) for extent, dim_sizes in zip(x.shape, sizes)]
    x = x.reshape([extent for dim_sizes, rest in zip(sizes, shard_shape) for extent in (*dim_sizes, rest)])
    for axis, size in reversed(list(batch_axes.items())):
        if axis in split_axes:
            x = _reduce_scatter(x, split_axes.index(axis), axis, size=size)
        else:
            x = _all_reduce(x, axis, size)
    return x.reshape(shard_shape)


def dim_axes(spec: PartitionSpec, ndim: int) -> list[MeshAxes]:
    """Return the mesh axes that split each dim of an array."""
    entries = (*spec, *(None,) * (ndim - len(spec)))
    return [() if entry is None else entry if isinstance(entry, tuple) else (entry,) for entry in entries]


def _product(sizes: list[int]) -> int:
    result = 1
    for size in sizes:
        result *= size
    return result


def _all_reduce(x: Array, axis: str, size: int) -> Array:
    """Add arrays over a mesh axis: each device adds a part, then all devices gather the parts."""
    if x.size % size:
        padded = jnp.pad(x.reshape(-1), (0, -x.size % size))
        return _all_reduce(padded, axis, size)[: x.size].reshape(x.shape)
    part = _reduce_scatter(x.reshape(size, -1), 0, axis, size=size)
    return lax.all_gather(part, axis, tiled=True).reshape(x.shape)


def _reduce_scatter(x: Array, dim: int, axis: str, *, size: int) -> Array:
    """Add arrays over a mesh axis; a device gets the index of its coordinate, as a dim of extent 1.

    Recursive halving, nearest neighbors first: in each round a device keeps the half whose indices agree with its
    coordinate in one more bit, and sends the other half to the neighbor that keeps it.
    """
    coordinate = lax.axis_index(axis)
    for bit in range(size.bit_length() - 1):
        pairs = x.reshape(*x.shape[:dim], x.shape[dim] // 2, 2, *x.shape[dim + 1 :])
        own = (coordinate >> bit) & 1
        kept, sent = (lax.dynamic_index_in_dim(pairs, index, dim + 1, keepdims=False) for index in (own, 1 - own))
        x = kept + lax.ppermute(sent, axis, [(device, device ^ (1 << bit)) for device in range(size)])
    return x
