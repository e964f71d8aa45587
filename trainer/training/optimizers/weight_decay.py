"""Decoupled weight decay, by the role of a leaf."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import optax

from prepcli.models.decayed_leaves import DecayRule
from prepcli.models.param_tree import ParamLeaf, Tree, unflatten_tree


@dataclass(frozen=True, slots=True)
class WeightDecay:
    """Decoupled weight decay (arXiv:1711.05101).

    Matrices decay, embeddings if `includes_embeddings` is set, norms and biases only by `include`. Relative position
    biases of attention scores are biases, and attention sinks decay, as in transformers' Trainer. The role of a leaf
    decides, not its shape: stacked norm scales have two axes.

    Attributes:
        rate: Weight decay, before it is scaled by the learning rate.
        includes_embeddings: Whether embeddings decay.
        exclude: Patterns of leaves without decay.
        include: Patterns of leaves that decay whatever their role, unless they are excluded.
    """

    rate: float = 0.0
    includes_embeddings: bool = True
    exclude: tuple[str, ...] = ()
    include: tuple[str, ...] = ()

    def mask(self, leaves: Mapping[str, ParamLeaf]) -> Tree:
        """Return for each leaf whether it decays."""
        return unflatten_tree({path: self._decays(leaf) for path, leaf in leaves.items()})

    def transformation(self, leaves: Mapping[str, ParamLeaf]) -> optax.GradientTransformation:
        """Return the transformation that adds rate * parameter to the updates."""
        return optax.add_decayed_weights(self.rate, self.mask(leaves))

    def _decays(self, leaf: ParamLeaf) -> bool:
        """Return whether weight decay applies to a leaf."""
        rule = DecayRule(self.includes_embeddings, exclude=self.exclude, include=self.include)
        return rule.decays(leaf)
