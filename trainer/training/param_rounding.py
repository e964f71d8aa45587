"""Rounding of initial parameters to the dtype of the state, and the number of values that it changes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import NamedSharding, PartitionSpec

from trainer.models.errors import PrepError
from trainer.models.param_tree import Tree, flatten_tree, unflatten_tree
from trainer.training.leaf_loading import LeafLoader
from trainer.training.optimizers.rounding import LOW_BITS, round_to_nearest
from trainer.training.step import StepSetup

LOW_MASK = 2**LOW_BITS - 1  # of the bits that bfloat16 lacks
ABS_MASK = 0x7FFFFFFF
INFINITY = 0x7F800000
FIRST_OVERFLOW = 0x7F7F8000  # the smallest float32 that rounds to infinity


class RoundingLoader:
    """A loader of leaves that counts the values of float32 leaves which rounding to bfloat16 changes.

    Such a leaf is loaded in float32 and rounded on its devices. Other leaves are loaded as by a `LeafLoader`.
    """

    def __init__(self, loader: LeafLoader) -> None:
        """Set the loader of the stored leaves."""
        self._loader = loader
        self._num_values = self._num_changed = 0
        self._overflowed: list[str] = []

    def load(self, name: str, target: jax.ShapeDtypeStruct) -> Array:
        """Load one leaf with the shape, dtype and sharding of `target`; all processes of a job call it.

        Raises:
            PrepError: The checkpoint lacks the leaf, or it has another shape.
        """
        spec = self._loader.reader.leaves.get(name)
        if target.dtype != jnp.bfloat16 or spec is None or spec.dtype == "bfloat16":
            return self._loader.load(name, target)
        leaf = self._loader.load(name, jax.ShapeDtypeStruct(target.shape, jnp.float32, sharding=target.sharding))
        num_changed, num_overflows = _count_changes(leaf)
        self._num_values += leaf.size
        self._num_changed += num_changed
        if num_overflows:
            self._overflowed.append(name)
        return jax.jit(round_to_nearest, out_shardings=target.sharding)(leaf)

    def counts(self) -> dict[str, Any]:
        """Return the dtypes `from` and `to`, and the numbers of rounded `values` and of the `changed` ones.

        Raises:
            PrepError: A finite value is too large for bfloat16.
        """
        if self._overflowed:
            first = self._overflowed[0]
            why = f"{len(self._overflowed)} parameters, {first} first, have values that are too large for it"
            raise PrepError("parameters cannot be rounded to bfloat16", why, "`--set model.param_dtype=float32`")
        return {"from": "float32", "to": "bfloat16", "values": self._num_values, "changed": self._num_changed}


def round_params(params: Tree, setup: StepSetup) -> Tree:
    """Round random float32 parameters to the nearest values in the dtypes of the state."""
    return unflatten_tree(
        {
            path: round_to_nearest(leaf) if setup.param_dtype_of(path) == "bfloat16" else leaf
            for path, leaf in flatten_tree(params).items()
        }
    )


def _count_changes(leaf: Array) -> tuple[int, int]:
    """Return the numbers of float32 values that rounding to bfloat16 changes, and that it makes infinite."""
    sharding = leaf.sharding
    replicated = NamedSharding(sharding.mesh, PartitionSpec()) if isinstance(sharding, NamedSharding) else None
    counts = jax.jit(_count_rows, out_shardings=replicated)(leaf)
    num_changed, num_overflows = (int(np.asarray(count).sum(dtype=np.int64)) for count in counts)
    return num_changed, num_overflows


def _count_rows(leaf: Array) -> tuple[Array, Array]:
    """Return the numbers of changed and of overflowed values of each row of the first axis, uint32.

    The bits are compared: devices may flush subnormal values. NaN stays NaN.
    """
    bits = lax.bitcast_convert_type(leaf, jnp.uint32)
    magnitude = bits & ABS_MASK
    masks = (bits & LOW_MASK != 0) & (magnitude <= INFINITY), (magnitude >= FIRST_OVERFLOW) & (magnitude < INFINITY)
    changed, overflowed = (mask.sum(axis=tuple(range(1, leaf.ndim)), dtype=jnp.uint32) for mask in masks)
    return changed, overflowed
