"""A model as a module of `flax.linen`. Its collection `params` is prep's tree."""

from __future__ import annotations

from flax import linen as nn
from jax import Array

from trainer.flax_modules.computation import Computation
from trainer.models.param_tree import Tree
from trainer.nn.initialization import init_leaves
from trainer.nn.lm_head import LossSums


class LinenModel(nn.Module):
    """A language model without parameters of its own: `model.apply({"params": tree}, tokens)` takes prep's tree.

    The model has no dropout, and needs random keys for `init` only.

    Attributes:
        computation: The forward pass.
    """

    computation: Computation

    def __call__(self, tokens: Array, source: Array | None = None, source_mask: Array | None = None) -> Array:
        """Compute the logits of whole sequences; see `Computation.logits`."""
        return self.computation.logits(self._params(), tokens, source, source_mask)

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
        return self.computation.loss_sums(
            self._params(), tokens, targets, weights, source=source, source_mask=source_mask
        )

    @nn.compact
    def _params(self) -> Tree:
        """Return the parameters, or initialize them: one linen parameter per key of prep's tree."""
        model = self.computation.model

        def init_subtree(key: Array, name: str) -> Tree:
            leaves = {path: leaf for path, leaf in model.leaves.items() if path.partition(".")[0] == name}
            return init_leaves(leaves, key, model)[name]

        names = dict.fromkeys(path.partition(".")[0] for path in model.leaves)
        return {name: self.param(name, init_subtree, name) for name in names}
