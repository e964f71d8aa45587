"""A model as a module of `flax.linen`. Its collection `params` is prep's tree."""

from __future__ import annotations

from flax import linen as nn
from jax import Array

from prepcli.models.param_tree import Tree
from trainer.flax_modules.computation import Computation
from trainer.flax_modules.language_model import LanguageModel
from trainer.nn.initialization import init_leaves


class LinenModel(LanguageModel, nn.Module):
    """A language model without parameters of its own: `model.apply({"params": tree}, tokens)` takes prep's tree.

    The model has no dropout, and needs random keys for `init` only.

    Attributes:
        computation: The forward pass.
    """

    computation: Computation

    # linen allows `self.param` only in `setup` and in one compact method.
    @nn.compact
    def _params(self) -> Tree:
        """Return the parameters, or initialize them: one linen parameter per key of prep's tree."""
        model = self.computation.model

        def init_subtree(key: Array, name: str) -> Tree:
            leaves = {
                path: leaf for path, leaf in model.leaves.items() if path.partition(".")[0] == name
            }
            # The path of a leaf is part of its random key, so leaves of one subtree get different values.
            return init_leaves(leaves, key, model)[name]

        names = dict.fromkeys(path.partition(".")[0] for path in model.leaves)
        return {name: self.param(name, init_subtree, name) for name in names}
