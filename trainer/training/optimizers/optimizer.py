"""The protocol of optimizers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import optax

from trainer.models.param_tree import ParamLeaf
from trainer.training.optimizers.lr_schedule import LRSchedule


class Optimizer(Protocol):
    """An optimizer with its learning rate schedule."""

    @property
    def lr_schedule(self) -> LRSchedule:
        """The learning rate."""
        ...

    @property
    def clip_norm(self) -> float:
        """Maximum norm of the gradients; 0 for no clipping."""
        ...

    def transformation(self, leaves: Mapping[str, ParamLeaf]) -> optax.GradientTransformation:
        """Return the optax transformation of clipped gradients; the step computes params - learning rate * update.

        Args:
            leaves: Parameters by path.
        """
        ...
