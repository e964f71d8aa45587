"""Casts of parameters in saved checkpoints: the number of changed values."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import NamedSharding, PartitionSpec

from prepcli.core.errors import Key, PrepError, text
from prepcli.models.param_tree import Tree, flatten_tree
from prepcli.planning.manifest_fields import CastCounts
from trainer.training.optimizers.rounding import LOW_BITS

# The bits that bfloat16 cuts off.
LOW_MASK = 2**LOW_BITS - 1
# All bits except the sign. Without the sign, float32 values have the same order as their bits read
# as integers.
ABS_MASK = 0x7FFFFFFF
INFINITY = 0x7F800000
# The smallest float32 that rounds to an infinite bfloat16: halfway between the largest bfloat16,
# 0x7F7F0000, and infinity, 0x7F800000. The tie goes to the even one, infinity.
FIRST_OVERFLOW = 0x7F7F8000


def count_changed_values(params: Tree, dtype: str, frozen: Collection[str] = ()) -> CastCounts:
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
    dtypes: set[str] = set()
    num_values = 0
    num_changed = 0
    overflowed: list[str] = []
    for path, leaf in flatten_tree(params).items():
        if path in frozen:
            continue
        leaf_changed, leaf_overflows = count_leaf_changes(leaf, dtype)
        dtypes.add(str(leaf.dtype))
        num_values += leaf.size
        num_changed += leaf_changed
        if leaf_overflows:
            overflowed.append(path)
    if overflowed:
        hint = text("{}", Key("checkpoint.dtype", "float32", is_override=True))
        raise PrepError(f"parameters cannot be saved in {dtype}", overflow_text(overflowed), hint)
    return {
        "from": ", ".join(sorted(dtypes)),
        "to": dtype,
        "values": num_values,
        "changed": num_changed,
    }


def overflow_text(paths: Sequence[str]) -> str:
    """Return why the parameters with these paths cannot be cast."""
    subject = f"{paths[0]} has"
    if len(paths) > 1:
        subject = f"{len(paths)} parameters, {paths[0]} first, have"
    return f"{subject} values that are too large for it"


def count_leaf_changes(leaf: Array, dtype: str) -> tuple[int, int]:
    """Return the numbers of values that a cast changes, and of finite ones that it makes infinite.

    NaN stays NaN.
    """
    sharding = leaf.sharding
    # Replicated counts are addressable by every process of a run.
    replicated: NamedSharding | None = None
    if isinstance(sharding, NamedSharding):
        replicated = NamedSharding(sharding.mesh, PartitionSpec())
    count_rows = jax.jit(_count_rows, static_argnames="dtype", out_shardings=replicated)
    changed, overflowed = count_rows(leaf, dtype=dtype)
    return _sum_counts(changed), _sum_counts(overflowed)


def _sum_counts(row_counts: Array) -> int:
    # A leaf may have more than 2^32 values. JAX has no 64-bit integers by default, NumPy has.
    return int(np.asarray(row_counts).sum(dtype=np.int64))


def _count_rows(leaf: Array, dtype: str) -> tuple[Array, Array]:
    """Count the changed and the overflowed values in each row of the first axis, as two uint32 arrays.

    The bits are compared: devices may flush subnormal values.
    """
    values = leaf.astype(jnp.float32)
    bits = lax.bitcast_convert_type(values, jnp.uint32)
    magnitude = bits & ABS_MASK
    if dtype == "bfloat16":
        changed = bits & LOW_MASK != 0
        overflowed = magnitude >= FIRST_OVERFLOW
    else:
        cast = values.astype(dtype).astype(jnp.float32)
        changed = lax.bitcast_convert_type(cast, jnp.uint32) != bits
        overflowed = jnp.isinf(cast)
    # Magnitudes above INFINITY are NaN. INFINITY itself is no overflow: it was infinite before.
    changed &= magnitude <= INFINITY
    overflowed &= magnitude < INFINITY
    axes = tuple(range(1, leaf.ndim))
    return changed.sum(axis=axes, dtype=jnp.uint32), overflowed.sum(axis=axes, dtype=jnp.uint32)
