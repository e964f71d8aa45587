"""Sums in the order of a binary tree, in loops and over devices, against NumPy."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from trainer.distributed.exact_reduction import fixed_order_psum, square_sums, sum_in_tree

ONE = jnp.int32(1)


def random_parts(num_parts: int, *shape: int) -> np.ndarray:
    """Return float32 arrays whose sum depends on the order of the additions."""
    random = np.random.default_rng(0)
    return (
        random.normal(size=(num_parts, *shape)) * 10 ** random.uniform(-4, 4, (num_parts, *shape))
    ).astype("f4")


def numpy_tree_sum(parts: np.ndarray) -> np.ndarray:
    """Add neighbors until one part is left."""
    while len(parts) > 1:
        parts = parts[::2] + parts[1::2]
    return parts[0]


@pytest.mark.parametrize("num_parts", [1, 2, 8, 32])
def test_sum_in_tree_adds_neighbors_first(num_parts: int):
    parts = random_parts(num_parts, 64)
    total = jax.jit(partial(sum_in_tree, lambda part: {"x": part["x"]}))(
        {"x": jnp.asarray(parts)}, one=ONE
    )
    np.testing.assert_array_equal(total["x"], numpy_tree_sum(parts))
    assert num_parts < 8 or not np.array_equal(total["x"], parts.sum(0)), (
        "the order does not matter here"
    )


@pytest.mark.parametrize(
    ("shape", "spec"),
    [
        ((8, 6), PartitionSpec()),
        # The devices do not divide the elements.
        ((3, 5), PartitionSpec()),
        ((8, 6), PartitionSpec("fsdp")),
        ((6, 8), PartitionSpec(None, "dp")),
        ((16, 3), PartitionSpec(("dp", "fsdp"))),
        ((16, 3), PartitionSpec(("fsdp", "dp"))),
        ((4, 6), PartitionSpec("fsdp", "dp")),
    ],
)
def test_sum_over_devices_is_the_tree_sum(shape: tuple[int, ...], spec: PartitionSpec):
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("dp", "fsdp"))
    parts = random_parts(8, *shape)

    def reduce(part: jax.Array) -> jax.Array:
        return fixed_order_psum(part[0], spec, dict(mesh.shape))

    rows = PartitionSpec(("dp", "fsdp"))
    total = jax.jit(
        jax.shard_map(reduce, mesh=mesh, in_specs=rows, out_specs=spec, check_vma=False)
    )(parts)
    np.testing.assert_array_equal(total, numpy_tree_sum(parts))


def test_square_sums_equal_numpy():
    rows = random_parts(3, 50)
    np.testing.assert_allclose(
        square_sums(jnp.asarray(rows), one=ONE), np.square(rows).sum(1), rtol=1e-5
    )
