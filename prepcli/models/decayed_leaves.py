"""Which leaves of the parameter tree have weight decay. No jax."""

from __future__ import annotations

from dataclasses import dataclass

from prepcli.models.leaf_patterns import matches_any
from prepcli.models.param_tree import ParamLeaf

# Part of the path of relative position biases. They look like embeddings, but are added to attention scores.
POSITION_BIASES = "relative_positions"
# Logits of attention sinks. transformers' Trainer decays every parameter that is neither a norm nor a bias by its name.
SINKS = "sinks"


@dataclass(frozen=True, slots=True)
class DecayRule:
    """Rule for the leaves with weight decay.

    Attributes:
        includes_embeddings: Whether embeddings decay.
        exclude: Patterns of leaves without decay.
        include: Patterns of leaves with decay, whatever their role. `exclude` has priority.
    """

    includes_embeddings: bool = True
    exclude: tuple[str, ...] = ()
    include: tuple[str, ...] = ()

    def decays(self, leaf: ParamLeaf) -> bool:
        """Return whether weight decay applies to a leaf."""
        if matches_any(self.exclude, leaf.path):
            return False
        if matches_any(self.include, leaf.path):
            return True
        parts = leaf.path.split(".")
        if POSITION_BIASES in parts:
            return False
        if SINKS in parts:
            return True
        return leaf.role == "matrix" or (leaf.role == "embedding" and self.includes_embeddings)
