"""Curves and values of long runs in bounded memory."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest

from trainer.run.run_record import (
    MAX_CURVES,
    MAX_MEDIAN_VALUES,
    EvenSample,
    RunMetrics,
    RunningCurve,
)


def test_short_curve_is_exact():
    curve = RunningCurve(8)
    points = [(step, math.sin(step)) for step in range(8)]
    for step, value in points:
        curve.add(step, value)
    assert curve.points() == points
    assert curve.last == math.sin(7)


@pytest.mark.parametrize("num_points", [9, 16, 17, 100, 1000])
def test_long_curve_has_the_extremes_of_equal_buckets(num_points: int):
    curve, values = RunningCurve(8), np.random.default_rng(num_points).random(num_points).tolist()
    for step, value in enumerate(values):
        curve.add(step, value)
    size = next(size for size in (2, 4, 8, 16, 32, 64, 128) if num_points <= 8 * size)
    buckets = [values[low : low + size] for low in range(0, num_points, size)]
    expected = []
    for number, bucket in enumerate(buckets):
        steps = sorted({bucket.index(extreme(bucket)) for extreme in (min, max)})
        expected += [(number * size + step, bucket[step]) for step in steps]
    assert curve.points() == expected
    assert curve.last == values[-1]


def test_spike_stays_visible():
    curve = RunningCurve(8)
    for step in range(10_000):
        curve.add(step, 1000.0 if step == 4321 else 1.0)
    assert (4321, 1000.0) in curve.points()
    assert len(curve.points()) <= 16


@pytest.mark.parametrize("num_items", [0, 1, 7, 8, 9, 100, 1000])
def test_even_sample_has_equal_distances(num_items: int):
    sample = EvenSample[int](8)
    for item in range(num_items):
        sample.add(item)
    assert sample.count == num_items
    assert sample.items[:1] == list(range(num_items))[:1]
    assert len({high - low for low, high in pairwise(sample.items)}) <= 1
    assert min(num_items, 4) <= len(sample.items) <= 8


def test_median_of_a_long_run_is_close():
    speeds = np.random.default_rng(0).normal(1000, 10, 3 * MAX_MEDIAN_VALUES)
    metrics = RunMetrics.of(
        {"step": step, "mfu": speed} for step, speed in enumerate(speeds.tolist())
    )
    assert np.median(metrics.median_values("mfu")) == pytest.approx(np.median(speeds), rel=1e-3)


def test_best_loss_is_of_the_last_number_of_tokens():
    lines = [(3.0, 90), (4.0, 180), (2.0, None), (5.0, 180)]
    metrics = RunMetrics.of({"step": 1, "eval_loss": loss, "eval_tokens": n} for loss, n in lines)
    assert metrics.best_eval_loss() == 4.0
    assert RunMetrics().best_eval_loss() is None


def test_hostile_metrics_are_bounded():
    metrics = RunMetrics.of(
        {"step": step, f"name{step}": 1, "x" * 1000: 1} for step in range(2 * MAX_CURVES)
    )
    assert len(metrics.curves) == MAX_CURVES
    for number in range(1000):
        metrics.add({"step": 1, "eval_loss": 1.0, "eval_tokens": number})
    assert len(metrics._best_losses) < 1000


def test_values_that_are_not_finite_are_missing():
    values = [None, math.nan, math.inf, -math.inf, "1", [1], True, 10**400, -1e301]
    metrics = RunMetrics.of({"step": 1, "loss": value} for value in values)
    assert metrics.points("loss") == []
    assert metrics.last("loss") is None
    metrics.add({"step": 10**400, "loss": 1.0})
    assert (metrics.last_step, metrics.last("loss")) == (1, None)
