"""Which leaves of the parameter tree have weight decay. No jax."""

from __future__ import annotations

from collections.abc import Sequence

from trainer.models.leaf_patterns import matches_any
from trainer.models.param_tree import ParamLeaf

# Part of the path of relative position biases. They look like embeddings, but are added to attention scores.
POSITION_BIASES = "relative_positions"
# Logits of attention sinks. transformers' Trainer decays every parameter that is neither a norm nor a bias by its name.
SINKS = "sinks"


def decays(
    leaf: ParamLeaf,
    *,
    includes_embeddings: bool,
    exclude: Sequence[str],
    include: Sequence[str],
) -> bool:
    """Return whether weight decay applies to a leaf.

    Args:
        leaf: The leaf.
        includes_embeddings: Whether embeddings decay.
        exclude: Patterns of leaves without decay.
        include: Patterns of leaves with decay, whatever their role. `exclude` has priority.
    """
    if matches_any(exclude, leaf.path):
        return False
    if matches_any(include, leaf.path):
        return True
    parts = leaf.path.split(".")
    if POSITION_BIASES in parts:
        return False
    if SINKS in parts:
        return True
    return leaf.role == "matrix" or (leaf.role == "embedding" and includes_embeddings)
