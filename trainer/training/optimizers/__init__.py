"""Optimizers by name, the `optimizer.type` of a recipe. A step subtracts their updates, scaled by the learning rate."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from trainer.recipe.lr_schedule import build_lr_schedule
from trainer.recipe.optimizer_tables import AnyOptimizerTable
from trainer.training.optimizers.adafactor import build_adafactor, build_palm
from trainer.training.optimizers.adamw import build_adamw
from trainer.training.optimizers.lion import build_lion
from trainer.training.optimizers.muon import build_muon
from trainer.training.optimizers.optimizer import Optimizer, UpdateRule
from trainer.training.optimizers.sgd import build_sgd
from trainer.training.optimizers.weight_decay import WeightDecay

# Name -> function from the recipe's table to the update rule
RULE_BUILDERS: Mapping[str, Callable[[Any], UpdateRule]] = {
    "adamw": build_adamw,
    "adafactor": build_adafactor,
    "lion": build_lion,
    "muon": build_muon,
    "sgd": build_sgd,
    "palm": build_palm,
}


def build_optimizer(table: AnyOptimizerTable, steps: int) -> Optimizer:
    """Build the optimizer of a run.

    Args:
        table: The recipe's `[optimizer]`.
        steps: Steps of the run.

    Raises:
        UsageError: The decay would end before the warm-up does.
    """
    return Optimizer(
        rule=RULE_BUILDERS[table.type](table),
        lr_schedule=build_lr_schedule(table, steps),
        decay=WeightDecay(
            table.weight_decay, table.decay_embeddings, table.decay_exclude, table.decay_include
        ),
        clip_norm=table.clip_norm,
        freeze=table.freeze,
        moment_dtype=table.moment_dtype,
        ema=table.ema,
    )
