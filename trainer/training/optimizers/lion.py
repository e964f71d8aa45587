"""Lion."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import optax

from prepcli.models.param_tree import ParamLeaf
from trainer.recipe.optimizer_tables import LionTable
from trainer.training.optimizers.scaling import scale_by_rate
from trainer.training.optimizers.weight_decay import WeightDecay


@dataclass(frozen=True, slots=True)
class Lion:
    """The sign of an interpolation between momentum and gradient, with decoupled weight decay (arXiv:2302.06675).

    Attributes:
        b1: Weight of the momentum in the interpolation.
        b2: Decay rate of the momentum.
    """

    b1: float = 0.9
    b2: float = 0.99

    def transformation(
        self, leaves: Mapping[str, ParamLeaf], decay: WeightDecay
    ) -> optax.GradientTransformationExtraArgs:
        """Return the chain of Lion, weight decay and learning rate.

        See `UpdateRule`.
        """
        # Gradient g, momentum m, parameter x, learning rate l, weight decay w (arXiv:2302.06675,
        # algorithm 2):
        #     u = sign(b1 m + (1 - b1) g)
        #     m <- b2 m + (1 - b2) g
        #     x <- x - l (u + w x)
        # Every element of u is -1, 0 or 1. The paper chooses l 3 to 10 times smaller than for Adam.
        return optax.named_chain(
            ("lion", optax.scale_by_lion(self.b1, self.b2)),
            ("decay", decay.transformation(leaves)),
            ("rate", scale_by_rate()),
        )


def build_lion(table: LionTable) -> Lion:
    """Build Lion from its recipe table."""
    return Lion(b1=table.b1, b2=table.b2)
