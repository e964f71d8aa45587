"""An optimizer: the table of a recipe with its learning rate schedule, and its state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import optax
from jax import Array

from prepcli.models.param_tree import ParamLeaf, Tree, matches_any
from trainer.recipe.lr_schedule import LRSchedule, build_lr_schedule
from trainer.recipe.optimizer_tables import AnyOptimizerTable
from trainer.training.optimizers.rounding import (
    RoundingKey,
    bfloat16_to_float32,
    narrow_moments,
    narrow_params,
)
from trainer.training.optimizers.rules import RULES

# Entry of the optimizer state with the averages.
EMA = "ema"
OptState = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Optimizer:
    """An optimizer with its learning rate schedule.

    Attributes:
        table: The recipe's `[optimizer]`.
        lr_schedule: The learning rate.
    """

    table: AnyOptimizerTable
    lr_schedule: LRSchedule

    def transformation(
        self, leaves: Mapping[str, ParamLeaf]
    ) -> optax.GradientTransformationExtraArgs:
        """Return the optax transformation from clipped gradients to updates. See `rules`.

        Args:
            leaves: Trained parameters by path.
        """
        return RULES[self.table.type](self.table, leaves)

    def unfrozen_leaves(self, leaves: Mapping[str, ParamLeaf]) -> dict[str, ParamLeaf]:
        """Return the leaves without a match in `freeze`."""
        frozen = self.table.freeze
        return {path: leaf for path, leaf in leaves.items() if not matches_any(frozen, path)}

    def init(self, params: Tree, leaves: Mapping[str, ParamLeaf]) -> OptState:
        """Return the state before the first step.

        Args:
            params: The trained parameters, in float32 or bfloat16.
            leaves: Their leaves.
        """
        wide_params = bfloat16_to_float32(params)
        state: Any = self.transformation(leaves).init(wide_params)
        moments = narrow_moments(state, leaves, self.table.moment_dtype, None)
        if not self.table.ema:
            return moments
        # A copy: the step donates both buffers, and a buffer can be donated once.
        return {**moments, EMA: jax.tree.map(lambda leaf: leaf.copy(), wide_params)}

    def update(
        self,
        gradients: Tree,
        opt_state: OptState,
        params: Tree,
        *,
        leaves: Mapping[str, ParamLeaf],
        learning_rate: Array,
        rounding: RoundingKey,
    ) -> tuple[Tree, OptState]:
        """Return the trained parameters and the state after a step.

        The update is computed in float32. Parameters in bfloat16 are rounded stochastically.
        Averages are float32, of the values before they are rounded.

        Args:
            gradients: Clipped gradients of the trained parameters, in float32.
            opt_state: The state before the step.
            params: The trained parameters before the step.
            leaves: Their leaves.
            learning_rate: The learning rate of the step, [].
            rounding: Seed and number of the step.
        """
        moments = {name: value for name, value in opt_state.items() if name != EMA}
        # A bfloat16 has 8 significant bits: near 1 its values are 1/128 apart, and updates of 1e-4
        # would be lost. Everything is computed in float32 and rounded once, at the end.
        wide_params = bfloat16_to_float32(params)
        updates, wide = self.transformation(leaves).update(
            gradients, bfloat16_to_float32(moments), wide_params, learning_rate=learning_rate
        )
        updated = jax.tree.map(lambda leaf, update: leaf - update, wide_params, updates)
        new_state: Any = narrow_moments(wide, leaves, self.table.moment_dtype, rounding)
        if ema := self.table.ema:
            # Exponential moving average of the parameters x: a <- d a + (1 - d) x. It starts at the
            # initial parameters, so it has no bias to correct. With d = 0.999 the last 1,000 steps
            # have 1 - 0.999^1000 = 63 % of the weight.
            averages = jax.tree.map(lambda a, b: ema * a + (1 - ema) * b, opt_state[EMA], updated)
            new_state = {**new_state, EMA: averages}
        return narrow_params(updated, params, leaves=leaves, key=rounding), new_state


def build_optimizer(table: AnyOptimizerTable, steps: int) -> Optimizer:
    """Return the optimizer of a run.

    Args:
        table: The recipe's `[optimizer]`.
        steps: Steps of the run.

    Raises:
        UsageError: The decay would end before the warm-up does.
    """
    return Optimizer(table, build_lr_schedule(table, steps))
