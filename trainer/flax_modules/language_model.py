"""Shared methods of the modules for `flax.linen` and `flax.nnx`."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from prepcli.models.param_tree import Tree
from trainer.flax_modules.computation import Computation
from trainer.nn.lm_head import LossSums


class LanguageModel:
    """Base of a module that holds the parameters of a language model.

    Attributes:
        computation: The forward pass.
    """

    computation: Computation

    def __call__(
        self, tokens: Array, source: Array | None = None, source_mask: Array | None = None
    ) -> Array:
        """Compute the logits of whole sequences. See `Computation.logits`."""
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
        """Compute the summed cross entropy in chunks of tokens, so that the logits of all tokens never exist.

        Args:
            tokens: int32 [B, T].
            targets: int32 [B, T], the next token of each token.
            weights: Weight of each target, float32 [B, T]. 0 ignores it.
            source: For a model with an encoder, its tokens, int32 [B, S].
            source_mask: bool [B, S], false for padding. None if no source token is padding.
        """
        batch = {"tokens": tokens, "targets": targets, "weights": weights}
        if source is not None:
            batch |= {
                "source": source,
                "present": jnp.ones_like(source) if source_mask is None else source_mask,
            }
        return self.computation.loss_sums(self._params(), batch)

    def _params(self) -> Tree:
        """Return the parameters as prep's tree."""
        raise NotImplementedError
