"""Rounding of initial parameters to the dtype of the state, and the number of values that it changes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from trainer.models.errors import Key, PrepError, text
from trainer.models.param_tree import Tree, flatten_tree, unflatten_tree
from trainer.training.leaf_loading import LeafLoader
from trainer.training.optimizers.rounding import round_to_nearest
from trainer.training.param_casts import count_leaf_changes, overflow_text
from trainer.training.step import StepSetup


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
        """Load one leaf with the shape, dtype and sharding of `target`.

        All processes of a job call it.

        Raises:
            PrepError: The leaf is missing in the checkpoint, or it has another shape.
        """
        spec = self._loader.reader.leaves.get(name)
        if target.dtype != jnp.bfloat16 or spec is None or spec.dtype == "bfloat16":
            return self._loader.load(name, target)
        leaf = self._loader.load(
            name, jax.ShapeDtypeStruct(target.shape, jnp.float32, sharding=target.sharding)
        )
        num_changed, num_overflows = count_leaf_changes(leaf, "bfloat16")
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
            why = overflow_text(self._overflowed)
            hint = text("{}", Key("model.param_dtype", "float32", is_override=True))
            raise PrepError("parameters cannot be rounded to bfloat16", why, hint)
        return {
            "from": "float32",
            "to": "bfloat16",
            "values": self._num_values,
            "changed": self._num_changed,
        }


def round_params(params: Tree, setup: StepSetup) -> Tree:
    """Round random float32 parameters to the nearest values in the dtypes of the state."""
    rounded: dict[str, Array] = {}
    for path, leaf in flatten_tree(params).items():
        if setup.param_dtype_of(path) == "bfloat16":
            leaf = round_to_nearest(leaf)
        rounded[path] = leaf
    return unflatten_tree(rounded)
