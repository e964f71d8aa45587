"""The steps that remain: the newest, the milestones and the best."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prepcli.execution.checkpoint_manager import KeepRule, StepScores, removable_steps
from prepcli.planning.manifest_fields import Manifest

LOSSES = {10: 3.0, 20: 1.5, 30: None, 40: 2.0, 50: 1.5}


def step_scores(losses: Mapping[int, float | None]) -> StepScores:
    def read_manifest(step: int) -> Manifest:
        return Manifest() if losses[step] is None else Manifest(eval_loss=losses[step])

    return StepScores(read_manifest)


@pytest.mark.parametrize(
    ("rule", "removed"),
    [
        (KeepRule(), []),
        (KeepRule(2), [10, 20, 30]),
        (KeepRule(9), []),
        (KeepRule(1, milestones=20), [10, 30]),
        (KeepRule(1, best=True), [10, 30, 40]),
        (KeepRule(1, milestones=30, best=True), [10, 40]),
    ],
)
def test_steps_outside_the_rule_are_removable(rule: KeepRule, removed: list[int]):
    assert removable_steps([*LOSSES], rule, step_scores(LOSSES)) == removed


def test_steps_in_use_are_not_removable():
    assert removable_steps([1, 2, 3], KeepRule(1), step_scores({}), in_use=[1]) == [2]


def test_manifests_are_read_only_for_the_best_step():
    losses = StepScores(read_manifest=lambda step: pytest.fail("read"))
    assert removable_steps([1, 2, 3], KeepRule(1, milestones=2), losses) == [1]
    assert removable_steps([1], KeepRule(1, best=True), losses) == []


@pytest.mark.parametrize("loss", [None, math.nan, math.inf, "1.0"])
def test_steps_without_a_finite_loss_are_not_the_best(loss: Any):
    assert step_scores({1: loss}).best_steps([1]) == {}
    assert step_scores({1: loss, 2: 5.0}).best_steps([1, 2]) == {("eval_loss", None, None): 2}


def test_best_step_of_each_number_of_sequences_remains():
    """Losses of evaluations with another `eval.limit` are not compared."""
    evaluations = {
        10: (3.0, 4),
        20: (1.0, 4),
        30: (2.0, 9),
        40: (1.5, 9),
        50: (1.5, 9),
        60: (None, 9),
    }

    def read_manifest(step: int) -> Manifest:
        loss, sequences = evaluations[step]
        return Manifest(eval_loss=loss, eval_sequences=sequences)

    losses = StepScores(read_manifest)
    assert removable_steps([*evaluations], KeepRule(1, best=True), losses) == [10, 30, 50]
    assert losses.best_steps([*evaluations]) == {
        ("eval_loss", 4, None): 20,
        ("eval_loss", 9, None): 40,
    }


@given(
    st.dictionaries(st.integers(1, 60), st.none() | st.floats(0, 9)),
    st.integers(1, 4),
    st.integers(0, 9),
    st.booleans(),
)
def test_newest_milestones_and_best_always_remain(
    losses: dict[int, float | None], newest: int, milestones: int, best: bool
):
    steps = sorted(losses)
    removed = removable_steps(steps, KeepRule(newest, milestones, best), step_scores(losses))
    remaining = [step for step in steps if step not in removed]
    assert remaining[-newest:] == steps[-newest:]
    assert all(step in remaining for step in steps if milestones and step % milestones == 0)
    known = {step: loss for step, loss in losses.items() if loss is not None}
    if best and known:
        assert any(known.get(step) == min(known.values()) for step in remaining)
    assert (
        len(remaining)
        <= newest + sum(bool(milestones) and step % milestones == 0 for step in steps) + best
    )
