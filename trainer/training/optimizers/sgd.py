"""Stochastic gradient descent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import optax

from prepcli.models.param_tree import ParamLeaf
from trainer.recipe.optimizer_tables import SGDTable
from trainer.training.optimizers.scaling import scale_by_rate
from trainer.training.optimizers.weight_decay import WeightDecay


@dataclass(frozen=True, slots=True)
class SGD:
    """Gradient descent with momentum and decoupled weight decay.

    Attributes:
        momentum: Decay rate of the sum of gradients. 0 keeps no sum.
        nesterov: Whether to use Nesterov's momentum.
    """

    momentum: float = 0.9
    nesterov: bool = False

    def transformation(
        self, leaves: Mapping[str, ParamLeaf], decay: WeightDecay
    ) -> optax.GradientTransformationExtraArgs:
        """Return the chain of momentum, weight decay and learning rate.

        See `UpdateRule`.
        """
        # Gradient g, momentum m, parameter x, learning rate l, weight decay w:
        #     m <- b m + g
        #     u = m, or g + b m with Nesterov's momentum
        #     x <- x - l (u + w x)
        # The sum has no factor 1 - b, as in torch.optim.SGD: constant gradients are scaled by
        # 1 / (1 - b), a factor of 10 for b = 0.9.
        momentum = optax.identity()
        if self.momentum:
            momentum = optax.trace(self.momentum, self.nesterov)
        return optax.named_chain(
            ("momentum", momentum),
            ("decay", decay.transformation(leaves)),
            ("rate", scale_by_rate()),
        )


def build_sgd(table: SGDTable) -> SGD:
    """Build SGD from its recipe table."""
    return SGD(momentum=table.momentum, nesterov=table.nesterov)
