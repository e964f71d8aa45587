"""Casts of parameters in saved checkpoints: the number of values that a cast changes."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from trainer.models.errors import PrepError
from trainer.models.param_tree import Tree, flatten_tree


def count_changed_values(params: Tree, dtype: str, frozen: Collection[str] = ()) -> dict[str, Any]:
    """Count the values that a cast of float32 parameters changes.

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
    counts = {path: _count_leaf(leaf, dtype) for path, leaf in leaves.items()}
    if overflowed := [path for path, (_, num_overflows) in counts.items() if num_overflows]:
        why = f"{len(overflowed)} parameters, {overflowed[0]} first, have values that are too large for it"
        raise PrepError(f"parameters cannot be saved in {dtype}", why, "`--set checkpoint.dtype=bfloat16`")
    return {
        "from": "float32",
        "to": dtype,
        "values": sum(leaf.size for leaf in leaves.values()),
        "changed": sum(num_changed for num_changed, _ in counts.values()),
    }


def _count_leaf(leaf: Array, dtype: str) -> tuple[int, int]:
    """Return the numbers of changed and of overflowed values of a leaf."""
    sharding = leaf.sharding
    replicated = NamedSharding(sharding.mesh, PartitionSpec()) if isinstance(sharding, NamedSharding) else None
    count_rows = jax.jit(partial(_count_rows, dtype=dtype), out_shardings=replicated)
    changed, overflowed = (int(np.asarray(count).sum(dtype=np.int64)) for count in count_rows(leaf))
    return changed, overflowed


def _count_rows(leaf: Array, dtype: str) -> tuple[Array, Array]:
    """Return the numbers of changed and of overflowed values of each row of the first axis, uint32."""
    cast = leaf.astype(dtype).astype(leaf.dtype)
    masks = cast != leaf, jnp.isinf(cast) & jnp.isfinite(leaf)
    changed, overflowed = (mask.sum(axis=tuple(range(1, leaf.ndim)), dtype=jnp.uint32) for mask in masks)
    return changed, overflowed
