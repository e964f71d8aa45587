"""Casts of parameters in saved checkpoints: the number of changed values."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import NamedSharding, PartitionSpec

from trainer.models.errors import PrepError
from trainer.models.param_tree import Tree, flatten_tree
from trainer.training.optimizers.rounding import LOW_BITS

LOW_MASK = 2**LOW_BITS - 1  # of the bits that bfloat16 cuts off
ABS_MASK = 0x7FFFFFFF
INFINITY = 0x7F800000
# The smallest float32 that rounds to an infinite bfloat16: halfway between the largest bfloat16,
# 0x7F7F0000, and infinity, 0x7F800000. The tie goes to the even one, infinity.
FIRST_OVERFLOW = 0x7F7F8000


def count_changed_values(params: Tree, dtype: str, frozen: Collection[str] = ()) -> dict[str, Any]:
    """Count the values changed by a cast of the parameters.

    All processes of a run call it.

    Args:
        params: The parameters.
        dtype: Dtype of the cast.
        frozen: Paths of parameters that are not saved.

    Returns:
        The dtypes `from` and `to`, and the numbers of all `values` and of the `changed` ones.

    Raises:
        PrepError: A finite value is too large for the dtype.
    """
    leaves = {path: leaf for path, leaf in flatten_tree(params).items() if path not in frozen}
    counts = {path: count_leaf_changes(leaf, dtype) for path, leaf in leaves.items()}
    if overflowed := [path for path, (_, num_overflows) in counts.items() if num_overflows]:
        raise PrepError(f"parameters cannot be saved in {dtype}", overflow_text(overflowed))
    return {
        "from": ", ".join(sorted({str(leaf.dtype) for leaf in leaves.values()})),
        "to": dtype,
        "values": sum(leaf.size for leaf in leaves.values()),
        "changed": sum(num_changed for num_changed, _ in counts.values()),
    }


def overflow_text(paths: Sequence[str]) -> str:
    """Return why the parameters with these paths cannot be cast."""
    subject = (
        f"{paths[0]} has" if len(paths) == 1 else f"{len(paths)} parameters, {paths[0]} first, have"
    )
    return f"{subject} values that are too large for it"


def count_leaf_changes(leaf: Array, dtype: str) -> tuple[int, int]:
    """Return the numbers of values that a cast changes, and of finite ones that it makes infinite.

    NaN stays NaN.
    """
    sharding = leaf.sharding
    replicated = (
        NamedSharding(sharding.mesh, PartitionSpec())
        if isinstance(sharding, NamedSharding)
        else None
    )
    counts = jax.jit(_count_rows, static_argnames="dtype", out_shardings=replicated)(
        leaf, dtype=dtype
    )
    num_changed, num_overflows = (int(np.asarray(count).sum(dtype=np.int64)) for count in counts)
    return num_changed, num_overflows


def _count_rows(leaf: Array, dtype: str) -> tuple[Array, Array]:
    """Return the numbers of changed and of overflowed values of each row of the first axis, uint32.

    The bits are compared: devices may flush subnormal values.
    """
    values = leaf.astype(jnp.float32)
    bits = lax.bitcast_convert_type(values, jnp.uint32)
    magnitude = bits & ABS_MASK
    if dtype == "bfloat16":
        masks = bits & LOW_MASK != 0, magnitude >= FIRST_OVERFLOW
    else:
        cast = values.astype(dtype).astype(jnp.float32)
        masks = lax.bitcast_convert_type(cast, jnp.uint32) != bits, jnp.isinf(cast)
    changed = masks[0] & (magnitude <= INFINITY)
    overflowed = masks[1] & (magnitude < INFINITY)
    num_changed, num_overflows = (
        mask.sum(axis=tuple(range(1, leaf.ndim)), dtype=jnp.uint32)
        for mask in (changed, overflowed)
    )
    return num_changed, num_overflows
