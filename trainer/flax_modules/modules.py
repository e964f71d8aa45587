"""A model as a module of `flax.nnx` or of `flax.linen`. The parameters of both are prep's tree."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx
from jax import Array

from prepcli.core.errors import Option, text, usage_error
from prepcli.models.param_tree import Tree
from trainer.nn import transformer
from trainer.nn.attention_mask import EncoderOutput
from trainer.nn.initialization import init_leaves
from trainer.nn.lm_head import LossSums
from trainer.nn.model_spec import ForwardConfig, ModelSpec


# Compared by identity, so that jit caches functions of it.
@dataclass(frozen=True, slots=True, eq=False)
class Computation:
    """Pure functions of a model's parameters, without dropout.

    Raises:
        UsageError: The mesh splits the tokens of a sequence.
    """

    model: ModelSpec
    forward_config: ForwardConfig  # Execution options

    def __post_init__(self) -> None:
        """Check that tokens stay in their order."""
        sharding = self.forward_config.sharding
        # With sp a device holds two blocks of a row that are not neighbours, so training reorders the
        # columns of a batch (`zigzag_order`). A caller of a module does not.
        if sharding.sequence_parallel_size > 1:
            why = "Flax modules take the tokens of a sequence in their order"
            what = text("{} splits tokens over sp", Option("mesh", str(sharding.mesh)))
            raise usage_error(what, why, text("{} with fsdp or mp", Option("mesh")))

    def logits(
        self,
        params: Tree,
        tokens: Array,
        source: Array | None = None,
        source_mask: Array | None = None,
    ) -> Array:
        """Compute float32 logits [B, T, V]. Padded rows of the vocabulary have large negative logits.

        Args:
            params: Parameters of the model.
            tokens: int32 [B, T].
            source: For a model with an encoder, its tokens, int32 [B, S].
            source_mask: bool [B, S], false for padding. None if no source token is padding.
        """
        output: EncoderOutput | None = None
        if source is not None:
            output = transformer.encode(
                params, source, self.model, self.forward_config, source_mask
            )
        return transformer.compute_logits(params, tokens, self.model, self.forward_config, output)

    def loss_sums(self, params: Tree, batch: Mapping[str, Array]) -> LossSums:
        """Compute the summed cross entropy of a batch. See `trainer.nn.transformer.loss_sums`."""
        return transformer.loss_sums(params, batch, self.model, self.forward_config)


class LanguageModel:
    """Base of a module that holds the parameters of a language model."""

    computation: Computation  # The forward pass

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


class LinenModel(LanguageModel, nn.Module):
    """A language model without parameters of its own: `model.apply({"params": tree}, tokens)` takes prep's tree.

    The model has no dropout, and needs random keys for `init` only.
    """

    computation: Computation  # The forward pass

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
