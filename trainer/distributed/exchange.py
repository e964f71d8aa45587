"""Exchange of the parts of a leaf over the network of the devices. Each device has read one part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from prepcli.models.mesh import MeshAxes
from trainer.distributed.read_plan import ReadPlan, ShardedLeaf
from trainer.distributed.tree_sum import dim_axes

BlockUpdate = Callable[[jax.Array, jax.Array, np.ndarray], jax.Array]


def sharded_leaf(shape: tuple[int, ...], sharding: NamedSharding) -> ShardedLeaf:
    """Return the mesh axes that split each dim of a leaf."""
    sizes = sharding.mesh.shape
    split_axes: list[MeshAxes] = []
    for axes in dim_axes(sharding.spec, len(shape)):
        split_axes.append(tuple(axis for axis in axes if sizes[axis] > 1))
    return ShardedLeaf(shape, tuple(split_axes), tuple(sizes.items()))


@lru_cache(maxsize=1024)
def compile_allocation(
    shape: tuple[int, ...], dtype: jnp.dtype, sharding: Sharding
) -> Callable[[], jax.Array]:
    """Compile the allocation of a leaf on its devices."""
    return jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=sharding)


def part_sharding(plan: ReadPlan, sharding: NamedSharding) -> NamedSharding:
    """Return the sharding of an array that contains one row block of a leaf: each device has the part that it read."""
    entries: list[MeshAxes] = [
        plan.leaf.split_axes[dim] if dim in plan.kept_dims else () for dim in _leaf_dims(plan)
    ]
    entries[plan.row_dim] += plan.reader_axes
    return NamedSharding(sharding.mesh, PartitionSpec(*entries))


@lru_cache(maxsize=1024)
def compile_block_update(plan: ReadPlan, sharding: NamedSharding, rows: int) -> BlockUpdate:
    """Compile a function that exchanges the parts of a row block between devices and writes the block into the leaf.

    A row block is a range of rows of a leaf that is loaded at once. The buffer of the old leaf is donated.

    Args:
        plan: The division of the leaf.
        sharding: Sharding of the leaf.
        rows: Rows of the block.

    Returns:
        A function of the leaf, the array of parts and the block's start.
    """

    def update(leaf: jax.Array, part: jax.Array, start: jax.Array) -> jax.Array:
        for axis, dim in plan.collectives:
            if dim is None:
                part = lax.all_gather(part, axis, axis=plan.row_dim, tiled=True)
            else:
                part = lax.all_to_all(
                    part, axis, split_axis=dim, concat_axis=plan.row_dim, tiled=True
                )
        part = widen(lax.slice_in_dim(part, 0, rows, axis=plan.row_dim), leaf.dtype)
        starts = [start[dim] for dim in _leaf_dims(plan)]
        if plan.keeps_rows:
            return lax.dynamic_update_slice(leaf, part, starts)
        shard_start = _shard_index(plan.leaf, plan.row_dim) * leaf.shape[plan.row_dim]
        return _update_overlap(leaf, part, starts, plan.row_dim, starts[plan.row_dim] - shard_start)

    in_specs = (sharding.spec, part_sharding(plan, sharding).spec, PartitionSpec())
    mapped = jax.shard_map(
        update, mesh=sharding.mesh, in_specs=in_specs, out_specs=sharding.spec, check_vma=False
    )
    return jax.jit(mapped, donate_argnums=0)


def _update_overlap(
    shard: jax.Array, block: jax.Array, starts: Sequence[jax.Array], row_dim: int, first: jax.Array
) -> jax.Array:
    """Copy the rows of a row block (a range of leaf rows) that belong to a shard.

    Args:
        shard: The shard.
        block: The block.
        starts: Start of the block in the dims other than `row_dim`.
        row_dim: The dim of rows.
        first: The block's first row, relative to the shard. It may be outside.
    """
    length = min(block.shape[row_dim], shard.shape[row_dim])
    # Shapes are static, so each device updates a window of `length` rows and keeps rows outside the
    # block. E.g. a shard of 4 rows, a block of 3 rows and first = -1: the window has rows 0 to 2,
    # which are rows 1, 2 and 3 of the block, and row 3 is outside.
    window_start = jnp.clip(first, 0, shard.shape[row_dim] - length)
    starts = [window_start if dim == row_dim else start for dim, start in enumerate(starts)]
    window_shape = [length if dim == row_dim else extent for dim, extent in enumerate(block.shape)]
    window = lax.dynamic_slice(shard, starts, window_shape)
    # Index in the block of each row of the window.
    rows = window_start - first + jnp.arange(length)
    is_inside = (rows >= 0) & (rows < block.shape[row_dim])
    is_inside = lax.broadcast_in_dim(is_inside, window.shape, (row_dim,))
    shifted = jnp.take(block, jnp.clip(rows, 0, block.shape[row_dim] - 1), axis=row_dim)
    return lax.dynamic_update_slice(shard, jnp.where(is_inside, shifted, window), starts)


@lru_cache(maxsize=1024)
def compile_broadcast(
    leaf: ShardedLeaf, sharding: NamedSharding
) -> Callable[[jax.Array], jax.Array]:
    """Compile the copy of a whole leaf from one device to the shards of all.

    Returns:
        A function of an array [devices, ...leaf], split over all mesh axes: the leaf on one device, zeros on every
        other device.
    """
    axes = tuple(axis for axis, _ in leaf.mesh_sizes)

    def broadcast(part: jax.Array) -> jax.Array:
        # Bits are summed as integers: as floats, 0.0 + -0.0 is 0.0, which loses the sign. All devices but
        # one have zeros, so the sum is the bits of the leaf.
        bits = lax.bitcast_convert_type(part[0], jnp.dtype(f"uint{8 * part.dtype.itemsize}"))
        wide = bits.astype(jnp.uint32) if bits.dtype.itemsize < 4 else bits
        whole = lax.psum(wide, axes)
        extents = [leaf.shard_extent(dim) for dim in range(len(leaf.shape))]
        starts = [_shard_index(leaf, dim) * extent for dim, extent in enumerate(extents)]
        return lax.bitcast_convert_type(
            lax.dynamic_slice(whole, starts, extents).astype(bits.dtype), part.dtype
        )

    mapped = jax.shard_map(
        broadcast,
        mesh=sharding.mesh,
        in_specs=PartitionSpec(axes),
        out_specs=sharding.spec,
        check_vma=False,
    )
    return jax.jit(mapped)


def exchange_dtype(stored: str, target: jnp.dtype) -> jnp.dtype:
    """Return the dtype of the exchanged parts: bfloat16 values are widened to float32 after the exchange."""
    if (stored, target) == ("bfloat16", jnp.float32):
        return jnp.dtype(jnp.bfloat16)
    return target


def widen(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Widen bfloat16 to float32 unless `x` has `dtype`.

    The bits are shifted as integers, because a float conversion on a device may flush subnormal
    values to zero.
    """
    if x.dtype == dtype:
        return x
    bits = lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32)
    return lax.bitcast_convert_type(bits << 16, dtype)


def _shard_index(leaf: ShardedLeaf, dim: int) -> jax.Array:
    """Return the index along a dim of this device's shard, in a computation on each device."""
    return jnp.asarray(
        lax.axis_index(leaf.split_axes[dim]) if leaf.split_axes[dim] else 0, jnp.int32
    )


def _leaf_dims(plan: ReadPlan) -> range:
    return range(len(plan.leaf.shape))
