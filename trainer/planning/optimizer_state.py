"""The optimizer state of a recipe as shapes, without JAX, for estimates of memory and of checkpoints."""

from __future__ import annotations

from collections.abc import Mapping

from prepcli.core.errors import usage_error
from prepcli.models.leaf_patterns import FREEZE_KEY, PATTERN_KEYS, check_used, matches_any
from prepcli.models.memory_inputs import FLOAT32, StateLeaf
from prepcli.models.param_tree import ParamLeaf
from trainer.recipe.optimizer_tables import WHOLE, OptimizerTable

BFLOAT16 = 2


def check_patterns(table: OptimizerTable, leaves: Mapping[str, ParamLeaf]) -> None:
    """Check that each pattern of a recipe matches a parameter, and that a parameter is trained.

    Raises:
        UsageError: A pattern matches no parameter, or all are frozen.
    """
    for name in PATTERN_KEYS:
        check_used(getattr(table, name), leaves, f"optimizer.{name}")
    if not trained_leaves(table, leaves):
        raise usage_error(
            f"`{FREEZE_KEY}` matches all parameters",
            "the run would train nothing",
            "use fewer patterns",
        )


def trained_leaves(table: OptimizerTable, leaves: Mapping[str, ParamLeaf]) -> dict[str, ParamLeaf]:
    """Return the parameters trained by a recipe."""
    return {path: leaf for path, leaf in leaves.items() if not matches_any(table.freeze, path)}


def state_leaves(table: OptimizerTable, leaves: Mapping[str, ParamLeaf]) -> tuple[StateLeaf, ...]:
    """Return the leaves of the optimizer state that belong to parameters."""
    itemsize = BFLOAT16 if table.moment_dtype == "bfloat16" else FLOAT32
    trained = trained_leaves(table, leaves).values()
    moments: list[StateLeaf] = []
    for leaf in trained:
        moments += [StateLeaf(leaf, axes, itemsize) for axes in table.moments(leaf)]
    # Averages are float32 for every dtype: with a decay rate near 1 the updates are tiny.
    averages = [StateLeaf(leaf, WHOLE, FLOAT32) for leaf in trained if table.ema]
    return (*moments, *averages)
