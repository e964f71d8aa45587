"""The forward pass and the loss of a model, as the modules of Flax call them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from jax import Array

from prepcli.core.errors import Option, text, usage_error
from prepcli.models.param_tree import Tree
from trainer.nn import transformer
from trainer.nn.attention_mask import EncoderOutput
from trainer.nn.lm_head import LossSums
from trainer.nn.model_spec import ForwardConfig, ModelSpec


# Compared by identity, so that jit caches functions of it.
@dataclass(frozen=True, slots=True, eq=False)
class Computation:
    """Pure functions of a model's parameters, without dropout.

    Attributes:
        model: The model.
        forward_config: Execution options.

    Raises:
        UsageError: The mesh splits the tokens of a sequence.
    """

    model: ModelSpec
    forward_config: ForwardConfig

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
