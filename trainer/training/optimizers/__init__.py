"""Optimizers by name, the `optimizer.type` of a recipe. A step applies their updates, scaled by the learning rate."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from trainer.recipe.optimizer_tables import AnyOptimizerTable
from trainer.training.optimizers.adamw import build_adamw
from trainer.training.optimizers.lr_schedule import LRSchedule, build_lr_schedule
from trainer.training.optimizers.optimizer import Optimizer

# Name -> function from the recipe's table and the schedule to the optimizer
OPTIMIZER_BUILDERS: Mapping[str, Callable[[Any, LRSchedule], Optimizer]] = {"adamw": build_adamw}


def build_optimizer(table: AnyOptimizerTable, steps: int) -> Optimizer:
    """Build the optimizer of a run.

    Args:
        table: The recipe's `[optimizer]`.
        steps: Steps of the run.

    Raises:
        UsageError: The decay would end before the warm-up does.
    """
    return OPTIMIZER_BUILDERS[table.type](table, build_lr_schedule(table, steps))
