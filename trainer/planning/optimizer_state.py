"""The optimizer state of a recipe as shapes, without JAX, for estimates of memory and of checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prepcli.core.errors import usage_error
from prepcli.models.leaf_matrices import factored_axes, is_layer_matrix
from prepcli.models.leaf_patterns import FREEZE_KEY, PATTERN_KEYS, check_used, matches_any
from prepcli.models.memory_inputs import FLOAT32, StateLeaf
from prepcli.models.param_tree import ParamLeaf
from trainer.recipe.optimizer_tables import (
    AdafactorTable,
    AdamWTable,
    LionTable,
    MuonTable,
    OptimizerTable,
    PalmTable,
    SGDTable,
)

BFLOAT16 = 2
NO_AXES: tuple[int, ...] = ()


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
        moments += [StateLeaf(leaf, axes, itemsize) for axes in _moment_axes(table, leaf)]
    # Averages are float32 for every dtype: with a decay rate near 1 the updates are tiny.
    averages = [StateLeaf(leaf, NO_AXES, FLOAT32) for leaf in trained if table.ema]
    return (*moments, *averages)


def _moment_axes(table: OptimizerTable, leaf: ParamLeaf) -> Iterator[tuple[int, ...]]:
    """Yield one tuple per moment of a parameter: the axes that the moment reduces, e.g. (1,) for row statistics."""
    match table:
        case AdamWTable():
            yield from (NO_AXES, NO_AXES)
        case LionTable():
            yield NO_AXES
        case SGDTable():
            if table.momentum:
                yield NO_AXES
        case MuonTable():
            # Muon keeps one momentum for matrices of layers, and two moments for all other leaves.
            yield NO_AXES
            if not is_layer_matrix(leaf):
                yield NO_AXES
        case AdafactorTable() | PalmTable():
            yield from _second_moment_axes(table, leaf)
            if table.momentum:
                yield NO_AXES
        case _:
            raise AssertionError(table)


def _second_moment_axes(
    table: AdafactorTable | PalmTable, leaf: ParamLeaf
) -> Iterator[tuple[int, ...]]:
    """Yield the axes of a leaf that are averaged in each stored second moment."""
    # A factored moment is stored as two means. Each lacks the axis of its average.
    axes = None
    if isinstance(table, AdafactorTable) and table.factored:
        axes = factored_axes(leaf, table.min_factored_size)
    if axes is None:
        yield NO_AXES
        return
    yield axes.row_mean
    yield axes.col_mean
