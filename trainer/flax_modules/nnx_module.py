"""A model as a module of `flax.nnx`. Its parameters are the leaves of prep's tree."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx
from jax import Array

from trainer.flax_modules.computation import Computation
from trainer.models.param_tree import Tree
from trainer.nn.lm_head import LossSums


class NNXModel(nnx.Module):
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
            setattr(self, name, nnx.data(jax.tree.map(nnx.Param, subtree)))

    @property
    def params(self) -> Tree:
        """The parameters as prep's tree."""
        state: Any = nnx.state(self, nnx.Param)
        return nnx.to_pure_dict(state)

    def __call__(self, tokens: Array, source: Array | None = None, source_mask: Array | None = None) -> Array:
        """Compute the logits of whole sequences; see `Computation.logits`."""
        return self.computation.logits(self.params, tokens, source, source_mask)

    def loss_sums(
        self,
        tokens: Array,
        targets: Array,
        weights: Array,
        *,
        source: Array | None = None,
        source_mask: Array | None = None,
    ) -> LossSums:
        """Compute the summed cross entropy, in memory linear in the tokens; see `Computation.loss_sums`."""
        return self.computation.loss_sums(self.params, tokens, targets, weights, source=source, source_mask=source_mask)
