"""AdamW."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import optax

from trainer.models.param_tree import ParamLeaf
from trainer.recipe.optimizer_tables import AdamWTable
from trainer.training.optimizers.scaling import scale_by_rate
from trainer.training.optimizers.weight_decay import WeightDecay


@dataclass(frozen=True, slots=True)
class AdamW:
    """Adam with decoupled weight decay (arXiv:1711.05101).

    Attributes:
        b1: Decay rate of the first moment.
        b2: Decay rate of the second moment.
        eps: Added to the denominator.
    """

    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8

    def transformation(
        self, leaves: Mapping[str, ParamLeaf], decay: WeightDecay
    ) -> optax.GradientTransformationExtraArgs:
        """Return the chain of Adam, weight decay and learning rate.

        See `UpdateRule`.
        """
        return optax.named_chain(
            ("adam", optax.scale_by_adam(self.b1, self.b2, self.eps)),
            ("decay", decay.transformation(leaves)),
            ("rate", scale_by_rate()),
        )


def build_adamw(table: AdamWTable) -> AdamW:
    """Build AdamW from its recipe table."""
    return AdamW(b1=table.b1, b2=table.b2, eps=table.eps)
