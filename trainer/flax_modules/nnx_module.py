"""A model as a module of `flax.nnx`. Its parameters are the leaves of prep's tree."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx

from prepcli.models.param_tree import Tree
from trainer.flax_modules.computation import Computation
from trainer.flax_modules.language_model import LanguageModel


class NNXModel(LanguageModel, nnx.Module):
    """A language model whose `nnx.Param` leaves are arranged and named as in prep's parameter tree.

    `nnx.to_pure_dict(nnx.state(model, nnx.Param))` is the tree, and `nnx.update(model, tree)` sets it. No array is
    copied, and arrays keep their shardings. The model has no dropout.
    """

    def __init__(self, params: Tree, computation: Computation) -> None:
        """Create the module.

        Args:
            params: Parameters of the model.
            computation: Its forward pass.
        """
        self.computation = nnx.static(computation)
        for name, subtree in params.items():
            # flax 0.12 raises ValueError for a dict with variables in an attribute that is not marked as data.
            setattr(self, name, nnx.data(jax.tree.map(nnx.Param, subtree)))

    @property
    def params(self) -> Tree:
        """The parameters as a nested dict."""
        state: Any = nnx.state(self, nnx.Param)
        return nnx.to_pure_dict(state)

    def _params(self) -> Tree:
        return self.params
