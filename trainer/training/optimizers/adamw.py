"""AdamW."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import optax

from prepcli.models.param_tree import ParamLeaf
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
        # Gradient g, moments m and v, parameter x, learning rate l, weight decay w, step t from 1
        # (arXiv:1711.05101, algorithm 2):
        #     m <- b1 m + (1 - b1) g          v <- b2 v + (1 - b2) g^2
        #     u = (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)
        #     x <- x - l (u + w x)
        # The decay comes after the moments: in Adam with L2 regularization, w x would be divided by
        # sqrt(v) too, and parameters with large gradients would hardly decay.
        return optax.named_chain(
            ("adam", optax.scale_by_adam(self.b1, self.b2, self.eps)),
            ("decay", decay.transformation(leaves)),
            ("rate", scale_by_rate()),
        )


def build_adamw(table: AdamWTable) -> AdamW:
    """Build AdamW from its recipe table."""
    return AdamW(b1=table.b1, b2=table.b2, eps=table.eps)
